"""The manifest of a table's folder: its table, its account, and the parts that count.

**A table has one account.**  In another account its records would have their budgets again.  So the
table's id is drawn once, when the table is made, and is in the manifest and in the account (as an
entry of its chain, written first): a folder whose table's id the account does not have is refused
before anything is charged or changed.
"""

import functools
import hashlib
from pathlib import Path

import msgspec

from dpstream.accounting.errors import PolicyError, RunError
from dpstream.accounting.sessions.table import SessionTable
from dpstream.state.disk_errors import file_error, file_errors
from dpstream.state.durable import PRIVATE, replacing
from dpstream.state.ledger.balances import migrated
from dpstream.state.ledger.history import History

MANIFEST = "manifest.json"
#: Of digests of parts and manifests.
HASHER = functools.partial(hashlib.blake2b, digest_size=16, salt=b"dpstream-table")


class Part(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A file of records.

    Attributes:
        digest: of its bytes, which names it.
        rows: number of its rows.
        usable: whether its records can be used; a part holds one sort.
    """

    digest: str
    rows: int
    usable: bool

    @property
    def name(self) -> str:
        """The name of its file."""
        return f"part-{self.digest}.parquet"


class Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One version of a table.

    Attributes:
        form: version of this file's format.
        id: the table's own id, as its account has it.
        table: digest of the public model.
        version: 1, 2, ...
        id_type, id_key: of the keyed ids in the parts; ``None`` without ids.
        parts: in the order in which records were added.
    """

    form: int
    id: str
    table: str
    version: int
    id_type: str | None
    id_key: str | None
    parts: tuple[Part, ...]

    def paths(self, folder: Path) -> list[Path]:
        """Return the files of its parts."""
        return [folder / part.name for part in self.parts]

    def usable(self) -> list[Part]:
        """Return the parts that queries read."""
        return [part for part in self.parts if part.usable]


def read_manifest(folder: Path, table: SessionTable) -> Manifest:
    """Return the present version.

    Raises:
        RunError: there is none, or it is damaged.
        PolicyError: it is of another table, or of a newer program.
    """
    try:
        with open(folder / MANIFEST, "rb") as file:
            text, _, sealed = file.read().rpartition(b"\n")
    except FileNotFoundError:
        raise RunError(
            "table.coordinates", "holds no table", "make it with `dpstream table init`"
        ) from None
    except OSError as error:
        raise file_error("table.coordinates", "cannot be read", error) from None
    try:
        manifest = msgspec.json.decode(text, type=Manifest)
    except (msgspec.MsgspecError, UnicodeError):
        manifest = None
    if manifest is None or digest(text).encode() != sealed:
        raise damaged("has a damaged manifest")
    if manifest.form != 1 or manifest.table != table.digest:
        raise PolicyError(
            "table.coordinates",
            "holds another table: its dimensions, data set or regions differ, which are fixed",
            "correct the project file; for wider dimensions, make a table in another folder with "
            "`dpstream table init NEW --migrate OLD`",
        )
    return manifest


def damaged(what: str) -> RunError:
    """Return the error for a folder whose files differ from what was written."""
    return RunError(
        "table.coordinates",
        what,
        "restore the folder from a backup; or move it away and make the table again with "
        "`dpstream table init TABLE`: what was spent stays in the account",
    )


def commit(folder: Path, manifest: Manifest) -> None:
    """Make a version the present one, atomically and durably.

    Raises:
        RunError: it cannot be written.
    """
    text = msgspec.json.encode(manifest)
    with (
        file_errors("table.coordinates", "cannot be written"),
        replacing(folder / MANIFEST, PRIVATE) as draft,
    ):
        draft.write_bytes(text + b"\n" + digest(text).encode())


def refuse_table(folder: Path, option: str) -> None:
    """Refuse to make a table in a folder that holds one.

    Args:
        option: names the project file in a command, if that is needed.

    Raises:
        PolicyError: the folder holds a table.
    """
    if (folder / MANIFEST).exists():
        raise PolicyError(
            "table.coordinates",
            "holds a table already",
            f'type `dpstream sql "SELECT * FROM dpstream.budget"{option}`, which shows what it has '
            "left; "
            "change it in the data set that it was made with",
        )


def check_account(manifest: Manifest, account: History) -> None:
    """Refuse an account that is not the table's, or that continues with wider dimensions.

    Raises:
        PolicyError: the table was not made with it, or was migrated.
    """
    if account.widened not in (None, manifest.table):
        raise migrated()
    if manifest.id not in account.tables:
        raise PolicyError(
            "table.coordinates",
            f"holds the table {manifest.id}, which is none of the account {account.created.id}: "
            "its records would have their budgets twice",
            "name the data set that the table was made in, with its account",
        )


def digest(data: bytes) -> str:
    """Return the digest of a part, as in its name, or of a manifest."""
    return HASHER(data).hexdigest()

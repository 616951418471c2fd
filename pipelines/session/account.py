"""The account of a session table: made once, and named in the table's file."""

import contextlib
import re
import tomllib
from pathlib import Path

from dpstream.accounting.errors import PolicyError, UsageError
from dpstream.pipelines.session.config import Config, load_config
from dpstream.state.disk_errors import file_error
from dpstream.state.durable import replacing
from dpstream.state.ledger.events import RECORD
from dpstream.state.ledger.open import create_account, ledger_exists, open_path


def with_account(path: Path) -> tuple[Config, bool]:
    """The table of a file whose account is there, and whether it was made now.

    A process that is stopped between account and file leaves an account without a charge, which
    the same command takes up.

    Raises:
        PolicyError: another account is at the path that the file names.
        UsageError: the file cannot take the id.
    """
    config = load_config(path, without_account=True)
    if config.account.id:
        return config, False
    place = config.account
    if ledger_exists(place.path):
        with contextlib.closing(open_path(place.path)) as ledger:
            book = ledger.book()
        id_ = book.created.id
        if book.created.unit != RECORD or book.charges or book.created.data_set != place.data_set:
            raise PolicyError(
                "ledger.path",
                f"is an account already, of the data set {book.created.data_set!r} with "
                f"{len(book.charges)} charges",
                f'write id = "{id_}" if the table is a part of it, or name another path',
            )
    else:
        id_ = create_account(place.path, place.data_set, RECORD, "string", None).id
    _write_id(path, id_)
    return load_config(path), True


def _write_id(path: Path, id_: str) -> None:
    """Put the account's id into the table's file, behind the data set's name."""
    text = path.read_text(encoding="utf-8")
    line = f'id = "{id_}"'
    pattern = r"(?m)(^\[ledger\][^\n]*\n(?:(?!\[)[^\n]*\n)*?[ \t]*data_set[ \t]*=[^\n]*(?:\n|\Z))"
    new = re.sub(pattern, lambda match: match[1].rstrip("\n") + f"\n{line}\n", text, count=1)
    if tomllib.loads(new).get("ledger", {}).get("id") != id_:
        raise UsageError("ledger", "cannot be written to", f"add {line} to [ledger]")
    try:
        with replacing(path, path.stat().st_mode & 0o666) as draft:
            draft.write_text(new, encoding="utf-8")
    except OSError as error:
        raise file_error("table file", "cannot be written", error) from None

"""TABLE.toml: the public model of a table with record budgets, its steward's rules, and where its
records, its ledger and its key are.

    [ledger]
    path = "ledger.db"
    data_set = "rides"
    id = "7f3a0c5d9e1b2846"           # `dpstream session init` makes the account and writes this

    [privacy]
    key_file = "noise.key"

    [table]
    name = "rides"
    folder = "rides.table"            # private: the records as coordinates
    records = "rides-*.parquet"       # or .csv, .jsonl
    id = "ride_id"                    # names a record for replace and delete

    [[dimension]]
    name = "pickup"
    type = "timestamp"
    low = "2013-01-01T00:00:00Z"
    high = "2014-01-01T00:00:00Z"
    step = "1h"
    grid = "1d"                       # queries are charged by whole cells of it

    [[dimension]]
    name = "longitude"
    type = "real"
    low = -74.3
    high = -73.7
    step = 0.001
    grid = 0.01
    missing = "point"                 # a place of its own for null and what is out of range

    [[dimension]]
    name = "vendor"
    type = "category"
    values = ["CMT", "VTS"]

    [[dimension]]
    name = "epsilon"
    type = "budget"
    kind = "epsilon"                  # or rho: a record may have one of each
    most = 4.0
    column = "budget"                 # or value = 1.0: of every record

    [quota]                           # the most that an analyst may charge to one point
    epsilon = 2.0
    [quota.analyst.alice]
    epsilon = 3.0

    [unlock]                          # so much more of an initial budget is usable each day
    start = "2024-01-01T00:00:00Z"
    share = 0.1

Everything in ``[table]`` but its places and everything in ``[[dimension]]`` is fixed before the
first record.  Quotas and the unlock schedule may change at any time.
"""

import dataclasses
import unicodedata
from fractions import Fraction
from pathlib import Path
from typing import Any, Literal

import msgspec

from dpstream.accounting import limits
from dpstream.accounting.errors import UsageError
from dpstream.accounting.places import below
from dpstream.accounting.regions.amounts import MICRO, exact, initial_of
from dpstream.accounting.regions.dimensions import Budget, Category, Integer, Real, Timestamp
from dpstream.accounting.sessions.rules import Quotas, Rules, Unlock, quota_of
from dpstream.accounting.sessions.table import AnyDimension, SessionTable
from dpstream.dp_transforms.noise.key_source import KeySource
from dpstream.dp_transforms.noise.references import KeyPlace
from dpstream.pipelines.project.file_kinds import file_kind
from dpstream.pipelines.project.text import (
    duration_micros,
    instant_micros,
    parse_toml,
    raise_decode_error,
    read_at_most,
)
from dpstream.state.ledger.open import AccountPlace, check_names, place_below, refuse_limit
from dpstream.state.private_log import keep_beside

Missing = Literal["point", "refuse"]
IdType = Literal["string", "int"]


class _Part(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A part of the file: frozen, unknown keys refused."""


class LedgerPlace(_Part, frozen=True):
    """``[ledger]``: the account's file or Spanner address, and the data set that is this table's
    alone; ``id`` is written by `dpstream session init`."""

    path: str
    data_set: str
    id: str | None = None


class TablePart(_Part, frozen=True):
    """``[table]``.

    Attributes:
        name: in the ledger.
        folder: of the records as coordinates; private.
        records: a file or glob of Parquet, CSV or JSON Lines (by its ending, perhaps compressed).
        id: column that names a record; without one records are only added.
        id_type: of it.
        cap: most regions of its account.
    """

    name: str
    folder: str
    records: str
    id: str | None = None
    id_type: IdType = "string"
    cap: int = limits.MAX_REGIONS


class DimensionPart(_Part, frozen=True):
    """``[[dimension]]``: each type has some of these, see `_dimension`."""

    name: str
    type: Literal["integer", "real", "timestamp", "category", "budget"]
    column: str | None = None
    low: float | str | None = None
    high: float | str | None = None
    step: float | str | None = None
    grid: float | str | None = None
    missing: Missing | None = None
    values: tuple[str, ...] | None = None
    kind: Literal["epsilon", "rho"] | None = None
    most: float | None = None
    value: float | None = None


class AnalystQuota(_Part, frozen=True):
    """``[quota.analyst.NAME]``."""

    epsilon: float | None = None
    rho: float | None = None


class QuotaPart(_Part, frozen=True):
    """``[quota]``: of all analysts that are not named."""

    epsilon: float | None = None
    rho: float | None = None
    analyst: dict[str, AnalystQuota] = {}


class UnlockPart(_Part, frozen=True):
    """``[unlock]``."""

    start: str
    share: float


class TableFile(_Part, frozen=True):
    """The whole file."""

    ledger: LedgerPlace
    table: TablePart
    dimension: tuple[DimensionPart, ...]
    privacy: KeyPlace = KeyPlace()
    quota: QuotaPart | None = None
    unlock: UnlockPart | None = None


@dataclasses.dataclass(frozen=True)
class Config:
    """A checked TABLE.toml; paths are absolute.

    Attributes:
        table: the public model.
        columns: of the records, one for each dimension; ``None``: it has a fixed ``value``.
        fixed: the budget that every record has, for such dimensions, else ``None``.
        id, id_type: the column that names a record.
        records: glob of the files; folder: of the table.
        account: the table's account; its id is empty in a file that `session init` has not yet
            been given.
        key: where the noise key is.
        rules: the steward's.
        base: folder of the file.
    """

    table: SessionTable
    columns: tuple[str | None, ...]
    fixed: tuple[float | None, ...]
    id: str | None
    id_type: IdType
    records: str
    folder: Path
    account: AccountPlace
    key: KeyPlace
    rules: Rules
    base: Path

    @property
    def snapshot(self) -> Path:
        """File of the account's snapshot, which any replay of the ledger can make again."""
        return self.folder / "account.npz"

    def key_source(self) -> KeySource:
        """Where the noise key is.

        Raises:
            UsageError: the file names none, or none that can be.
        """
        if self.key.key is None and self.key.insecure_test_key is None:
            raise UsageError(
                "secret", "is required to ask", "make one with `dpstream key new FILE`"
            )
        return KeySource(self.key.key, self.key.insecure_test_key)


def load_config(path: str | Path, without_account: bool = False) -> Config:
    """The table of a file; paths in it start from its folder.

    Args:
        without_account: the file may name no account's id yet.

    Raises:
        UsageError: unreadable, not TOML, unknown or missing keys, or a table that is none.
    """
    path = Path(path).absolute()
    text = read_at_most(path, "table file", "give a table file")
    keep_beside(path)
    config = config_of(parse_toml(text), path.parent)
    account = msgspec.structs.replace(config.account, file=str(path))
    config = dataclasses.replace(config, account=account)
    if not config.account.id and not without_account:
        raise UsageError(
            "account.id",
            "is required: the table has no account yet",
            f"make it with `dpstream session init {path.name}`, which writes the id",
        )
    keep_beside(config.account.path, path)
    return config


def config_of(tables: dict[str, Any], folder: Path) -> Config:
    """The table of decoded TOML; raises as `load_config` does."""
    refuse_limit(tables)
    try:
        file = msgspec.convert(tables, TableFile)
    except msgspec.ValidationError as error:
        raise_decode_error(error, TableFile)
    named = {
        "account.path": file.ledger.path,
        "table.folder": file.table.folder,
        "table.records": file.table.records,
    }
    for field, text in named.items():
        if not text or "\0" in text:
            raise UsageError(field, "must not be empty", "write a name")
    check_names(file.ledger.data_set, file.ledger.id)
    kind_of(file.table.records, "table.records")
    dimensions = tuple(_dimension(f"dimension[{n}]", p) for n, p in enumerate(file.dimension))
    table = SessionTable(name=file.table.name, dimensions=dimensions, cap=file.table.cap)
    return Config(
        table=table,
        columns=tuple(None if p.value is not None else p.column or p.name for p in file.dimension),
        fixed=tuple(p.value for p in file.dimension),
        id=file.table.id,
        id_type=file.table.id_type,
        records=str(below(folder, file.table.records, "table.records")),
        folder=below(folder, file.table.folder, "table.folder"),
        account=AccountPlace(
            place_below(folder, file.ledger.path), file.ledger.data_set, file.ledger.id or ""
        ),
        key=file.privacy.below(folder),
        rules=_rules(file),
        base=folder,
    )


def kind_of(path: str, field: str) -> str:
    """``parquet``, ``csv`` or ``jsonl``, by a file's name.

    Raises:
        UsageError: it is none of them.
    """
    kind = file_kind(path)
    if kind is None:
        raise UsageError(
            field, "is of no known kind", "use .parquet, .csv, .jsonl or .ndjson (perhaps .gz)"
        )
    return kind


#: What each type must have, and what it may have beside name, type and column.
_PARTS: dict[str, tuple[set[str], set[str]]] = {
    "integer": ({"low", "high"}, {"grid", "missing"}),
    "real": ({"low", "high", "step"}, {"grid", "missing"}),
    "timestamp": ({"low", "high"}, {"step", "grid", "missing"}),
    "category": ({"values"}, {"grid", "missing"}),
    "budget": ({"most"}, {"kind", "step", "grid", "value"}),
}


def _dimension(where: str, part: DimensionPart) -> AnyDimension:
    needed, more = _PARTS[part.type]
    for name in ("low", "high", "step", "grid", "missing", "values", "kind", "most", "value"):
        given = getattr(part, name) is not None
        if given and name not in needed | more:
            raise UsageError(f"{where}.{name}", f"is not for type {part.type}", "take it away")
        if not given and name in needed:
            raise UsageError(f"{where}.{name}", f"is required for type {part.type}", "add it")
    if part.value is not None and part.column is not None:
        raise UsageError(f"{where}.value", "is given, and a column too", "keep one of them")
    common: dict[str, Any] = {"name": part.name}
    if part.missing is not None:
        common["missing"] = part.missing
    if part.type == "timestamp":
        return _timestamp(where, part, common)
    step = Fraction(1)
    if part.step is not None:
        step = exact(part.step, f"{where}.step")
    if part.type == "budget":
        step = step if part.step is not None else Fraction(1, MICRO)
        micro = _whole(f"{where}.step", step * MICRO, "millionths")
        common |= {"kind": part.kind or "epsilon", "most": part.most, "step": micro}
    if part.grid is not None:
        common["grid"] = _steps(where, exact(part.grid, f"{where}.grid"), step)
    if part.type == "category":
        codes = tuple(unicodedata.normalize("NFC", code) for code in part.values or ())
        return Category(codes=codes, **common)
    if part.type == "budget":
        if part.value is not None:
            initial_of(part.value, f"{where}.value")
        return Budget(**common)
    low, high = exact(part.low or 0, f"{where}.low"), exact(part.high or 0, f"{where}.high")
    if part.type == "integer":
        return Integer(
            low=_whole(f"{where}.low", low, "1"), high=_whole(f"{where}.high", high, "1"), **common
        )
    return Real(low=float(low), high=float(high), step=float(step), **common)


def _timestamp(where: str, part: DimensionPart, common: dict[str, Any]) -> Timestamp:
    low, high = (
        instant_micros(f"{where}.{name}", _text(f"{where}.{name}", getattr(part, name)))
        for name in ("low", "high")
    )
    step = duration_micros(f"{where}.step", _text(f"{where}.step", part.step or "1s"))
    if step < 1:
        raise UsageError(f"{where}.step", "must be a microsecond or more", "use a longer one")
    if part.grid is not None:
        grid = duration_micros(f"{where}.grid", _text(f"{where}.grid", part.grid))
        common["grid"] = _steps(where, Fraction(grid), Fraction(step))
    return Timestamp(low=low, high=high, step=step, **common)


def _text(field: str, value: Any) -> str:
    if not isinstance(value, str):
        raise UsageError(field, "must be a text", "write it in quotes")
    return value


def _whole(field: str, value: Fraction, of: str) -> int:
    if value.denominator != 1 or value.numerator > limits.MAX_COORDINATES << 22:
        raise UsageError(field, f"must be a whole number of {of}", "round it")
    return value.numerator


def _steps(where: str, grid: Fraction, step: Fraction) -> int:
    """A cell's width as a number of coordinates."""
    if step <= 0:
        raise UsageError(f"{where}.step", "must be above 0", "use a positive step")
    return _whole(f"{where}.grid", grid / step, "steps")


def _rules(file: TableFile) -> Rules:
    quotas, unlock = Quotas(), None
    if file.quota is not None:
        named = file.quota.analyst
        quotas = Quotas(
            epsilon={
                who: quota_of(q.epsilon, f"quota.analyst.{who}.epsilon")
                for who, q in named.items()
                if q.epsilon is not None
            },
            rho={
                who: quota_of(q.rho, f"quota.analyst.{who}.rho")
                for who, q in named.items()
                if q.rho is not None
            },
            default_epsilon=_quota(file.quota.epsilon, "quota.epsilon"),
            default_rho=_quota(file.quota.rho, "quota.rho"),
        )
    if file.unlock is not None:
        unlock = Unlock(
            start=instant_micros("unlock.start", file.unlock.start), share=file.unlock.share
        )
    return Rules(quotas=quotas, unlock=unlock)


def _quota(value: float | None, field: str) -> int | None:
    return None if value is None else quota_of(value, field)

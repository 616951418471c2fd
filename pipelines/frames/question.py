"""A question about a table: it is fixed, checked and priced before any row is read.

A question is a query (``accounting.query``) of one column.  Its digest covers everything except the
rows, so that an account recognises the same question.

The type of a column of numbers decides nothing: whether it is of whole numbers or of floats may
depend on one row (pandas makes floats of whole numbers where one is missing, readers of text where
one has a fraction), and the grid shows in every figure.  Types of unit and key decide only whether
a question is refused.
"""

import hashlib
import math
import operator
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, get_args

import msgspec
import pyarrow as pa

from dpstream.accounting.errors import PolicyError, UsageError, refuse_first
from dpstream.accounting.fields import FieldType
from dpstream.accounting.limits import MAX_KEY_COLUMNS
from dpstream.accounting.plan.unit import UnitIdentity
from dpstream.accounting.query.calibration import cost_of
from dpstream.accounting.query.families import Families, Optimise, families_of
from dpstream.accounting.query.grids import Gridded, grid_of
from dpstream.accounting.query.plan import (
    MAX_GROUPS,
    MAX_ROWS,
    ColumnKind,
    Mechanism,
    QueryColumn,
    QueryPlan,
)
from dpstream.dp_transforms.ingest.columns import identity
from dpstream.pipelines.formats.receipt import LABELS, table_bytes
from dpstream.pipelines.frames.table import check_numbers, columns_of, id_kind_of
from dpstream.state.ledger.events import Charge, ChargeKind

#: Keys of one unit that count, and rows of each, where too few units have any to choose by: public
#: constants that fit most data; noise grows with the root of the one and with the other.
MAX_KEYS, FEW_ROWS = 8, 5
#: The type of a ledger's unit by the kind of its values; others cannot be one.
_UNITS: dict[str, FieldType] = {
    "string": "string",
    "int": "int",
    "bool": "bool",
    "bytes": "bytes",
}
Figure = ColumnKind | Literal["keys"]


class Arguments(NamedTuple):
    """The arguments of a question, as a caller gave them.

    Attributes:
        kind: the kind of the answer's column: ``units``, ``count``, ``sum`` or ``mean``; or
            ``keys`` for the keys alone.
        unit, key, value: names of columns; ``key`` is empty for one figure of all rows.
        bounds: lower and upper bound of each value; ``None`` where none are needed.
        whole_numbers: whether steps of a sum are whole, by declaration alone.
        max_keys, max_rows: the most keys of a unit, and rows of a unit in each, that count;
            ``None``: chosen privately.
        public_keys: all keys that are published, whatever the rows hold.
        mechanism: the family of the noise, or ``auto``.
        optimise: how ``auto`` compares; ``None``: ``limit`` if charged, else ``answer``.
        charged: whether the question is charged in an account.
    """

    kind: Figure
    unit: Any
    key: Any
    value: Any
    bounds: Any
    whole_numbers: Any
    epsilon: Any
    delta: Any
    max_keys: Any
    max_rows: Any
    public_keys: Any
    mechanism: Any
    optimise: Any
    charged: bool


class Question(NamedTuple):
    """A checked question; public.

    Attributes:
        unit, key, value: names of columns; ``key`` is sorted, because its order is presentation.
        key_order: the key's columns in the order in which the answer shows them.
        unit_type: the type of the unit.
        kinds: the kinds of ids of each key column.
        families: the plan in each family of noise that the question can use; a plan has one
            column, with the name of its kind, or no column.
        gridded: the plan in the family that is used; after a charge, in the charge's family.
        public: canonical public keys without duplicates; ``None`` where keys are selected, or
            there is no key.
        digest: covers every field except ``key_order`` and the family that is used.
    """

    unit: str
    key: tuple[str, ...]
    key_order: tuple[str, ...]
    value: str | None
    unit_type: FieldType
    kinds: tuple[str, ...]
    families: Families
    gridded: Gridded
    public: pa.Table | None
    digest: str

    @property
    def column(self) -> QueryColumn | None:
        """The column of the answer; ``None`` if the answer has only keys."""
        columns = self.gridded.plan.columns
        return columns[0] if columns else None

    @property
    def automatic(self) -> bool:
        """Return whether the question chooses bounds of its column privately."""
        return self.column is not None and self.column.automatic

    @property
    def kind(self) -> ChargeKind:
        """The kind of the question's charge."""
        return "keys" if self.column is None else "frame"

    @property
    def request(self) -> list[bytes]:
        """The parts that identify the question in an account: its digest alone, without rows or
        paths.
        """
        return [self.digest.encode()]

    def identity(self, unit: str) -> UnitIdentity:
        """Return the unit by its name in the account."""
        return UnitIdentity(unit, self.unit_type)

    def taking(self, gridded: Gridded) -> "Question":
        """Return the same question with the plan of one of its families."""
        return self._replace(gridded=gridded)

    def charge(self, run_id: str, unit: UnitIdentity) -> Charge:
        """Return the charge of one answer."""
        cost = cost_of(self.gridded.plan)
        figures = (cost.epsilon, cost.delta, cost.mu, cost.threshold_delta)
        return Charge(run_id, self.digest, unit.text, *figures, kind=self.kind)


def question_of(data: Any, request: Arguments) -> tuple[Question, dict[str, pa.ChunkedArray]]:
    """Return the checked question and the table's columns that it needs; read no value.

    Raises:
        UsageError: an argument cannot be used.
        PolicyError: the question as asked cannot be answered privately.
    """
    key_order = _names(request)
    key = sorted(key_order)
    named = {"unit": [request.unit], "key": key}
    if request.kind in ("sum", "mean"):
        named["value"] = [request.value]
    columns = columns_of(data, {argument: names for argument, names in named.items() if names})
    unit_kind = id_kind_of("unit", columns[request.unit].type)
    unit_type = _UNITS.get(unit_kind)
    if unit_type is None:
        raise UsageError(
            "unit", f"is a column of {unit_kind}s", "name text, whole numbers, booleans or bytes"
        )
    kinds = [id_kind_of("key", columns[name].type) for name in key]
    value = request.value if request.kind in ("sum", "mean") else None
    if value is not None:
        check_numbers("value", columns[value].type)
    public = _public(request.public_keys, key, kinds)
    families = _families(request, bool(key), public is not None)
    names = [request.unit, key, value]
    # The content of public keys, independent of its memory layout.
    listed = (
        b"" if public is None else hashlib.blake2b(table_bytes(public), digest_size=16).digest()
    )
    typed = msgspec.json.encode([names, [unit_type, *kinds]])
    digest = hashlib.blake2b(
        b"\0".join([typed, families.digest.encode(), listed]),
        digest_size=16,
        person=b"dpstream-frame",
    ).hexdigest()
    named_by = request.unit, tuple(key), tuple(key_order), value, unit_type, tuple(kinds)
    return Question(*named_by, families, families.taken(), public, digest), columns


def _names(request: Arguments) -> list[str]:
    """Return the key's columns; check names against each other, not yet against the table."""
    given = request.key
    key = [] if given is None else [given] if isinstance(given, str) else list(given)
    different = all(isinstance(name, str) for name in key) and len(set(key)) == len(key)
    usable = different and len(key) <= MAX_KEY_COLUMNS and (given is None or len(key) > 0)
    answered = {request.kind, *(f"{request.kind}_{label}" for label in LABELS.values())}
    refuse_first(
        (
            not isinstance(request.unit, str),
            UsageError("unit", "must be a column's name", "write e.g. unit='user'"),
        ),
        (
            not usable,
            UsageError(
                "key",
                f"must be a column's name, or 1 to {MAX_KEY_COLUMNS} different ones",
                "write e.g. key='page', or key=['page', 'country']",
            ),
        ),
        (
            usable and isinstance(request.unit, str) and request.unit in key,
            PolicyError(
                "key",
                "is the unit: a figure of each unit by itself protects none",
                "name a column that many units share",
            ),
        ),
        (
            request.kind in ("sum", "mean") and not isinstance(request.value, str),
            UsageError("value", "must be a column's name", "write e.g. value='seconds'"),
        ),
        (
            request.kind == "keys" and not key,
            UsageError("key", "must be a column's name", "write e.g. key='page'"),
        ),
        (
            request.kind != "keys" and usable and not answered.isdisjoint(key),
            UsageError("key", "has the name of a column of the answer", "rename the column"),
        ),
    )
    return key


def _families(request: Arguments, grouped: bool, public: bool) -> Families:
    """Return the plan of the question in each family of noise, with its grid."""
    mechanism: Mechanism = _word("mechanism", request.mechanism, get_args(Mechanism))
    optimise = _optimise(request)
    epsilon = _number("epsilon", request.epsilon, "1.0")
    delta = _number("delta", request.delta, "1e-9")
    chosen, most = request.max_keys is None, request.max_keys
    groups = MAX_KEYS if chosen else _integer("max_keys", most, MAX_GROUPS)
    selects = grouped and not public
    example = "write e.g. epsilon=1.0, delta=1e-9"
    refuse_first(
        (
            delta == 0 and selects,
            UsageError(
                "delta",
                "of 0 allows no keys of the rows: a key that one unit alone has may never be shown",
                "give delta, e.g. 1e-9, or public_keys",
            ),
        ),
        (
            delta == 0 and mechanism == "gaussian",
            UsageError(
                "mechanism",
                "'gaussian' needs a delta above 0",
                "give delta, e.g. 1e-9, or mechanism='geometric'",
            ),
        ),
        (not epsilon > 0, UsageError("epsilon", "must be positive", example)),
        (not 0 <= delta < 1, UsageError("delta", "must be below 1, and 0 or more", example)),
    )
    column, whole_steps = _column(request), request.whole_numbers
    if column is not None and not isinstance(whole_steps, bool):
        raise UsageError("whole_numbers", "must be True or False", "write whole_numbers=True")

    def plan_of(bits: int) -> QueryPlan:
        columns = [] if column is None else [column]
        return QueryPlan(
            epsilon=epsilon,
            delta=delta,
            groups=groups if grouped else 1,
            norm=None,
            mechanism=mechanism,
            selects=selects,
            columns=tuple(
                msgspec.structs.replace(c, grid=grid_of(c, whole_steps, bits)) for c in columns
            ),
            automatic_groups=grouped and chosen,
        )

    try:
        return families_of(plan_of, optimise)
    except (UsageError, ZeroDivisionError) as error:
        if isinstance(error, UsageError) and not error.field.startswith("column"):
            raise
    raise UsageError(
        "bounds",
        "lie too near each other, or too far apart, for sums in 64 bits",
        "give other bounds, of the column less a constant where all values are far from 0",
    )


def _column(request: Arguments) -> QueryColumn | None:
    """Return the column of the answer, without its grid; ``None`` for keys alone."""
    if request.kind == "keys":
        return None
    chosen = request.max_rows is None
    rows = FEW_ROWS if chosen else _integer("max_rows", request.max_rows, MAX_ROWS)
    if request.kind == "units":
        return QueryColumn("units", "units", per="group", rows=rows)
    if request.kind == "count":
        low, high = (None, None) if chosen else (0.0, float(rows))
        return QueryColumn("count", "count", low, high, per="group", rows=rows)
    if isinstance(request.bounds, str) and request.bounds == "auto":
        return QueryColumn(request.kind, request.kind, per="group", rows=rows)
    low, high = _pair(request.bounds)
    return QueryColumn(
        request.kind, request.kind, low, high, per="row", rows=rows, automatic_rows=chosen
    )


def _pair(bounds: Any) -> tuple[float, float]:
    try:
        low, high = (float(bound) for bound in bounds)
    except (TypeError, ValueError):
        low, high = math.nan, math.nan
    if not -math.inf < low < high < math.inf:
        raise UsageError(
            "bounds",
            "must be the least and the largest value that counts, the lower one first",
            "write e.g. bounds=(0, 100), from what you know without looking at the rows, or "
            "bounds='auto', which spends half of epsilon on choosing them",
        )
    return low, high


def _number(argument: str, given: Any, example: str) -> float:
    try:
        return float(operator.mul(given, 1.0))
    except (TypeError, ValueError):
        raise UsageError(argument, "must be a number", f"write e.g. {argument}={example}") from None


def _optimise(request: Arguments) -> Optimise:
    if request.optimise is None:
        return "limit" if request.charged else "answer"
    optimise: Optimise = _word("optimise", request.optimise, get_args(Optimise))
    if optimise == "limit" and not request.charged:
        raise UsageError(
            "optimise",
            "compares errors at a share of an account's limit, and no account is given",
            "leave it out, write optimise='answer', or give account=dpstream.project().account()",
        )
    return optimise


def _word(argument: str, given: Any, words: Sequence[str]) -> Any:
    if not isinstance(given, str) or given not in words:
        listed = ", ".join(map(repr, words))
        raise UsageError(argument, f"must be one of {listed}", f"write {argument}={words[0]!r}")
    return given


def _integer(argument: str, given: Any, most: int) -> int:
    try:
        number = operator.index(given)
    except TypeError:
        number = 0
    if not 1 <= number <= most:
        raise UsageError(
            argument, f"must be a whole number from 1 to {most}", f"write e.g. {argument}=5"
        )
    return number


def _public(given: Any, key: Sequence[str], kinds: Sequence[str]) -> pa.Table | None:
    """Return the canonical public keys without duplicates, in canonical order; public."""
    if given is None:
        return None
    if not key:
        raise UsageError("public_keys", "are keys, and no key is named", "give key= as well")
    distinct = keys_table(given, key, kinds).group_by(list(key)).aggregate([])
    return distinct.sort_by([(name, "ascending") for name in key])


def keys_table(given: Any, key: Sequence[str], kinds: Sequence[str]) -> pa.Table:
    """Return public keys as a table of canonical columns.

    Args:
        given: a list or Series of one key's values, or a table with the key's columns.
        key: the names of the key's columns.
        kinds: the kinds of the columns' ids.

    Raises:
        UsageError: there are no keys, or they have other types.
    """
    if hasattr(given, "columns"):
        columns = columns_of(given, {"public_keys": key})
    elif len(key) == 1:
        columns = {key[0]: _listed(given)}
    else:
        raise UsageError(
            "public_keys",
            "must be a table with all columns of the key",
            f"give a DataFrame with the columns {', '.join(key)}",
        )
    arrays = []
    for name, kind in zip(key, kinds, strict=True):
        array, fits = identity(columns[name], kind)
        if not fits.all():
            raise UsageError(
                "public_keys",
                f"hold what is no {kind}, which the key is",
                "give keys of the key's type, without missing ones",
            )
        arrays.append(array)
    table = pa.Table.from_arrays(arrays, names=list(key))
    if not table.num_rows:
        raise UsageError("public_keys", "are none", "list the keys, or leave the argument out")
    return table


def _listed(given: Any) -> pa.ChunkedArray:
    try:
        if hasattr(given, "__arrow_c_stream__"):  # a Series, or Arrow's own
            return pa.chunked_array(given)
        if isinstance(given, str | bytes):
            raise TypeError  # their characters are no keys
        return pa.chunked_array([given if isinstance(given, pa.Array) else pa.array(list(given))])
    except (pa.ArrowException, TypeError, ValueError, OverflowError):
        raise UsageError(
            "public_keys", "is no list of values of one type", "write e.g. public_keys=['a', 'b']"
        ) from None

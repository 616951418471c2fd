"""A question about a table: it is fixed, checked and priced before any row is read.

A question is a query (``accounting.query``) of one or more columns.  Its digest covers everything
except the rows, so that an account recognises the same question.

The type of a column of numbers decides nothing: whether it is of whole numbers or of floats may
depend on one row (pandas makes floats of whole numbers where one is missing, readers of text where
one has a fraction), and the grid shows in every figure.  Types of unit and key decide only whether
a question is refused.
"""

import hashlib
import math
import operator
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, get_args

import msgspec
import pyarrow as pa

from dpstream.accounting.errors import PolicyError, UsageError, refuse_first
from dpstream.accounting.fields import FieldType
from dpstream.accounting.limits import MAX_AGGREGATES, MAX_KEY_COLUMNS
from dpstream.accounting.plan.unit import UnitIdentity
from dpstream.accounting.query.calibration import cost_of
from dpstream.accounting.query.families import Families, Optimise, families_of
from dpstream.accounting.query.grids import Gridded, grid_of
from dpstream.accounting.query.plan import (
    MAX_GROUPS,
    MAX_QUANTILES,
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


class Figure(NamedTuple):
    """A figure of each key, as a caller asked for it.

    Attributes:
        kind: of the answer's column.
        value: the column that it is of; ``None`` for counts.
        bounds: lower and upper bound of each value, or ``auto``.
        whole_numbers: whether steps of a sum are whole, by declaration alone.
        at: the quantiles.
    """

    kind: ColumnKind
    value: Any = None
    bounds: Any = None
    whole_numbers: Any = False
    at: Any = ()

    def labels(self, name: str) -> list[str]:
        """Return the columns of the answer: one, or ``q50`` and so on in the place of the kind."""
        if self.kind != "quantiles":
            return [name]
        return [f"q{100 * q:g}{name.removeprefix(self.kind)}" for q in self.at]


class Arguments(NamedTuple):
    """The arguments of a question, as a caller gave them.

    Attributes:
        figures: by name; none for the keys alone.
        unit, key: names of columns; ``key`` is empty for one figure of all rows.
        max_keys, max_rows: the most keys of a unit, and rows of a unit in each, that count;
            ``None``: chosen privately.
        public_keys: all keys that are published, whatever the rows hold.
        mechanism: the family of the noise, or ``auto``.
        optimise: how ``auto`` compares; ``None``: ``limit`` if charged, else ``answer``.
        charged: whether the question is charged in an account.
    """

    figures: Mapping[str, Figure]
    unit: Any
    key: Any
    epsilon: Any
    delta: Any
    max_keys: Any
    max_rows: Any
    public_keys: Any
    mechanism: Any
    optimise: Any
    charged: bool


def figures_of(call: Mapping[str, Any]) -> dict[str, Figure]:
    """Return the figures of a call of `aggregate`, by name.

    Raises:
        UsageError: there is none, or bounds or whole numbers are of a column that has none.
    """
    kinds: tuple[ColumnKind, ...] = ("units", "count", "sum", "mean", "quantiles")
    counts = {kind: Figure(kind) for kind in kinds[:2] if call[kind]}
    names = {k: sorted(_columns(k, call[k], MAX_AGGREGATES)) for k in kinds[2:]}
    values = {value for of_kind in names.values() for value in of_kind}
    bounds, integral = (
        given if isinstance(given, Mapping) else dict.fromkeys(values, given)
        for given in (call["bounds"], call["whole_numbers"])
    )
    for argument, given in (("bounds", bounds), ("whole_numbers", integral)):
        if not given.keys() <= values:
            fix = f"write {argument} of columns in sum, mean and quantiles alone"
            raise UsageError(argument, "names a column of no figure", fix)
    figures = {
        f"{kind}_{value}": Figure(
            kind, value, bounds.get(value, "auto"), integral.get(value, False), call["at"]
        )
        for kind, of_kind in names.items()
        for value in of_kind
    }
    if not counts | figures:
        raise UsageError("figures", "are none", "write e.g. count=True, or mean='seconds'")
    return counts | figures


class Question(NamedTuple):
    """A checked question; public.

    Attributes:
        unit, key: names of columns; ``key`` is sorted, because its order is presentation.
        key_order: the key's columns in the order in which the answer shows them.
        unit_type: the type of the unit.
        kinds: the kinds of ids of each key column.
        figures: by the names of the plan's columns.
        families: the plan in each family of noise that the question can use.
        gridded: the plan in the family that is used; after a charge, in the charge's family.
        public: canonical public keys without duplicates; ``None`` where keys are selected, or
            there is no key.
        digest: covers every field except ``key_order`` and the family that is used.
    """

    unit: str
    key: tuple[str, ...]
    key_order: tuple[str, ...]
    unit_type: FieldType
    kinds: tuple[str, ...]
    figures: Mapping[str, Figure]
    families: Families
    gridded: Gridded
    public: pa.Table | None
    digest: str

    @property
    def labels(self) -> dict[str, list[str]]:
        """The columns of the answer by the plan's."""
        return {name: figure.labels(name) for name, figure in self.figures.items()}

    @property
    def counts_rows(self) -> bool:
        """Return whether a figure is of rows without a value too."""
        return any(figure.value is None for figure in self.figures.values())

    @property
    def kind(self) -> ChargeKind:
        """The kind of the question's charge."""
        return "frame" if self.figures else "keys"

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
    at = {n: _at(f.at) for n, f in request.figures.items() if f.kind == "quantiles"}
    figures = {n: f._replace(at=at.get(n, ())) for n, f in request.figures.items()}
    request = request._replace(figures=figures)
    key_order = _names(request)
    key = sorted(key_order)
    values: dict[str, list[str]] = {}
    for name, figure in figures.items():
        if figure.value is not None:
            values.setdefault(_argument(name, figure), []).append(figure.value)
    columns = columns_of(data, {"unit": [request.unit], "key": key, **values})
    unit_kind = id_kind_of("unit", columns[request.unit].type)
    unit_type = _UNITS.get(unit_kind)
    if unit_type is None:
        raise UsageError(
            "unit", f"is a column of {unit_kind}s", "name text, whole numbers, booleans or bytes"
        )
    kinds = [id_kind_of("key", columns[name].type) for name in key]
    for argument, of_argument in values.items():
        for value in of_argument:
            check_numbers(argument, columns[value].type)
    public = _public(request.public_keys, key, kinds)
    families = _families(request, bool(key), public is not None)
    names = [request.unit, key, [(name, figure.value) for name, figure in figures.items()]]
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
    named_by = request.unit, tuple(key), tuple(key_order), unit_type, tuple(kinds)
    return Question(*named_by, figures, families, families.taken(), public, digest), columns


def _names(request: Arguments) -> list[str]:
    """Return the key's columns; check names against each other, not yet against the table."""
    key = [] if request.key is None else _columns("key", request.key, MAX_KEY_COLUMNS)
    _columns("unit", request.unit, 1)
    for name, figure in request.figures.items():
        if figure.kind not in ("units", "count"):
            _columns(_argument(name, figure), figure.value, 1)
    labels = [label for name, figure in request.figures.items() for label in figure.labels(name)]
    answered = {*labels, *(f"{label}_{part}" for label in labels for part in LABELS.values())}
    refuse_first(
        (
            request.unit in key,
            PolicyError(
                "key",
                "is the unit: a figure of each unit by itself protects none",
                "name a column that many units share",
            ),
        ),
        (
            not request.figures and not key,
            UsageError("key", "must be a column's name", "write e.g. key='page'"),
        ),
        (
            not answered.isdisjoint(key),
            UsageError("key", "has the name of a column of the answer", "rename the column"),
        ),
    )
    return key


def _argument(name: str, figure: Figure) -> str:
    """Return the argument that names a figure's column."""
    return "value" if name == figure.kind else figure.kind


_EXAMPLES = {"unit": "user", "key": "page"}


def _columns(argument: str, given: Any, most: int) -> list[str]:
    """Return names of columns: a name, or, if it may be several, a list of them or none."""
    # Of a column no list is made: its values are private.
    names = list(given) if most > 1 and isinstance(given, Sequence) else [given]
    names = [given] if isinstance(given, str) else [] if given is None and most > 1 else names
    texts = all(isinstance(name, str) for name in names)
    if not texts or not len(set(names)) == len(names) <= most or (argument == "key" and not names):
        several = f", or up to {most} different ones in a list" if most > 1 else ""
        # A name that is a number, of pandas, goes by its text; another object may hold values.
        is_number = isinstance(given, int) and not isinstance(given, bool)
        example = str(given) if is_number else _EXAMPLES.get(argument, "seconds")
        rule = f"must be a column's name as a text{several}"
        raise UsageError(argument, rule, f"write e.g. {argument}={example!r}")
    return names


def _at(given: Any) -> tuple[float, ...]:
    try:
        at = sorted(map(float, given if isinstance(given, Iterable) else [given]))
    except (TypeError, ValueError):
        at = []
    labels = {f"{100 * q:g}" for q in at if 0 <= q <= 1}
    if not 0 < len(labels) == len(at) <= MAX_QUANTILES:
        rule = f"must be 1 to {MAX_QUANTILES} different numbers from 0 to 1"
        raise UsageError("at", rule, "write e.g. at=(0.25, 0.5, 0.75)")
    return tuple(at)


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
    columns = [_column(*figure, request.max_rows) for figure in request.figures.items()]
    integral = {n: f.whole_numbers for n, f in request.figures.items()}
    if not all(isinstance(switch, bool) for switch in integral.values()):
        raise UsageError("whole_numbers", "must be True or False", "write whole_numbers=True")

    def plan_of(bits: int) -> QueryPlan:
        return QueryPlan(
            epsilon=epsilon,
            delta=delta,
            groups=groups if grouped else 1,
            norm=None,
            mechanism=mechanism,
            selects=selects,
            columns=tuple(
                msgspec.structs.replace(c, grid=grid_of(c, integral[c.name], bits)) for c in columns
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


def _column(name: str, figure: Figure, max_rows: Any) -> QueryColumn:
    """Return a column of the answer, without its grid."""
    kind, chosen = figure.kind, max_rows is None
    rows = FEW_ROWS if chosen else _integer("max_rows", max_rows, MAX_ROWS)
    if kind == "units":
        return QueryColumn(name, kind, per="group", rows=rows)
    if kind == "count":
        low, high = (None, None) if chosen else (0.0, float(rows))
        return QueryColumn(name, kind, low, high, per="group", rows=rows)
    automatic = isinstance(figure.bounds, str) and figure.bounds == "auto"
    if automatic and kind != "quantiles":
        return QueryColumn(name, kind, per="group", rows=rows)
    low, high = (None, None) if automatic else _pair(figure.bounds)
    return QueryColumn(name, kind, low, high, rows=rows, at=figure.at, automatic_rows=chosen)


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

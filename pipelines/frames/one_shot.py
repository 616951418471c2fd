"""Private answers about a table in memory, each by one call: `histogram`, `count`, `sum`, `mean`,
`quantiles`, several of them as one answer (`aggregate`), and `keys`, which lists the keys.

    import dpstream

    dpstream.histogram(visits, unit="user", key="page", epsilon=1.0)

All rows of one unit together are protected.  Each call is one answer that is (epsilon, delta)-
differentially private by itself; the cost of several calls adds up (that of the figures of one
`aggregate` does not).  With ``account`` an account
adds it up and refuses a call beyond its limit.  The same question then gets the same bytes, with
their date, at no further charge, whatever rows the table has by then: ``as_of`` names the state of
the data that is asked about, ``fresh`` asks again at a new charge.

Contribution bounds of a unit (its keys, rows and values) that are not given are chosen privately,
with a part of the budget, and the answer estimates what they leave out.  Intervals are of the noise
alone.

``delta`` is a public constant unless it is given, never derived from the table, because the numbers
of its rows and units are private.  It bounds the chance, for each unit, that the answer reveals
more about the unit than epsilon allows (for example, that it shows a key which this unit alone
has); 1e-9 fits data of up to some millions of units.  With public keys, or without a key,
``delta=0`` gives a pure guarantee (geometric noise).

`plan` shows what a call would cost and how exact its answer would be.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from dpstream.accounting.query.families import Optimise
    from dpstream.accounting.query.plan import Mechanism
    from dpstream.pipelines.ask.question import Asking
    from dpstream.pipelines.frames.answer import PrivateTable
    from dpstream.pipelines.frames.plan import QuestionPlan
    from dpstream.pipelines.frames.project_file import DataSetAccount
    from dpstream.pipelines.frames.question import Arguments

#: See the module.
DELTA = 1e-9


def histogram(
    data: Any,
    *,
    unit: str,
    key: str | Sequence[str],
    epsilon: float,
    delta: float = DELTA,
    max_keys: int | None = None,
    public_keys: Any = None,
    mechanism: "Mechanism" = "auto",
    optimise: "Optimise | None" = None,
    account: "DataSetAccount | None" = None,
    fresh: bool = False,
    as_of: str = "",
    allow_large_delta: bool = False,
) -> "PrivateTable":
    """Return the number of units with each key; a unit counts once in a key, however many rows it
    has.

    Args:
        data: a DataFrame of pandas or Polars, a relation of DuckDB, an Arrow table or data set, or
            any other with an Arrow stream.
        unit: the column with the privacy unit: text, whole numbers, booleans or bytes.  A row
            without a unit, a key or a value does not count.
        key: the column, or columns, to group by; the answer has one row for each key.
        epsilon, delta: the guarantee; see the module.
        max_keys: the most keys of one unit that count, drawn at random where it has more; unless
            given, the number is chosen privately.
        public_keys: the keys of the answer, all of which are published with noise, whatever the
            rows hold: a list, or a table with the key's columns.  They must not come from the
            private rows.  Without them a key is published if enough units have it.
        mechanism: the noise: ``"gaussian"``, ``"geometric"`` (two-sided, charged plain), or
            ``"auto"``: the one with the smaller error for this question, by public numbers alone.
        optimise: how ``"auto"`` compares: ``"answer"``, this answer alone (the default without an
            account), or ``"limit"``, at an equal share of what is left of the account's limit (the
            default with one), because Gaussian charges cost less together.
        account: the account that the answer is charged in, with the data set's secret
            (``dpstream.project().account()`` or ``dpstream.account(...)``); ``None``: no account
            adds up what the calls spend.
        fresh: ask again, at a new charge, a question that was answered before.
        as_of: a public label of the state of the data, e.g. a date: the same question with another
            label is another question, with a charge of its own.
        allow_large_delta: allow a delta above 0.01, which is refused otherwise.

    Returns:
        the key's columns, ``units`` and its ``units_sd``, ``units_noise_low`` and
        ``units_noise_high`` (the ends of the noise's 95% interval), sorted by key; ``answer.cuts``
        estimates what the privately chosen bounds leave out.

    Raises:
        UsageError: an argument cannot be used.
        PolicyError: the charge exceeds the account's limit.
    """
    return _ask("histogram", locals())


def keys(
    data: Any,
    *,
    unit: str,
    key: str | Sequence[str],
    epsilon: float,
    delta: float = DELTA,
    max_keys: int | None = None,
    mechanism: "Mechanism" = "auto",
    optimise: "Optimise | None" = None,
    account: "DataSetAccount | None" = None,
    fresh: bool = False,
    as_of: str = "",
    allow_large_delta: bool = False,
) -> "PrivateTable":
    """Return the keys of the table, without any figure: all of the budget is used to find them.

    With Gaussian noise a key is returned if its noisy weighted number of units is above a
    threshold.  A unit of n keys adds 1 / sqrt(n) to each, so that with or without its rows the
    numbers of all keys move by 1 in L2, to which the noise is scaled; the threshold is so high
    that a key which one unit alone has is returned with a chance of at most ``delta``, all such
    keys together.  With geometric noise, which is charged plain, each key is returned with the
    largest chance that its part of epsilon and delta allows.

    The arguments are those of `histogram`.

    Returns:
        the key's columns, sorted.

    Raises:
        UsageError: an argument cannot be used.
        PolicyError: the charge exceeds the account's limit.
    """
    return _ask("keys", locals())


def count(
    data: Any,
    *,
    unit: str,
    epsilon: float,
    key: str | Sequence[str] | None = None,
    delta: float = DELTA,
    max_keys: int | None = None,
    max_rows: int | None = None,
    public_keys: Any = None,
    mechanism: "Mechanism" = "auto",
    optimise: "Optimise | None" = None,
    account: "DataSetAccount | None" = None,
    fresh: bool = False,
    as_of: str = "",
    allow_large_delta: bool = False,
) -> "PrivateTable":
    """Return the number of rows with each key; without a key, the number of all rows.

    Args:
        max_rows: the most rows of one unit in a key that count; unless given, the number is
            chosen privately.

    The other arguments are those of `histogram`.

    Returns:
        the key's columns, ``count``, ``count_sd``, ``count_noise_low`` and ``count_noise_high``.

    Raises:
        UsageError: an argument cannot be used.
        PolicyError: the charge exceeds the account's limit.
    """
    return _ask("count", locals())


def sum(
    data: Any,
    *,
    unit: str,
    value: str,
    epsilon: float,
    bounds: tuple[float, float] | Literal["auto"] = "auto",
    whole_numbers: bool = False,
    key: str | Sequence[str] | None = None,
    delta: float = DELTA,
    max_keys: int | None = None,
    max_rows: int | None = None,
    public_keys: Any = None,
    mechanism: "Mechanism" = "auto",
    optimise: "Optimise | None" = None,
    account: "DataSetAccount | None" = None,
    fresh: bool = False,
    as_of: str = "",
    allow_large_delta: bool = False,
) -> "PrivateTable":
    """Return the sum of a column for each key; without a key, of all rows.

    Args:
        value: the column of numbers.
        bounds: the least and largest value that counts; a value outside counts as the nearer
            bound.  Choose them from public knowledge, without looking at the rows: they decide
            the noise.  ``"auto"`` chooses bounds of a unit's sum in a key, privately, with half
            of the budget; ``max_rows`` has no effect then.
        whole_numbers: whether values are whole numbers, so that fractions are rounded, sums are
            whole, and chosen bounds reach 2^28 instead of 2^20.  The column's type does not
            decide this, because it depends on rows: one missing value makes floats of whole
            numbers in pandas, and the answer would show that.
        max_rows: about the most rows of one unit in a key that count: the unit's sum there is
            limited to so many times the bounds; unless given, the number is chosen privately.

    The other arguments are those of `histogram`.

    Returns:
        the key's columns, ``sum``, ``sum_sd``, ``sum_noise_low`` and ``sum_noise_high``.

    Raises:
        UsageError: an argument cannot be used.
        PolicyError: the charge exceeds the account's limit.
    """
    return _ask("sum", locals())


def mean(
    data: Any,
    *,
    unit: str,
    value: str,
    epsilon: float,
    bounds: tuple[float, float] | Literal["auto"] = "auto",
    whole_numbers: bool = False,
    key: str | Sequence[str] | None = None,
    delta: float = DELTA,
    max_keys: int | None = None,
    max_rows: int | None = None,
    public_keys: Any = None,
    mechanism: "Mechanism" = "auto",
    optimise: "Optimise | None" = None,
    account: "DataSetAccount | None" = None,
    fresh: bool = False,
    as_of: str = "",
    allow_large_delta: bool = False,
) -> "PrivateTable":
    """Return the mean of a column for each key; without a key, of all rows.

    The mean is a noisy sum divided by a noisy count, from one budget; it is missing where that
    count is below 1.

    Args:
        value, bounds, whole_numbers: see `sum`; ``"auto"`` chooses bounds of a unit's own mean in
            a key.
        max_rows: the most rows of one unit in a key that count; if it has more, their mean counts
            so many times; unless given, the number is chosen privately.

    The other arguments are those of `histogram`.

    Returns:
        the key's columns, ``mean``, ``mean_sd``, ``mean_noise_low`` and ``mean_noise_high``.

    Raises:
        UsageError: an argument cannot be used.
        PolicyError: the charge exceeds the account's limit.
    """
    return _ask("mean", locals())


def quantiles(
    data: Any,
    *,
    unit: str,
    value: str,
    epsilon: float,
    at: float | Sequence[float] = (0.25, 0.5, 0.75),
    bounds: tuple[float, float] | Literal["auto"] = "auto",
    whole_numbers: bool = False,
    key: str | Sequence[str] | None = None,
    delta: float = DELTA,
    max_keys: int | None = None,
    max_rows: int | None = None,
    public_keys: Any = None,
    mechanism: "Mechanism" = "auto",
    optimise: "Optimise | None" = None,
    account: "DataSetAccount | None" = None,
    fresh: bool = False,
    as_of: str = "",
    allow_large_delta: bool = False,
) -> "PrivateTable":
    """Return quantiles of a column for each key; without a key, of all rows.

    All quantiles come from one noisy tree, so that more of them cost nothing more.  They are exact
    to 1/256 of the bounds' width.

    Args:
        value, bounds, whole_numbers: see `sum`; ``"auto"`` chooses bounds of each row's value.
        at: the quantiles, each from 0 to 1.
        max_rows: the most rows of one unit in a key that count, drawn at random; unless given, the
            number is chosen privately.

    The other arguments are those of `histogram`.

    Returns:
        the key's columns, and for each quantile ``q25`` or the like with its ``q25_sd``,
        ``q25_noise_low`` and ``q25_noise_high``.

    Raises:
        UsageError: an argument cannot be used.
        PolicyError: the charge exceeds the account's limit.
    """
    return _ask("quantiles", locals())


def aggregate(
    data: Any,
    *,
    unit: str,
    epsilon: float,
    units: bool = False,
    count: bool = False,
    sum: str | Sequence[str] | None = None,
    mean: str | Sequence[str] | None = None,
    quantiles: str | Sequence[str] | None = None,
    at: float | Sequence[float] = (0.25, 0.5, 0.75),
    bounds: "Mapping[str, tuple[float, float]] | tuple[float, float] | Literal['auto']" = "auto",
    whole_numbers: "Mapping[str, bool] | bool" = False,
    key: str | Sequence[str] | None = None,
    delta: float = DELTA,
    max_keys: int | None = None,
    max_rows: int | None = None,
    public_keys: Any = None,
    mechanism: "Mechanism" = "auto",
    optimise: "Optimise | None" = None,
    account: "DataSetAccount | None" = None,
    fresh: bool = False,
    as_of: str = "",
    allow_large_delta: bool = False,
) -> "PrivateTable":
    """Return several figures of each key as one answer: one charge, one choice of keys.

        dpstream.aggregate(visits, unit="user", key="page", epsilon=1.0, count=True, mean="seconds")

    Args:
        units, count: whether to count the units, as `histogram` does, and the rows.
        sum, mean, quantiles: the column, or columns, to sum and so on.  A row without a value adds
            nothing to the figures of that column, and counts in the others.
        at: of all quantiles.
        bounds, whole_numbers: see `sum`; of all columns, or by column.

    The other arguments are those of `count`; the budget is divided evenly over the figures.

    Returns:
        the key's columns, ``units``, ``count``, ``sum_COLUMN``, ``mean_COLUMN``, ``q25_COLUMN`` and
        so on, each with its ``_sd``, ``_noise_low`` and ``_noise_high``.

    Raises:
        UsageError: an argument cannot be used.
        PolicyError: the charge exceeds the account's limit.
    """
    return _ask("aggregate", locals())


def plan(
    figure: Literal["histogram", "count", "sum", "mean", "quantiles", "aggregate", "keys"],
    data: Any,
    **arguments: Any,
) -> "QuestionPlan":
    """Return the cost of a question, whether it would be answered, and the errors of the answer.

    The plan charges nothing, writes nothing and counts no row.  It uses only the names and types
    of the table's columns (the type of a pandas column can depend on its values).
    So the plan is the same for every table with these columns, and may be published.

        dpstream.plan("count", visits, unit="user", key="page", epsilon=1.0)

    Args:
        figure: the name of the function that would be called.
        data, arguments: arguments of that function; see `histogram` and the others.

    Returns:
        the plan; an error that the function would raise before it reads a row is its ``refusal``.

    Raises:
        UsageError: there is no such function.
        TypeError: the function has no such argument, or a required one is missing.
    """
    import inspect

    from dpstream.accounting.errors import UsageError
    from dpstream.pipelines.frames.plan import planned

    if figure not in _FIGURES:
        raise UsageError(
            "figure",
            "names no figure of a table",
            f"write one of {', '.join(map(repr, _FIGURES))}",
        )
    given = inspect.signature(_FIGURES[figure]).bind(data, **arguments)
    given.apply_defaults()
    call = given.arguments
    request = functools.partial(_arguments, figure, call)
    return planned(data, request, call["account"], _how(call), call["allow_large_delta"])


_FIGURES: dict[str, Callable[..., "PrivateTable"]] = {
    "histogram": histogram,
    "count": count,
    "sum": sum,
    "mean": mean,
    "quantiles": quantiles,
    "aggregate": aggregate,
    "keys": keys,
}


def _arguments(asking: str, call: Mapping[str, Any]) -> "Arguments":
    """Return the question of a call of a function, from the call's arguments by name."""
    from dpstream.pipelines.frames.question import Arguments, Figure, figures_of

    figures = figures_of(call) if asking == "aggregate" else {}
    if asking not in ("aggregate", "keys"):
        kind: Any = "units" if asking == "histogram" else asking
        given = {name: call[name] for name in Figure._fields if name in call}
        figures = {kind: Figure(kind, **given)}
    fields = {"max_rows": None, "public_keys": None, **call, "figures": figures}
    fields["charged"] = call["account"] is not None
    return Arguments(**{name: fields[name] for name in Arguments._fields})


def _how(call: Mapping[str, Any]) -> "Asking":
    from dpstream.pipelines.ask.question import Asking

    return Asking(call["fresh"], call["as_of"])


def _ask(asking: str, call: Mapping[str, Any]) -> "PrivateTable":
    """Return the answer of a call."""
    import warnings

    from dpstream.accounting.strength import WeakGuaranteeWarning, check_delta, weaknesses
    from dpstream.pipelines.frames.answer import ask
    from dpstream.pipelines.frames.question import question_of

    question, columns = question_of(call["data"], _arguments(asking, call))
    plan = question.gridded.plan
    check_delta(plan.delta, call["allow_large_delta"], switch="allow_large_delta=True")
    for weakness in weaknesses(plan.epsilon, plan.delta):
        warnings.warn(weakness, WeakGuaranteeWarning, stacklevel=3)  # whoever called `count`, ...
    return ask(question, columns, call["account"], _how(call))

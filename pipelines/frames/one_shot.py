"""Private figures of a table in memory, each in one call: `histogram`, `count`, `sum`, `mean`,
and `keys`: which keys there are.

    import dpstream

    dpstream.histogram(visits, unit="user", key="page", epsilon=1.0)

What is protected is all rows of one unit together.  Each call is one answer, (epsilon, delta)-
differentially private by itself; several together cost what they add up to.  With ``account`` a
ledger adds them up and refuses what goes beyond its limit, and the same question is answered with
the same bytes and their date at no further charge, whatever rows the table has by then: ``as_of``
names the state of the data that is asked about, ``fresh`` asks anew at a new charge.

What of a unit counts (keys, rows, values) is chosen privately unless it is given, for a part of the
budget, and the answer estimates what that leaves out.  Intervals are of the noise alone.

``delta`` is a public constant unless it is given, never derived from the table: how many rows or
units it has is private.  It bounds the chance, for each unit, that the answer tells more of it than
epsilon says (a key that it alone has may show); 1e-9 fits data of up to some millions of units.
With public keys, or without a key, ``delta=0`` gives a pure guarantee (geometric noise).

`plan` says what a call would cost and how exact it would be.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from dpstream.accounting.query.families import Optimise
    from dpstream.accounting.query.plan import Mechanism
    from dpstream.pipelines.ask.question import Asking
    from dpstream.pipelines.frames.account import DataSetAccount
    from dpstream.pipelines.frames.plan import QuestionPlan
    from dpstream.pipelines.frames.private import PrivateTable
    from dpstream.pipelines.frames.question import Arguments, Figure

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
    """How many units each key has: a unit counts once in a key, however many rows it has there.

    Args:
        data: a DataFrame of pandas or Polars, an Arrow table, or any other with an Arrow stream.
        unit: the column that says whose row it is: text, whole numbers, booleans or bytes.  Rows
            without a unit, a key or a value count nowhere.
        key: the column, or columns, that the answer has a row for each value of.
        epsilon, delta: the guarantee; see the module.
        max_keys: of one unit, the most keys that count, drawn at random where it has more; unless
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
            (``dpstream.project().account()`` or ``dpstream.account(...)``); ``None``: nobody counts
            what is spent.
        fresh: ask anew, at a new charge, what was answered before.
        as_of: a public label of the state of the data, e.g. a date: the same question with another
            label is another question, with a charge of its own.
        allow_large_delta: a delta above 0.01 is wanted; without it such a delta is refused.

    Returns:
        key's columns, ``units`` and its ``units_sd``, ``units_noise_low`` and ``units_noise_high``
        (the ends of the noise's 95% interval), sorted by key; ``answer.cuts`` estimates what the
        bounds that were chosen leave out.

    Raises:
        UsageError: an argument is not usable; PolicyError: beyond the account's limit.
    """
    return _ask("units", locals())


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
    """Which keys there are, without any figure: all of the budget goes into finding them.

    With Gaussian noise a key is here if its noisy weighted number of units is above a threshold.  A
    unit of n keys adds 1 / sqrt(n) to each, so that with or without its rows the numbers of all
    keys move by 1 in L2, which the noise is for; the threshold is so high that a key which one unit
    alone has is here with a chance of at most ``delta``, all such keys together.  With geometric
    noise, which is charged plain, each key is here with the largest chance that its part of epsilon
    and delta allows.

    The arguments are those of `histogram`.

    Returns:
        key's columns, sorted.

    Raises:
        UsageError: an argument is not usable; PolicyError: beyond the account's limit.
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
    """How many rows each key has; without a key, how many there are.

    Args:
        max_rows: of one unit, the most rows of a key that count; unless given, it is chosen
            privately.

    The other arguments are those of `histogram`.

    Returns:
        key's columns, ``count``, ``count_sd``, ``count_noise_low`` and ``count_noise_high``.

    Raises:
        UsageError: an argument is not usable; PolicyError: beyond the account's limit.
    """
    return _ask("count", locals())


def sum(
    data: Any,
    *,
    unit: str,
    value: str,
    epsilon: float,
    bounds: tuple[float, float] | Literal["auto"] = "auto",
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
    """The sum of a column for each key; without a key, of all rows.

    Args:
        value: the column of numbers.
        bounds: least and largest value that counts: others are taken as the nearer one.  From what
            is known without looking at the rows: they decide the noise.  ``"auto"`` chooses bounds
            of a unit's sum in a key, privately, with half of the budget; ``max_rows`` has no effect
            then.
        max_rows: of one unit, about the most rows of a key that count: its sum there is held within
            so many times the bounds; unless given, it is chosen privately.

    The other arguments are those of `histogram`.

    Returns:
        key's columns, ``sum``, ``sum_sd``, ``sum_noise_low`` and ``sum_noise_high``.

    Raises:
        UsageError: an argument is not usable; PolicyError: beyond the account's limit.
    """
    return _ask("sum", locals())


def mean(
    data: Any,
    *,
    unit: str,
    value: str,
    epsilon: float,
    bounds: tuple[float, float] | Literal["auto"] = "auto",
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
    """The mean of a column for each key; without a key, of all rows.

    It is a noisy sum over a noisy count, from one budget; missing where that count is below 1.

    Args:
        value, bounds: as of `sum`; ``"auto"`` chooses bounds of a unit's own mean in a key.
        max_rows: of one unit, the rows of a key that count; of more, their mean counts so many
            times; unless given, it is chosen privately.

    The other arguments are those of `histogram`.

    Returns:
        key's columns, ``mean``, ``mean_sd``, ``mean_noise_low`` and ``mean_noise_high``.

    Raises:
        UsageError: an argument is not usable; PolicyError: beyond the account's limit.
    """
    return _ask("mean", locals())


def plan(
    figure: Literal["histogram", "count", "sum", "mean", "keys"], data: Any, **arguments: Any
) -> "QuestionPlan":
    """What a question would cost, whether it would be answered, and how exact it would be.

    Charges nothing, writes nothing and counts no row: of the table only the names and types of its
    columns are used (those of a pandas column of objects are inferred from its values).  So the
    plan is the same for every table with these columns, and all of it may be published.

        dpstream.plan("count", visits, unit="user", key="page", epsilon=1.0)

    Args:
        figure: the name of the function that would be called.
        data, arguments: what it would be given: see `histogram`, `count`, `sum` and `mean`.

    Returns:
        the plan; whatever the function would refuse before it reads a row is its ``refusal``.

    Raises:
        UsageError: there is no such function; TypeError: it has no such argument, or lacks one.
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
    function, kind = _FIGURES[figure]
    given = inspect.signature(function).bind(data, **arguments)
    given.apply_defaults()
    call = given.arguments
    request, account = _arguments(kind, call), call["account"]
    return planned(data, request, account, _how(call), call["allow_large_delta"])


_FIGURES: dict[str, tuple[Callable[..., "PrivateTable"], "Figure"]] = {
    "histogram": (histogram, "units"),
    "count": (count, "count"),
    "sum": (sum, "sum"),
    "mean": (mean, "mean"),
    "keys": (keys, "keys"),
}


def _arguments(kind: "Figure", call: Mapping[str, Any]) -> "Arguments":
    """The question of a call, by the names of its arguments."""
    from dpstream.pipelines.frames.question import Arguments

    given: dict[str, Any] = {
        "kind": kind,
        **dict.fromkeys(("value", "bounds", "public_keys")),
        "max_rows": 1,
    }
    given |= call
    given["charged"] = call["account"] is not None
    return Arguments(**{name: given[name] for name in Arguments._fields})


def _how(call: Mapping[str, Any]) -> "Asking":
    from dpstream.pipelines.ask.question import Asking

    return Asking(call["fresh"], call["as_of"])


def _ask(kind: "Figure", call: Mapping[str, Any]) -> "PrivateTable":
    """The answer of a call."""
    import warnings

    from dpstream.accounting.strength import WeakGuaranteeWarning, check_delta, weaknesses
    from dpstream.pipelines.frames.answer import ask
    from dpstream.pipelines.frames.question import question_of

    question, columns = question_of(call["data"], _arguments(kind, call))
    plan = question.gridded.plan
    check_delta(plan.delta, call["allow_large_delta"], switch="allow_large_delta=True")
    for weakness in weaknesses(plan.epsilon, plan.delta):
        warnings.warn(weakness, WeakGuaranteeWarning, stacklevel=3)  # whoever called `count`, ...
    return ask(question, columns, call["account"], _how(call))

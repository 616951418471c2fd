"""What statements would cost, whether they would be answered, and how good their answers would be;
charges nothing.  Of the data nothing is read.

All of it is public: plans, noise and thresholds are fixed before a row is read, and the ledger
holds figures of guarantees only.  Bounds that the query would choose are not known yet: the noise
of such a column is that for bounds (0, 1), and each part says by what of the bounds it is to be
multiplied (``times``).
"""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec
from sqlglot import exp

from dpstream.accounting.composition import epsilon_left, epsilon_spent, mu_left
from dpstream.accounting.plan.unit import composed
from dpstream.accounting.query.calibration import QueryBudget, expected
from dpstream.accounting.query.grids import ASSUMED, grids_of
from dpstream.accounting.strength import weaknesses
from dpstream.pipelines.ask.question import ONCE, Asking
from dpstream.pipelines.operate.acceptance import Acceptance, Request, of_requests
from dpstream.pipelines.sql.catalog import Catalog
from dpstream.pipelines.sql.query_plan import Question, question_of
from dpstream.pipelines.sql.rewrite import stage_one
from dpstream.state.ledger.charges import Charge
from dpstream.state.ledger.open import read_book

#: What noise grows with, by kind of column and part; that of others is the same for all bounds.
_TIMES = {
    ("count", "count"): "high", ("sum", "sum"): "max(|low|, |high|)", ("mean", "sum"): "high - low",
    ("var", "sum"): "high - low", ("var", "square"): "(high - low)^2",
    ("stddev", "sum"): "high - low", ("stddev", "square"): "(high - low)^2",
}  # fmt: skip


class Explained(NamedTuple):
    """One statement.

    Attributes:
        plan: what DuckDB would run, in its dialect.
        columns: name, kind, whether bounds are ``automatic``, which were ``assumed`` then, and each
            part's noise: ``sd`` and ``within``, the half-width of its 95% interval; both times
            ``times``, if that is not ``None``, of the bounds that the query will choose.
        cost: epsilon, delta, mu and threshold_delta of its charge.
        warnings: of what its guarantee promises.
        selection: tau in units, and how many units a group needs for an even chance to be shown,
            each in one group or in as many as may be; ``None`` if no groups are selected.
    """

    plan: str
    columns: list[dict[str, Any]]
    cost: dict[str, Any]
    warnings: list[str]
    selection: dict[str, float] | None


class Explanation(NamedTuple):
    """Statements together.

    Attributes:
        together: epsilon that all of them spend at the limit's delta, were they the only ones.
        acceptance: whether they would be answered now, one after the other.
    """

    statements: list[Explained]
    together: dict[str, float]
    acceptance: Acceptance


def explain(catalog: Catalog, statements: str | Sequence[str], how: Asking = ONCE) -> Explanation:
    """Explain one statement or several.

    Args:
        how: whether they would be asked anew, and of which state of the data.

    Raises:
        DpstreamError: one of them is not usable or not private as written.
    """
    texts = [statements] if isinstance(statements, str) else list(statements)
    questions = [question_of(text, catalog) for text in texts]
    charges = [q.charge(catalog, f"{i:032x}") for i, q in enumerate(questions)]
    place, limit = catalog.ledger, catalog.ledger.limit
    requests = [
        Request(charge, functools.partial(_request, question, catalog, how.as_of))
        for question, charge in zip(questions, charges, strict=True)
    ]
    alone = epsilon_spent(composed(charges).spends, limit.delta) if charges else 0.0
    return Explanation(
        [_explained(q, c, catalog) for q, c in zip(questions, charges, strict=True)],
        {"epsilon": alone, "delta": limit.delta},
        of_requests(place, requests, how.fresh),
    )


def _request(question: Question, catalog: Catalog, as_of: str) -> str:
    from dpstream.pipelines.sql.ask import request_of  # of a statement that was charged before

    return request_of(question, catalog, as_of)


def budget(catalog: Catalog) -> dict[str, Any]:
    """What the data set's ledger holds: limit, spent, left (a plain epsilon, or mu of Gaussian
    noise), number of charges."""
    limit = catalog.ledger.limit
    charges = read_book(catalog.ledger.path, catalog.ledger.data_set).charges
    spends = composed(charges).spends if charges else []
    spent = epsilon_spent(spends, limit.delta) if charges else 0.0
    return {
        "data_set": catalog.ledger.data_set,
        "unit": catalog.unit.name,
        "limit": {"epsilon": limit.epsilon, "delta": limit.delta},
        "spent": {"epsilon": spent, "delta": limit.delta},
        "left": {
            "epsilon": epsilon_left(spends, limit.epsilon, limit.delta),
            "mu": mu_left(spends, limit.epsilon, limit.delta),
        },
        "charges": len(charges),
        "warnings": limit.warnings,
    }


def _explained(question: Question, charge: Charge, catalog: Catalog) -> Explained:
    plan = question.sketched()
    found = question.budget(plan)
    query: exp.Select = stage_one(question.asked, catalog, grids_of(plan))
    automatic = {column.name for column in question.plan.columns if column.automatic}
    labels: dict[str, list[str]] = {}
    for label, output in question.outputs.items():
        labels.setdefault(output.column, []).append(label)
    columns = []
    for row in expected(plan, found):
        open_ = row["name"] in automatic
        for part in row["parts"]:
            part["times"] = _TIMES.get((row["kind"], part["what"])) if open_ else None
        names, assumed = ", ".join(labels[row["name"]]), list(ASSUMED) if open_ else None
        columns.append({**row, "name": names, "automatic": open_, "assumed": assumed})
    cost = {key: getattr(charge, key) for key in ("epsilon", "delta", "mu", "threshold_delta")}
    text = query.sql("duckdb", pretty=True, comments=False)
    warnings = weaknesses(charge.epsilon, charge.delta)
    return Explained(text, columns, cost, warnings, _selection(question, found))


def _selection(question: Question, found: QueryBudget) -> dict[str, float] | None:
    chosen, least = found.selection, question.plan.min_units
    if chosen is None:
        return None
    part = None if chosen.tested is None else found.parts[chosen.tested].part
    count = 0.0 if part is None else part.alone
    return {
        "tau": chosen.tau / chosen.most,
        "even_chance_one_group": chosen.even_chance(1, least, count),
        "even_chance_all_groups": chosen.even_chance(found.groups, least, count),
        "min_units": least,
    }


def as_builtins(found: Explanation) -> dict[str, Any]:
    """The same for JSON."""
    out = found._asdict()
    out["statements"] = [one._asdict() for one in found.statements]
    out["acceptance"] = found.acceptance.as_dict()
    out["warnings"] = list(found.acceptance.warnings)
    return dict(msgspec.to_builtins(out))

"""What other mechanisms would give the same job, compared before any data is read.

The criterion is public: expected results at window close on a REFERENCE population, not on
the job's data.  Its keys have n units with density n^-1.7 (the sizes of a Zipf-Mandelbrot key
distribution of exponent 1.4), its units have the record counts of the literature's synthetic
stream (Zipf-Mandelbrot, q = 26, s = 6.738; mechanism.md section 1), each record's value at L,
arriving evenly over the window.  A key of n units is selected if its statistic passes at the
easiest trigger; published it is wrong by the noise's mean size, else by n.  (Mode ``rounds`` is
scored with the final flush, which publishes every selected key at close.)

``recommended`` is, among the rows that count what the job counts (one record per (unit, key)
is another figure than every record), the one with the most keys of those within 2% of the
smallest expected error.
"""

import itertools
import math
from typing import Any

import msgspec
import numpy as np
from scipy.special import ndtr

from dpstream.accounting.arrays import Float64
from dpstream.accounting.budget import Budget, allocate
from dpstream.accounting.errors import DpstreamError, PolicyError
from dpstream.accounting.limits import DECODE_BITS
from dpstream.accounting.plan.plan import Plan
from dpstream.accounting.plan.privacy import Privacy
from dpstream.accounting.weights import EVEN, MILD, STEEP

#: Errors within this factor count as equal; then keys decide.
_NEAR = 1.02
#: Sizes of the reference keys and the exponent of their density.
_SIZES = np.geomspace(1, 1e6, 400)
_DENSITY = -1.7


class Alternative(msgspec.Struct, frozen=True):
    """One mechanism for the job, on the reference population.

    Attributes:
        settings: keys of ``[privacy]`` that differ between the rows.
        same: whether it counts what the job counts.
        keys, error: expected released keys and absolute error, relative to the job's own.
        units: units of a key (of the reference's mix of pairs) for an even chance at close.
        sd: sd of the first column's noise at close, in records at the bound L.
        refused: why the job cannot use it, else empty.
        recommended: by the criterion of the module's text.
    """

    settings: dict[str, Any]
    same: bool
    keys: float = math.nan
    error: float = math.nan
    units: float = math.nan
    sd: float = math.nan
    refused: str = ""
    recommended: bool = False


def compare(plan: Plan) -> list[Alternative]:
    """All general mechanisms for the plan's job, the job's own first.

    Returns:
        Empty for plans that select no keys or are not sound, or that only a run from before can
        have: nothing to choose, or to compare with, there.
    """
    if not plan.design.selects:
        return []
    try:
        own = _evaluate(plan, allocate(plan))
    except PolicyError:
        return []
    rows = [_row(plan, _settings(plan.privacy), own)]
    for settings in _candidates():
        if settings != rows[0].settings:
            rows.append(_row(plan, settings, own))
    same = [r for r in rows if r.same and not r.refused]
    least = min(r.error for r in same)
    near = [r for r in same if r.error <= least * _NEAR]
    best = max(near, key=lambda r: 0.0 if math.isnan(r.keys) else round(r.keys, 2))
    replace = msgspec.structs.replace
    return [replace(row, recommended=row is best) for row in rows]


def _candidates() -> list[dict[str, Any]]:
    none: dict[str, Any] = {"per_key_bound": None, "weights": None, "combine": False}
    kinds = [
        none,
        {**none, "weights": MILD},
        {**none, "weights": EVEN},
        {**none, "weights": STEEP},
        {**none, "per_key_bound": 1},
        {"per_key_bound": 1, "weights": STEEP, "combine": True},
    ]
    sticky = [
        {"mode": "sticky", "strategy": strategy, **kind}
        for strategy, kind in itertools.product(("blt", "toeplitz", "tree"), kinds)
    ]
    rounds = [{"mode": "rounds", "strategy": s, **none} for s in ("blt", "tree")]
    return [*sticky, *rounds]


def _settings(privacy: Privacy) -> dict[str, Any]:
    names = ("mode", "strategy", "per_key_bound", "weights", "combine")
    return {name: getattr(privacy, name) for name in names}


def _row(plan: Plan, settings: dict[str, Any], own: dict[str, float]) -> Alternative:
    """One alternative with the job's guarantee and columns."""
    kept: dict[str, Any] = {}
    if settings != _settings(plan.privacy):
        kept["selection_share"] = None
    if settings["mode"] != "sticky":
        kept |= {"select_every": None, "tests": None}
    if settings["weights"] is None:
        kept["skip"] = False
    kept["final_flush"] = settings["mode"] == "rounds"
    same = settings["per_key_bound"] == plan.privacy.per_key_bound
    try:
        privacy = msgspec.structs.replace(plan.privacy, **settings, **kept)
        other = msgspec.structs.replace(plan, privacy=privacy)
        found = _evaluate(other, allocate(other))
    except DpstreamError as error:
        return Alternative(settings, same, refused=error.rule)
    keys = found["keys"] / own["keys"] if own["keys"] > 0 else math.nan
    wrong = found["error"] / own["error"]
    return Alternative(settings, same, keys, wrong, found["units"], found["sd"])


def _evaluate(plan: Plan, budget: Budget) -> dict[str, float]:
    """Expected keys, error, even-chance units and final sd on the reference population."""
    assert budget.statistic is not None and budget.tau is not None
    statistic, tau = budget.statistic, budget.tau / 2.0**DECODE_BITS
    per_unit = _reference(plan, budget)
    part = np.arange(1, len(tau) + 1) / len(tau)
    if plan.design.schedule is not None:
        part = plan.design.test_triggers / plan.design.triggers
    reached = np.multiply.outer(_SIZES * per_unit, part) - tau
    chance = ndtr((reached / statistic.sd).max(axis=1))
    sd = _final_sd(plan, budget)
    wrong = chance * sd * math.sqrt(2 / math.pi) + (1 - chance) * _SIZES
    density = _SIZES**_DENSITY
    return {
        "keys": float(np.trapezoid(density * chance, _SIZES)),
        "error": float(np.trapezoid(density * wrong, _SIZES)),
        "units": float(np.interp(0.5, chance, _SIZES)),
        "sd": sd,
    }


def _reference(plan: Plan, budget: Budget) -> float:
    """What a reference unit adds to the statistic on average."""
    statistic, weights = budget.statistic, plan.privacy.weights
    assert statistic is not None
    if weights is None:
        return 1.0
    records = np.arange(1, plan.privacy.contributions + 1, dtype=np.float64)
    longer: Float64 = (records - 1 + 26) ** -5.738  # chance of at least so many records
    integers = weights.integers(plan.privacy.contributions)
    typical = float((longer * integers).sum() / longer.sum())
    return statistic.weighted * typical + statistic.counted


def _final_sd(plan: Plan, budget: Budget) -> float:
    """sd at close of the first published column, in records at the bound."""
    if budget.values:
        return float(budget.values[0].sd[-1]) / plan.design.streams[0].sensitivity
    assert budget.units is not None
    return float(budget.units.sd[-1])


def in_words(settings: dict[str, Any]) -> str:
    """A row's settings as they stand in ``[privacy]``."""
    words = [f"mode = '{settings['mode']}'", f"strategy = '{settings['strategy']}'"]
    if settings["per_key_bound"]:
        words.append("per_key_bound = 1")
    if settings["weights"] is not None:
        weights = settings["weights"]
        words.append(f"weights = {{ offset = {weights.offset:g}, power = {weights.power:g} }}")
    if settings["combine"]:
        words.append("combine = true")
    return ", ".join(words)


def text(rows: list[Alternative]) -> str:
    """The comparison for a person."""
    if not rows:
        return ""
    lines = [
        "",
        "Alternatives on a public reference population (keys with n units at density n^-1.7),",
        "same guarantee; keys and error against this job's, * most keys within 2% of least error:",
        "  keys   error  units for 1/2  final sd  settings of [privacy]",
    ]
    for row in rows:
        mark = "*" if row.recommended else " "
        name = in_words(row.settings)
        if row.refused:
            lines.append(f"{mark} refused: {row.refused}; {name}")
            continue
        other = "" if row.same else " (another figure)"
        lines.append(
            f"{mark} x{row.keys:<5.3g} x{row.error:<5.3g} {row.units:<13.0f}  {row.sd:<8.4g}  "
            f"{name}{other}"
        )
    return "\n".join(lines) + "\n"

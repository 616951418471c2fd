"""What other mechanisms would give the same job: the table of ``dpstream plan --details``.

The criterion is public: expected results at window close on the reference population
(``reference``), not on the job's data, each record's value at L.  A key of n units is published
with the chance that its statistic passes at the easiest test; published it is wrong by the noise's
mean size, else by n.  (Mode ``rounds`` is scored with the final flush, which publishes every
selected key at close.)  Mechanisms that the job cannot use are left out.
"""

import itertools
import math
from typing import Any

import msgspec
import numpy as np

from dpstream.accounting.budget import Budget, allocate
from dpstream.accounting.errors import DpstreamError, PolicyError
from dpstream.accounting.plan.plan import Plan
from dpstream.accounting.plan.privacy import Privacy
from dpstream.accounting.tuning import wording
from dpstream.accounting.tuning.reference import DENSITY, SIZES, final_sd, published_sizes
from dpstream.accounting.weights import EVEN, MILD, STEEP


class Alternative(msgspec.Struct, frozen=True):
    """One mechanism for the job, on the reference population.

    Attributes:
        settings: keys of ``[privacy]`` that differ between the rows.
        same: whether it counts what the job counts.
        keys, error: expected released keys (``None``: the job publishes none) and absolute error,
            relative to the job's own.
        units: units of a key (of the reference's mix of pairs) for an even chance at close.
        sd: sd of the first column's noise at close, in records at the bound L.
    """

    settings: dict[str, Any]
    same: bool
    keys: float | None
    error: float
    units: float
    sd: float


def compare(plan: Plan) -> list[Alternative]:
    """All general mechanisms that the plan's job can use, the job's own first.

    Returns:
        Empty for plans that select no keys or are refused: nothing to choose there.
    """
    if not plan.design.selects:
        return []
    try:
        own = _evaluate(plan, allocate(plan))
    except PolicyError:
        return []
    mine = _settings(plan.privacy)
    others = (settings for settings in _candidates() if settings != mine)
    rows = [_row(plan, settings, own) for settings in (mine, *others)]
    return [row for row in rows if row is not None]


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


def _row(plan: Plan, settings: dict[str, Any], own: dict[str, float]) -> Alternative | None:
    """One alternative with the job's guarantee and columns; ``None``: the job cannot use it."""
    kept: dict[str, Any] = {}
    if settings != _settings(plan.privacy):
        kept["selection_share"] = None
    if settings["mode"] != "sticky":
        kept |= {"select_every": None, "tests": None}
    if settings["weights"] is None:
        kept["skip"] = False
    kept["usual_weights"] = (
        settings["weights"] == plan.privacy.weights and plan.privacy.usual_weights
    )
    kept["final_flush"] = settings["mode"] == "rounds"
    same = settings["per_key_bound"] == plan.privacy.per_key_bound
    try:
        privacy = msgspec.structs.replace(plan.privacy, **settings, **kept)
        other = msgspec.structs.replace(plan, privacy=privacy)
        found = _evaluate(other, allocate(other))
    except DpstreamError:
        return None
    keys = found["keys"] / own["keys"] if own["keys"] > 0 else None
    wrong = found["error"] / own["error"]
    return Alternative(settings, same, keys, wrong, found["units"], found["sd"])


def _evaluate(plan: Plan, budget: Budget) -> dict[str, float]:
    """Expected keys, error, even-chance units and final sd on the reference population."""
    chance, sd = published_sizes(plan, budget).chances[-1], final_sd(plan, budget)
    wrong = chance * sd * math.sqrt(2 / math.pi) + (1 - chance) * SIZES
    density = SIZES**DENSITY
    return {
        "keys": float(np.trapezoid(density * chance, SIZES)),
        "error": float(np.trapezoid(density * wrong, SIZES)),
        "units": float(np.interp(0.5, chance, SIZES)),
        "sd": sd,
    }


def in_words(settings: dict[str, Any]) -> str:
    """A row's settings as they stand in ``[privacy]``."""
    return wording.in_words({f"privacy.{k}": v for k, v in settings.items() if v})


def text(rows: list[Alternative]) -> str:
    """The comparison for a person."""
    if not rows:
        return ""
    lines = [
        "",
        "Other mechanisms for the job on the public reference shape, same guarantee; keys and",
        "absolute error, of keys that stay unpublished too, against this job's:",
        "  keys   error  units for 1/2  final sd  settings of [privacy]",
    ]
    for row in rows:
        other = "" if row.same else " (another figure)"
        keys = "-" if row.keys is None else f"x{row.keys:.3g}"
        lines.append(
            f"  {keys:<6} x{row.error:<5.3g} {row.units:<13.0f}  {row.sd:<8.4g}  "
            f"{in_words(row.settings)}{other}"
        )
    return "\n".join(lines) + "\n"

"""The charge of a run, as an account stores it.

A run is charged once, when it begins, before its first draw: the charge is named by the run id
that its store committed (or its execution drew) and by the epoch.  Another run on the same data (a
corrected input, the same statement on a grown table) has new noise and a new charge; so has a
further epoch of a run, which begins after a restore that cannot replay the input.

A charge is one of the events of an account's chain (`state.ledger.events`).
"""

import math
from typing import Literal

import msgspec

from dpstream.state.ledger.region_charge import RegionCharge

#: What was run.
ChargeKind = Literal["stream", "choice", "sql", "session", "table", "workload", "frame", "keys"]


class Charge(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="event", tag="charge"
):
    """What one run spends per unit of a data set; see ``accounting.composition``.

    Attributes:
        run_id, plan_hash: the run and its public plan (statement, question).
        identity: canonical text of the unit (`accounting.plan.unit`).
        periods: units that one person can have in the run, ``None`` where it has no end.
        together: the most of them whose effects add up, ``None``: all.
        epsilon, delta: the run's own guarantee.
        mu: Gaussian-DP parameter of its noise, if it is accounted for so.
        rho: zCDP parameter of its noise, if it is accounted for so; with neither the charge is a
            plain (epsilon, delta).
        regions: of a session: which points pay, and with what.
        threshold_delta: part of delta its thresholds use (C b).
        kind: what was run.
        epoch: 0, or how often the run was restored without a replay.

    Raises:
        ValueError: a figure is negative, infinite or not a number.
    """

    run_id: str
    plan_hash: str
    identity: str
    epsilon: float
    delta: float
    mu: float | None
    threshold_delta: float
    kind: ChargeKind = "stream"
    epoch: int = 0
    periods: int | None = 1
    together: int | None = 1
    rho: float | None = None
    regions: RegionCharge | msgspec.UnsetType = msgspec.UNSET

    def __post_init__(self) -> None:
        noise = (self.mu or 0.0, self.rho or 0.0)
        figures = (self.epsilon, *noise, self.delta, self.threshold_delta)
        if min(figures) < 0 or not math.isfinite(sum(figures)) or self.epoch < 0:
            raise ValueError("a charge is made of finite figures that are not negative")
        if self.mu is not None and self.rho is not None:
            raise ValueError("a charge has a mu or a rho, not both")
        if self.mu is None and self.rho is None and self.threshold_delta:
            raise ValueError("a plain charge has all its delta in delta")
        if 0 in (self.periods, self.together) or min(self.periods or 1, self.together or 1) < 1:
            raise ValueError("a person has at least one unit")

    @property
    def name(self) -> str:
        """The name of the charge within its data set: run id and epoch."""
        return self.run_id if self.epoch == 0 else f"{self.run_id}/{self.epoch}"

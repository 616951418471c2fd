"""The canonical form of a plan: what its hash is computed from, spelled out name by name.

The hash names the plan in the store and in every noise node, so it must not follow the code:
a field that is renamed, moved or split in ``accounting.plan.plan`` keeps its name and place here,
and a field that was added after the form was frozen is left out at its default.
Tests pin the hashes of twenty plans.
"""

import hashlib
from typing import TYPE_CHECKING, Any

import msgspec

if TYPE_CHECKING:
    from dpstream.accounting.fields import Aggregate, Field
    from dpstream.accounting.plan.cells import Cells
    from dpstream.accounting.plan.plan import Plan
    from dpstream.accounting.plan.privacy import Privacy
    from dpstream.accounting.plan.timeline import Timeline
    from dpstream.accounting.weights import SelectionWeights


def plan_hash(plan: "Plan") -> str:
    """128-bit hex digest of every public parameter."""
    encoded = msgspec.json.encode(canonical(plan), order="sorted")
    return hashlib.blake2b(encoded, digest_size=16, person=b"dpstream-plan").hexdigest()


def canonical(plan: "Plan") -> dict[str, Any]:
    """Every public parameter by its frozen name, as JSON-able values."""
    form = {
        "source": plan.source,
        "unit": _field(plan.unit),
        "key": [_field(column) for column in plan.key],
        "event_time": plan.event_time,
        "aggregates": [_aggregate(aggregate) for aggregate in plan.aggregates],
        "timeline": _timeline(plan.timeline),
        "privacy": _privacy(plan.privacy),
        "stamp": plan.stamp,
        "public_keys": plan.public_keys,
        "mechanism_version": plan.mechanism_version,
    }
    if plan.record_id is not None:
        form["record_id"] = _field(plan.record_id)
    if plan.query is not None:
        form["query"] = plan.query
    if plan.remember is not None:
        form["remember"] = plan.remember
    if plan.cells is not None:
        form["cells"] = _cells(plan.cells)
    return form


def _cells(cells: "Cells") -> dict[str, Any]:
    return {
        "size": cells.size,
        "digest": cells.digest,
        "inverse_norm2": cells.inverse_norm2,
        "rms_norm": cells.rms_norm,
        "row_sum": cells.row_sum,
    }


def _field(field: "Field") -> dict[str, Any]:
    return {"column": field.column, "type": field.type}


def _aggregate(aggregate: "Aggregate") -> dict[str, Any]:
    return {
        "name": aggregate.name,
        "kind": aggregate.kind,
        "column": aggregate.column,
        "clamp": aggregate.bounds,
        "grid": aggregate.grid,
        "share": aggregate.share,
    }


def _timeline(line: "Timeline") -> dict[str, Any]:
    return {
        "start": line.start,
        "end": line.end,
        "window": line.window,
        "slide": line.slide,
        "trigger_every": line.trigger_every,
        "allowed_lateness": line.allowed_lateness,
        "max_skew": line.max_skew,
        "period": line.period,
    }


def _weights(weights: "SelectionWeights") -> dict[str, Any]:
    if weights.by_size:
        return {"size_share": weights.size_share}
    return {"offset": weights.offset, "power": weights.power}


def _privacy(privacy: "Privacy") -> dict[str, Any]:
    weights = privacy.weights
    form: dict[str, Any] = {
        "epsilon": privacy.epsilon,
        "delta": privacy.delta,
        "contributions": privacy.contributions,
        "mode": privacy.mode,
        "strategy": privacy.strategy,
        "theta": privacy.theta,
        "pre_threshold": privacy.pre_threshold,
        "refresh_every": privacy.refresh_every,
        "selection_share": privacy.selection_share,
        "final_flush": privacy.final_flush,
        "allow_unsound": False,  # of a preset that is gone
        "per_key_bound": privacy.per_key_bound,
        "weights": weights and _weights(weights),
        "combine": privacy.combine,
        "select_every": privacy.select_every,
    }
    if privacy.optimise != "period":
        form["optimise"] = privacy.optimise
    if privacy.periods_share_windows:
        form["periods_share_windows"] = True
    if privacy.tests is not None:
        form["tests"] = privacy.tests
    if privacy.skip:  # a run that was begun says in its numbers whether it skips
        form["skip"] = True
    if privacy.allow_large_delta:
        form["allow_large_delta"] = True
    return form

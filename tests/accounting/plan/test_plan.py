"""The plan: what it derives, what its hash covers, what it refuses."""

from collections.abc import Callable

import msgspec
import pytest

from dpstream.accounting import limits
from dpstream.accounting.errors import DpstreamError, UsageError
from dpstream.accounting.plan.fields import Aggregate, Field
from dpstream.accounting.plan.plan import Plan

Make = Callable[..., Plan]
MEAN = Aggregate("delay", "mean", "d", (-60.0, 180.0), 0.5)
SUM = Aggregate("total", "sum", "x", (-3.0, 9.0))


def test_grid_bounds_snap_inward_exactly() -> None:
    assert Aggregate("s", "sum", "x", (0.1, 0.7), 0.1).grid_bounds() == (1, 7)
    assert Aggregate("s", "sum", "x", (-0.25, 0.99), 0.5).grid_bounds() == (0, 1)
    assert Aggregate("s", "sum", "x", (-1e-3, 1e3), 1e-3).grid_bounds() == (-1, 10**6)
    with pytest.raises(ValueError, match="bounds"):
        Aggregate("n", "count").grid_bounds()


def test_value_streams(make_plan: Make) -> None:
    only_mean = make_plan(aggregates=(MEAN,)).design.streams
    assert [s.name for s in only_mean] == ["count", "delay"]
    mean = only_mean[1]
    assert (mean.lo, mean.hi, mean.mid, mean.sensitivity, mean.grid) == (-120, 360, 120, 240, 0.5)
    both = make_plan(aggregates=(Aggregate("n", "count", share=2.0), MEAN, SUM)).design.streams
    assert [(s.name, s.share) for s in both] == [("count", 2.0), ("delay", 1.0), ("total", 1.0)]
    assert both[2].sensitivity == 9 and both[2].mid == 0
    assert make_plan(aggregates=(Aggregate("u", "units"),)).design.streams == ()
    odd = make_plan(aggregates=(Aggregate("m", "mean", "x", (0.0, 5.0)),)).design.streams[1]
    assert odd.sensitivity == max(odd.hi - odd.mid, odd.mid - odd.lo) == 3


@pytest.mark.parametrize("kind", ["sum", "mean"])
def test_the_larger_end_of_a_clamp_is_its_sensitivity(make_plan: Make, kind: str) -> None:
    """Also where it is the lower one: a sum clamped to [-9, 3] moves by 9."""
    for clamp in ((-9.0, 3.0), (-9.0, -1.0), (-3.0, 9.0), (1.0, 9.0), (-5.0, 0.0), (-8.0, 3.0)):
        aggregate = Aggregate("v", kind, "x", clamp)  # type: ignore[arg-type]
        stream = make_plan(aggregates=(aggregate,)).design.streams[-1]
        values = range(int(clamp[0]), int(clamp[1]) + 1)
        assert stream.sensitivity == max(abs(value - stream.mid) for value in values)
        if kind == "sum":
            assert stream.mid == 0 and stream.sensitivity == max(map(abs, clamp))


def test_derived_switches(make_plan: Make) -> None:
    plan = make_plan()
    assert plan.design.selects and plan.design.unit_sets == "until selected"
    public = make_plan(public_keys="list")
    assert not public.design.selects and public.design.unit_sets == "none"
    units = make_plan(public_keys="list", aggregates=(Aggregate("u", "units"),))
    assert units.design.unit_sets == "window" and units.design.units_apart
    assert make_plan(mode="rounds").design.unit_sets == "round"
    every = [make_plan(t).design.refresh_every for t in (1, 100, 250, 1000)]
    assert every == [1, 1, 2, 10] and make_plan(refresh_every=7).design.refresh_every == 7


def test_hash_covers_every_public_parameter(make_plan: Make) -> None:
    plan = make_plan(aggregates=(MEAN,))
    assert plan.hash == make_plan(aggregates=(MEAN,)).hash and len(plan.hash) == 32
    others = [
        make_plan(aggregates=(SUM,)),
        make_plan(101, aggregates=(MEAN,)),
        make_plan(aggregates=(MEAN,), epsilon=5.0),
        make_plan(aggregates=(MEAN,), mode="rounds"),
        make_plan(aggregates=(MEAN,), public_keys="list"),
        *(
            msgspec.structs.replace(plan, **change)
            for change in (
                {"source": "other"},
                {"unit": Field("user", "int")},
                {"key": (Field("page"), Field("country"))},
                {"event_time": "t"},
                {"stamp": "s"},
                {"mechanism_version": 99},
            )
        ),
    ]
    assert len({plan.hash, *(p.hash for p in others)}) == len(others) + 1


@pytest.mark.parametrize(
    ("field", "case"),
    [
        ("privacy.epsilon", {"epsilon": 0.0}),
        ("privacy.epsilon", {"epsilon": float("nan")}),
        ("privacy.delta", {"delta": 1.0}),
        ("privacy.delta", {"delta": 0.0}),
        ("privacy.contributions", {"contributions": 0}),
        ("privacy.contributions", {"contributions": limits.MAX_CONTRIBUTIONS + 1}),
        ("privacy.theta", {"theta": 1.0}),
        ("privacy.pre_threshold", {"pre_threshold": -1}),
        ("privacy.refresh_every", {"refresh_every": 0}),
        ("privacy.selection_share", {"selection_share": 1.0}),
        ("privacy.mode", {"mode": "rounds", "public_keys": "list"}),
        ("aggregate", {"aggregates": ()}),
        ("aggregate", {"aggregates": tuple(Aggregate(f"a{i}", "count") for i in range(17))}),
        ("aggregate[0].name", {"aggregates": (Aggregate("_n", "count"),)}),
        ("aggregate[0].share", {"aggregates": (Aggregate("n", "count", share=-1.0),)}),
        ("aggregate[0]", {"aggregates": (Aggregate("n", "count", column="x"),)}),
        ("aggregate[0]", {"aggregates": (Aggregate("n", "sum", column="x"),)}),
        ("aggregate[0]", {"aggregates": (Aggregate("n", "sum", "x", (0.0, 1.0), 0.0),)}),
        ("aggregate[0]", {"aggregates": (Aggregate("n", "sum", "x", (0.0, float("inf"))),)}),
        ("aggregate[0].clamp", {"aggregates": (Aggregate("n", "sum", "x", (0.2, 0.8)),)}),
        ("aggregate[0].clamp", {"aggregates": (Aggregate("n", "sum", "x", (-0.5, 0.5)),)}),
        ("aggregate[0].grid", {"aggregates": (Aggregate("n", "sum", "x", (0.0, 1e12)),)}),
        ("aggregate.name", {"aggregates": (Aggregate("page", "count"),)}),
        ("aggregate.name", {"aggregates": (Aggregate("trigger", "count"),)}),
        ("aggregate.name", {"aggregates": (Aggregate("n", "count"), Aggregate("n_sd", "count"))}),
        ("aggregate.kind", {"aggregates": (Aggregate("u", "units"),), "mode": "rounds"}),
    ],
)
def test_refusals(make_plan: Make, field: str, case: dict) -> None:
    with pytest.raises(UsageError) as caught:
        make_plan(**case).check()
    assert caught.value.field == field
    assert caught.value.exit_code == 2


def test_keys(make_plan: Make) -> None:
    plan = make_plan()
    with pytest.raises(UsageError, match=r"schema\.key"):
        msgspec.structs.replace(plan, key=()).check()


def test_errors_travel_between_processes() -> None:
    import pickle

    error = UsageError("a.b", "rule", "fix")
    copy = pickle.loads(pickle.dumps(error))  # noqa: S301
    assert isinstance(copy, DpstreamError)
    assert copy.as_dict() == error.as_dict() and str(copy) == "a.b: rule. Fix: fix."
    assert error.as_dict() == {
        "error": "usage", "exit_code": 2, "field": "a.b", "rule": "rule", "fix": "fix",
    }  # fmt: skip

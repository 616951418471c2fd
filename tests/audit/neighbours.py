"""Generated pairs of neighbouring streams: D, and D plus all records of one unit.

Every other record keeps its content, its stamp and its order in its partition; positions
shift, as they do when a file has more lines.  A unit is a user, or (user, period).
"""

import dataclasses
import functools
from collections.abc import Callable

import numpy as np
import pyarrow as pa

from dpstream.accounting import aggregates
from dpstream.accounting.fields import Aggregate
from dpstream.accounting.plan.plan import Plan
from dpstream.accounting.weights import SelectionWeights
from tests.streams import COUNT, MEAN, START, STEP, SUM, TWIN, UNITS, make_plan, positioned

AGAIN = Aggregate("again", "sum", "value", (-3.0, 7.0), 0.5)

#: Chances of selection on streams of a few hundred records; the mechanism is the same.
BUDGET: dict[str, object] = {"epsilon": 20.0, "delta": 0.1, "contributions": 3}

KINDS = ("ordinary", "far_future", "far_past", "flood", "first", "straddle", "late")
PARTITIONS = 2
USERS, PAGES = 45, 9
PUBLIC = ("k0", "k1", "k3", "k5", "silent", "fresh")


@dataclasses.dataclass(frozen=True)
class Record:
    """A raw record; ``serial`` is its name in the test and never in the data."""

    serial: int
    user: str
    page: str
    event: int
    stamp: int
    value: float


@dataclasses.dataclass(frozen=True)
class Pair:
    """Two neighbouring streams: ``others``, and ``others`` with the records of one unit."""

    seed: int
    kind: str
    plan: Plan
    shards: int
    others: tuple[Record, ...]
    unit: tuple[Record, ...]

    def __str__(self) -> str:
        return f"seed {self.seed}: {self.kind}, more than {self.plan.privacy.pre_threshold}"


def of_each_kind() -> tuple[Aggregate, ...]:
    """A column of each kind; bounds differ, so that none is made from the sums of another."""
    columns = []
    for at, (name, kind) in enumerate(aggregates.AGGREGATE_KINDS.items()):
        values = (
            {"column": "value", "bounds": (-2.0, 5.0 + at), "grid": 0.5} if kind.bounded else {}
        )
        columns.append(Aggregate(f"a_{name}", name, **values))  # type: ignore[arg-type]
    return tuple(columns)


@functools.cache
def plans() -> dict[str, Plan]:
    """The plans that are audited, by name."""

    def plan(*aggregates: Aggregate, **options: object) -> Plan:
        return make_plan(aggregates=aggregates, **{**BUDGET, **options})  # type: ignore[arg-type]

    def heavy(offset: float, power: float) -> dict[str, object]:
        weights = SelectionWeights(offset, power)
        return {"weights": weights, "contributions": 4, "skip": False}

    late: dict[str, object] = {"stamped": True, "lateness": 2, "skew": STEP // 2}
    sliding: dict[str, object] = {"slide": 3, "windows": 3, "lateness": 1, "stamped": True}
    both = {**heavy(3, 1), "per_key_bound": 1, "combine": True}
    return {
        "sticky": plan(COUNT, MEAN, triggers=8),
        "refresh": plan(UNITS, COUNT, triggers=7, refresh_every=3, select_every=1),
        "sliding": plan(COUNT, SUM, triggers=7, slide=3, windows=3, lateness=1, stamped=True),
        "buffered": plan(COUNT, SUM, triggers=8, pre_threshold=3, **late),
        "mean_sliding": plan(MEAN, triggers=6, slide=2, windows=3, **late),
        "periods": plan(COUNT, MEAN, triggers=8, windows=3, period=4, **late),
        "public": plan(UNITS, COUNT, MEAN, triggers=6, public="f" * 32),
        "one_trigger": plan(COUNT, UNITS, triggers=1, windows=6),
        "columns": plan(SUM, AGAIN, triggers=7),
        "kinds": plan(*of_each_kind(), triggers=6),
        "tests_apart": plan(COUNT, UNITS, triggers=8, refresh_every=4, select_every=2),
        "combined_apart": plan(
            COUNT, triggers=8, strategy="blt", refresh_every=2, select_every=3, **late, **both
        ),
        "single": plan(COUNT, triggers=8, contributions=1),
        "blt_count": plan(COUNT, triggers=8, strategy="blt"),
        "blt": plan(COUNT, UNITS, triggers=8, strategy="blt", pre_threshold=1, **late),
        "blt_mean": plan(MEAN, triggers=7, strategy="blt"),
        "dense": plan(COUNT, UNITS, triggers=8, strategy="dense", **late),
        **_per_key(plan, sliding, {"weights": SelectionWeights(3, 1)}),
        "weights": plan(COUNT, MEAN, triggers=8, **heavy(3, 1)),
        "weights_units": plan(
            COUNT, UNITS, triggers=6, strategy="blt", **{**heavy(2, 0.5), "epsilon": 90.0}
        ),
        "weights_periods": plan(COUNT, triggers=6, windows=3, period=5, **late, **heavy(2, 1)),
        "combined": plan(COUNT, SUM, triggers=8, **both),
        "combined_units": plan(
            UNITS, COUNT, triggers=7, strategy="blt", **{**both, **sliding, "refresh_every": 3}
        ),
        "combined_buffered": plan(COUNT, triggers=8, pre_threshold=2, **late, **both),
    }


@functools.cache
def skipping_plans() -> dict[str, Plan]:
    """Mechanisms in which pairs on published keys take no selection weight, by name."""

    def plan(*aggregates: Aggregate, **options: object) -> Plan:
        given = {**BUDGET, "skip": True, "contributions": 4, **options}
        return make_plan(aggregates=aggregates, **given)  # type: ignore[arg-type]

    late: dict[str, object] = {"stamped": True, "lateness": 2, "skew": STEP // 2}
    weights = {"weights": SelectionWeights(1, 2)}
    both = {**weights, "per_key_bound": 1, "combine": True}
    return {
        "skip": plan(COUNT, MEAN, triggers=8, tests=(1, 3, 8), **weights),
        "skip_units": plan(UNITS, COUNT, triggers=7, tests=(2, 4, 7), **weights, **late),
        "skip_periods": plan(
            COUNT, triggers=6, windows=3, period=5, tests=(1, 2, 4, 6), **weights, **late
        ),
        "skip_combined": plan(COUNT, SUM, triggers=8, tests=(1, 2, 3, 5, 8), **both),
        "skip_combined_blt": plan(
            COUNT, triggers=9, strategy="blt", pre_threshold=1, tests=(2, 5, 9), **both, **late
        ),
    }


def _per_key(
    plan: Callable[..., Plan], sliding: dict[str, object], weights: dict[str, object]
) -> dict[str, Plan]:
    """Plans with a bound per key, and one of before it was kept where pairs are admitted."""
    return {
        "per_key": plan(COUNT, SUM, triggers=8, per_key_bound=1),
        "fused": plan(UNITS, SUM, triggers=7, per_key_bound=1, strategy="blt", **sliding),
        "per_key_public": plan(
            UNITS, COUNT, MEAN, triggers=6, per_key_bound=1, public="f" * 32, strategy="blt"
        ),
        "two_per_key": plan(COUNT, SUM, triggers=8, per_key_bound=2, contributions=6),
        "three_per_key": plan(
            COUNT,
            UNITS,
            MEAN,
            TWIN,
            triggers=7,
            per_key_bound=3,
            strategy="blt",
            **{**sliding, **weights, "contributions": 7, "epsilon": 90.0},
        ),
        "one_per_key": plan(COUNT, SUM, triggers=8, per_key_bound=1),
        "derived": plan(MEAN, TWIN, triggers=8, public="f" * 32),
    }


STAMPED: tuple[str, ...] = (
    "sliding",
    "buffered",
    "mean_sliding",
    "periods",
)
STAMPED += ("blt", "fused", "weights_periods", "combined_units", "combined_buffered")
STAMPED += ("combined_apart", "three_per_key")
PERIODS = ("periods", "weights_periods")
SKIP_STAMPED = ("skip_units", "skip_periods", "skip_combined_blt")


def skipping_name(seed: int) -> str:
    """A plan that skips what is published, for the kind of neighbours that a seed has."""
    kind, number = KINDS[seed % len(KINDS)], seed // len(KINDS)
    allowed = {"late": SKIP_STAMPED, "straddle": ("skip_periods",)}
    names = allowed.get(kind, tuple(skipping_plans()))
    return names[number % len(names)]


def make_pair(seed: int, kind: str | None = None, name: str | None = None) -> Pair:
    """The neighbouring streams of a seed; kind and plan are drawn unless they are given."""
    rng = np.random.default_rng([seed, 3])
    kind = kind or KINDS[seed % len(KINDS)]
    if name is None:
        allowed = {"late": STAMPED, "straddle": PERIODS}.get(kind, tuple(plans()))
        name = allowed[(5 * (seed % len(KINDS)) + seed // len(KINDS)) % len(allowed)]
    plan = (plans() | skipping_plans())[name]
    size = int(rng.integers(120, 260))
    others = [_ordinary(plan, rng, n, f"u{rng.integers(0, USERS)}") for n in range(size)]
    others += _joiners(plan, rng, size)
    unit = _unit(plan, rng, kind, len(others))
    if kind == "straddle":
        others, unit = _one_period_more(plan, rng, others, unit)
    chosen = period_of(plan, unit[0])
    unit = [r for r in unit if period_of(plan, r) == chosen]
    return Pair(seed, kind, plan, int(rng.integers(1, 4)), tuple(others), tuple(unit))


def _end(plan: Plan) -> int:
    assert plan.timeline.end is not None
    return plan.timeline.end


def _page(rng: np.random.Generator) -> str:
    return f"k{min(int(rng.exponential(2.0)), PAGES - 1)}"


def _stamp(plan: Plan, rng: np.random.Generator, event: int) -> int:
    """A stamp near every rule: at once, within and beyond the lateness, a clock ahead."""
    if plan.stamp == "event_time":
        return event
    timeline = plan.timeline
    delay = rng.choice(
        [0, STEP // 8, STEP, timeline.window, timeline.window + timeline.allowed_lateness]
    )
    shift = int(delay * rng.random()) - int(
        timeline.max_skew * 2 * rng.random() * (rng.random() < 0.2)
    )
    return max(timeline.start - STEP, event + shift)


def _ordinary(plan: Plan, rng: np.random.Generator, serial: int, user: str) -> Record:
    ticks = (_end(plan) - START) * 4 // STEP
    event = START + int(rng.integers(0, ticks)) * STEP // 4
    value = round(float(rng.normal(1, 5)), 2)
    return Record(serial, user, _page(rng), event, _stamp(plan, rng, event), value)


def _joiners(plan: Plan, rng: np.random.Generator, serial: int) -> list[Record]:
    """Users who join the key ``fresh`` some triggers into the first window."""
    timeline = plan.timeline
    begin = START + min(3 * STEP, timeline.window // 2)
    out = []
    for n in range(12):
        event = begin + int(rng.integers(0, timeline.window // 2))
        out.append(Record(serial + n, f"joiner{n}", "fresh", event, event, 1.0))
    return out


def _unit(plan: Plan, rng: np.random.Generator, kind: str, serial: int) -> list[Record]:
    timeline, end = plan.timeline, _end(plan)
    count = 400 if kind == "flood" else int(rng.integers(1, 7))
    records = [_ordinary(plan, rng, serial + n, "X") for n in range(count)]
    if kind == "far_future":
        far = [end - 1, end, end + timeline.window, 1 << 61, (1 << 62) + START]
        records = [_at(plan, r, int(rng.choice(far)), rng) for r in records]
    elif kind == "far_past":
        far = [START, START - 1, 0, -1, -(1 << 61)]
        records = [_at(plan, r, int(rng.choice(far)), rng) for r in records]
    elif kind == "first":
        records = [dataclasses.replace(r, page="fresh", event=START, stamp=START) for r in records]
    elif kind == "late":
        edge = [
            0,
            1,
            timeline.allowed_lateness - 1,
            timeline.allowed_lateness,
            timeline.window,
            1 << 60,
        ]
        records = [
            dataclasses.replace(r, stamp=(r.event - START) // timeline.window * timeline.window
                                + START + timeline.window + int(rng.choice(edge)))
            for r in records
        ]  # fmt: skip
    if rng.random() < 0.3:  # the bounds of the values are met as well
        records = [dataclasses.replace(r, value=float(rng.choice([-1e9, 1e9]))) for r in records]
    return records


def _at(plan: Plan, record: Record, event: int, rng: np.random.Generator) -> Record:
    """The record at another event time; its stamp follows, stays or is far off as well."""
    stamps = [event, record.stamp, 1 << 61, START]
    stamp = event if plan.stamp == "event_time" else int(rng.choice(stamps))
    return dataclasses.replace(record, event=event, stamp=stamp)


def _one_period_more(
    plan: Plan, rng: np.random.Generator, others: list[Record], unit: list[Record]
) -> tuple[list[Record], list[Record]]:
    """The user is known in other periods already: the unit is one more (user, period)."""
    timeline = plan.timeline
    assert timeline.period is not None
    serial = max(r.serial for r in (*others, *unit)) + 1
    base_records = [_ordinary(plan, rng, serial + n, "X") for n in range(12)]
    edge = START + int(rng.integers(1, (_end(plan) - START) // timeline.period)) * timeline.period
    ends = (-STEP // 4, -1, 0, STEP // 4)
    unit = [
        dataclasses.replace(r, event=edge + int(rng.choice(ends)), stamp=edge + STEP)
        for r in [*unit, *base_records[:3]]
    ]
    unit = [dataclasses.replace(r, serial=serial + 12 + n) for n, r in enumerate(unit)]
    chosen = period_of(plan, unit[0])
    rest = [r for r in (*base_records, *unit) if period_of(plan, r) != chosen]
    return [*others, *rest], unit


def period_of(plan: Plan, record: Record) -> int:
    """Privacy period of a record (0 without periods)."""
    period = plan.timeline.period
    return 0 if period is None else (record.event - START) // period


def deliveries(
    records: tuple[Record, ...], seed: int | None = None
) -> tuple[list[pa.RecordBatch], dict[tuple[int, int], int]]:
    """Source batches, and the serial of each (partition, offset).

    Args:
        seed: with one, batch sizes are drawn, batches are shuffled and some come twice.
    """
    rng = np.random.default_rng(seed)
    batches, serials = list[pa.RecordBatch](), dict[tuple[int, int], int]()
    for partition in range(PARTITIONS):
        # A broker appends in the order of stamps; ties by name, which an added unit keeps.
        rows = sorted(
            (r for r in records if r.serial % PARTITIONS == partition),
            key=lambda r: (r.stamp, r.serial),
        )
        serials |= {(partition, offset): r.serial for offset, r in enumerate(rows)}
        begin = 0
        while begin < len(rows):
            size = 50 if seed is None else int(rng.integers(1, 60))
            batches.append(batch_of(rows[begin : begin + size], partition, begin))
            begin += size
    if seed is not None:
        again = [b for b in batches if rng.random() < 0.2]
        batches = [(batches + again)[i] for i in rng.permutation(len(batches) + len(again))]
    return batches, serials


def batch_of(rows: list[Record], partition: int, offset: int) -> pa.RecordBatch:
    return positioned(
        {
            "user": [r.user for r in rows],
            "page": [r.page for r in rows],
            "time": pa.array([r.event for r in rows], pa.int64()),
            "arrived": pa.array([r.stamp for r in rows], pa.int64()),
            "value": pa.array([r.value for r in rows], pa.float64()),
        },
        partition,
        offset,
    )

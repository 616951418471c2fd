"""Random sticky plans of all modes together against the exhaustive reference."""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from dpstream.accounting.limits import MAX_SKIPPING_WINDOWS
from dpstream.accounting.plan.plan import Plan
from dpstream.accounting.weights import SelectionWeights
from dpstream.dp_transforms.noise.prf import KeyRing
from tests.dp_transforms.runs import run, slow
from tests.streams import COUNT, MEAN, STEP, SUM, UNITS, generate, make_plan

CI, LONG = 5, 400
#: Seeds of plans that skip what is published.
SKIPPING, SKIPPING_LONG = 2, 200


def random_plan(rng: np.random.Generator) -> Plan:
    """Any strategy, selection, calendar and timeline; thresholds of few units."""
    strategy = str(rng.choice(["tree", "blt", "dense"]))
    public = rng.random() < 0.15
    aggregates = tuple(a for a in (COUNT, SUM, MEAN, UNITS) if rng.random() < 0.5) or (COUNT,)
    per_key, weights = rng.random() < 0.6, not public and rng.random() < 0.7
    counts = any(a.kind != "sum" for a in aggregates)
    divisor = int(rng.integers(1, 4))
    options: dict[str, Any] = {
        "strategy": strategy,
        "epsilon": float(rng.choice([5.0, 9.0, 40.0])),
        # The only weight of C = 1 lies on the lattice; product and reference may round it apart.
        "contributions": int(rng.integers(2 if weights else 1, 8)),
        "per_key_bound": 1 if per_key else None,
        "combine": bool(per_key and weights and counts and rng.random() < 0.6),
        "public": "list" if public else None,
        "refresh_every": divisor * int(rng.integers(1, 3)),
        "select_every": None if rng.random() < 0.5 else divisor,
        "pre_threshold": 0 if public else int(rng.choice([0, 0, 1, 3])),
    }
    if weights:
        offset, power = rng.choice([0.5, 2.0, 6.0]), rng.choice([0.25, 0.5, 1.0, 1.5])
        options["weights"] = SelectionWeights(float(offset), float(power))
    return make_plan(aggregates=aggregates, **random_timeline(rng), **options)  # type: ignore


def random_timeline(rng: np.random.Generator) -> dict[str, Any]:
    """Lengths in triggers: tumbling or sliding windows, with or without stamps of their own."""
    triggers = int(rng.integers(1, 16))
    out: dict[str, Any] = {"triggers": triggers, "windows": int(rng.integers(1, 4))}
    if rng.random() < 0.4:
        out |= {"stamped": True, "lateness": int(rng.integers(0, min(4, triggers)))}
        out["skew"] = int(rng.choice([0, STEP]))
    width = triggers - int(out.get("lateness", 0))  # type: ignore[call-overload]
    if rng.random() < 0.4:
        out["slide"] = int(rng.choice([d for d in range(1, width + 1) if width % d == 0]))
        out["windows"] = int(rng.integers(1, 6))
    return out


def random_skipping_plan(rng: np.random.Generator) -> Plan:
    """A plan in which pairs on published keys take no selection weight, on any tests."""
    strategy, combines = str(rng.choice(["tree", "blt", "dense"])), rng.random() < 0.4
    aggregates = tuple(a for a in (COUNT, SUM, MEAN, UNITS) if rng.random() < 0.5) or (COUNT,)
    line = random_timeline(rng)
    last = int(line["triggers"])  # type: ignore[call-overload]
    if "slide" in line and last > MAX_SKIPPING_WINDOWS * int(line["slide"]):  # type: ignore
        del line["slide"]
    test_times = np.flatnonzero(rng.random(last - 1) < rng.choice([0.1, 0.4, 1.0])) + 1
    tests = [None, int(rng.integers(1, 20)), (*test_times.tolist(), last)][int(rng.integers(3))]
    weights = float(rng.choice([0.5, 1.0, 3.0])), float(rng.choice([0.5, 1.0, 2.0]))
    if line["windows"] == 1 and rng.random() < 0.3:
        line["period"] = int(rng.integers(1, last + 1))
    return make_plan(
        **line, aggregates=(COUNT, *aggregates[1:]) if combines else aggregates, strategy=strategy,
        epsilon=float(rng.choice([5.0, 9.0, 40.0])),
        contributions=int(rng.integers(2, 9)), per_key_bound=1 if combines else None,
        combine=combines, skip=True, tests=tests, weights=SelectionWeights(*weights),
        refresh_every=int(rng.integers(1, 6)), pre_threshold=int(rng.choice([0, 0, 1, 3])),
    )  # type: ignore[arg-type]  # fmt: skip


def check(
    seed: int, ring: KeyRing, paths: Iterator[str], draw: Callable[..., Plan] = random_plan
) -> int:
    """Compare one random plan on a random stream; returns how many rows it released."""
    rng = np.random.default_rng([seed, 11])
    plan = draw(rng)
    users, heavy = int(rng.integers(50, 300)), bool(rng.random() < 0.5)
    stream = generate(plan, seed, users=users, keys=30, heavy=heavy)
    layout = {"shards": int(rng.integers(1, 5)), "look_ahead": int(rng.integers(1, 20))}
    got = run(plan, paths, stream, **layout)
    assert got == slow(plan, ring, stream), f"seed {seed}"
    return sum(map(len, got.values()))


def test_random_plans(ring: KeyRing, store_paths: Iterator[str]) -> None:
    assert sum(check(seed, ring, store_paths) > 20 for seed in range(CI)) > CI / 2


@pytest.mark.slow
def test_random_plans_long(ring: KeyRing, store_paths: Iterator[str]) -> None:
    for seed in range(CI, LONG):
        check(seed, ring, store_paths)


def test_random_plans_that_skip(ring: KeyRing, store_paths: Iterator[str]) -> None:
    rows = [check(seed, ring, store_paths, random_skipping_plan) for seed in range(SKIPPING)]
    assert max(rows) > 20


@pytest.mark.slow
def test_random_plans_that_skip_long(ring: KeyRing, store_paths: Iterator[str]) -> None:
    for seed in range(SKIPPING, SKIPPING_LONG):
        check(seed, ring, store_paths, random_skipping_plan)

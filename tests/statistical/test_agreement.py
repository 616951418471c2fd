"""The real pipeline against a direct simulation of the same mechanism on the paper's data.

The simulation shares nothing with the flow but sigma and tau: own data generator, admission,
Honaker estimator and noise.  Keys, L1 and L2 must agree; a sabotaged one (sigma of another
budget in the simulation) must not.
"""

from pathlib import Path
from typing import Any

import pytest

from dpstream.accounting.budget.allocation import allocate
from dpstream.accounting.weights import MILD, STEEP, SelectionWeights
from dpstream.pipelines.formats.encodings import read_releases
from tests.bench.paper.jobs import Frame, Setting, write_job
from tests.bench.paper.modes import parse_mode
from tests.bench.paper.one_run import in_child
from tests.bench.paper.paper import published_budget
from tests.bench.paper.runs import AS_PUBLISHED, ONE_RUN
from tests.bench.paper.synth import Synth, generate
from tests.bench.paper.truth import Truth, errors, load
from tests.oracle.simulation import Design, admit, ranked, simulate, table1_plan, table1_records

KINDS: dict[str, dict[str, Any]] = {
    "sticky,strategy=tree,weights=uniform": {"strategy": "tree"},
    "rounds,strategy=tree": {"strategy": "tree", "mode": "rounds"},
    "paper": {"strategy": "tree", "mode": "rounds"},
    "strategy=blt,weights=uniform": {"strategy": "blt"},
    "strategy=blt,weights={offset=3.0,power=0.5},skip=false": {
        "strategy": "blt",
        "skip": False,
        "weights": SelectionWeights(3.0, 0.5),
    },
    "strategy=blt,per_key_bound=1,weights=uniform": {
        "strategy": "blt",
        "per_key_bound": 1,
    },
    "combined,skip=false": {
        "skip": False,
        "strategy": "blt",
        "per_key_bound": 1,
        "combine": True,
        "weights": SelectionWeights(3.0, 1.5),
    },
    "rounds,strategy=blt": {"strategy": "blt", "mode": "rounds"},
    "sticky": {"strategy": "blt", "weights": MILD},
    "combined": {
        "strategy": "blt",
        "per_key_bound": 1,
        "combine": True,
        "weights": STEEP,
        "usual_weights": True,
    },
}

SIZES = [
    *(
        pytest.param(60_000, 60_000, 20, kind, 0.08, id=f"small-{kind}")
        for number, kind in enumerate(KINDS)
        if number in (0, 4, 8, 10)
    ),
    *(
        pytest.param(
            1_000_000, 1_000_000, triggers, kind, 0.03,
            id=f"tenth-{triggers}-{kind}", marks=pytest.mark.slow,
        )
        for triggers in (100, 1000)
        for kind in KINDS
    ),
]  # fmt: skip


@pytest.mark.parametrize(("users", "keys", "triggers", "kind", "tolerance"), SIZES)
def test_pipeline_agrees_with_the_simulation(
    tmp_path: Path, users: int, keys: int, triggers: int, kind: str, tolerance: float
) -> None:
    data = tmp_path / "records.parquet"
    generate(Synth(users=users, keys=keys, seed=5), data)
    frame = Frame(data, "int", tmp_path / "runs", 6.0, 1e-9)
    job = write_job(frame, Setting(parse_mode(kind), triggers, 32))
    published = parse_mode(kind).published
    in_child(ONE_RUN, str(job), *([AS_PUBLISHED] if published else []))
    truth = Truth(load(data, users=False), triggers)
    got = errors(truth, read_releases(job.parent / "releases"))

    raw = table1_records(users, keys, seed=9)
    bounded = admit(ranked(raw), 32)
    privacy = KINDS[kind]
    plan = table1_plan(triggers, **privacy)
    spend = published_budget if published else allocate
    design = Design.of(plan, spend(plan))
    expected = simulate(design, bounded, raw, keys, seed=3)
    for name in ("keys", "l1", "l2"):
        assert got[name] == pytest.approx(getattr(expected, name), rel=tolerance), name

    weaker = table1_plan(triggers, epsilon=4.5, **privacy)
    other = simulate(Design.of(weaker, spend(weaker)), bounded, raw, keys, seed=3)
    assert got["keys"] != pytest.approx(other.keys, rel=tolerance)

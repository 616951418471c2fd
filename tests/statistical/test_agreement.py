"""The real pipeline against a direct simulation of the same mechanism on the seed's data.

The simulation shares nothing with the flow but sigma and tau: own data generator, admission,
Honaker estimator and noise.  Keys, L1 and L2 must agree; the sabotaged twin (sigma of another
budget in the simulation) must not.
"""

import json
from pathlib import Path

import pytest

from accounting.weights import SelectionWeights
from pipelines.sinks import read_releases
from pipelines.synth import Synth, generate
from tests.bench.common import in_child, write_job
from tests.bench.table1 import Truth, errors
from tests.oracle.simulation import Design, admit, ranked, simulate, table1_plan, table1_records

STEEP = SelectionWeights(3.0, 1.5)
KINDS: dict[str, dict[str, object]] = {
    "sticky": {"strategy": "tree"},
    "rounds": {"strategy": "tree", "mode": "rounds"},
    "paper": {"strategy": "tree", "mode": "paper", "allow_unsound": True},
    "toeplitz": {"strategy": "toeplitz"},
    "blt": {"strategy": "blt"},
    "weights": {"strategy": "blt", "weights": SelectionWeights(3.0, 0.5)},
    "per key": {"strategy": "toeplitz", "per_key_bound": 1},
    "combined": {"strategy": "blt", "weights": STEEP, "per_key_bound": 1, "combine": True},
}


def _as_toml(privacy: dict[str, object]) -> str:
    """Lines of ``[privacy]`` that the job template does not have itself."""
    lines = []
    for name, value in privacy.items():
        if isinstance(value, SelectionWeights):
            lines.append(f"{name} = {{ offset = {value.offset}, power = {value.power} }}")
        elif name not in ("mode", "allow_unsound"):
            lines.append(f"{name} = {json.dumps(value)}")
    return "\n".join(lines)


SIZES = [
    pytest.param(60_000, 60_000, 20, "sticky", 0.08, id="small-sticky"),
    pytest.param(60_000, 60_000, 20, "rounds", 0.08, id="small-rounds"),
    pytest.param(60_000, 60_000, 20, "combined", 0.08, id="small-combined"),
    *(
        pytest.param(
            1_000_000, 1_000_000, triggers, kind, 0.03,
            id=f"tenth-{kind}-{triggers}", marks=pytest.mark.slow,
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
    privacy = KINDS[kind]
    mode = str(privacy.get("mode", "sticky"))
    job = write_job(tmp_path, "run", triggers, mode=mode, privacy=_as_toml(privacy))
    in_child("tests.bench.one_run", str(job))
    truth = Truth(data, triggers)
    got = errors(truth, read_releases(tmp_path / "run" / "releases"))

    raw = table1_records(users, keys, seed=9)
    bounded = admit(ranked(raw), 32)
    plan = table1_plan(triggers, **privacy)
    from accounting.budget import allocate

    design = Design.of(plan, allocate(plan))
    expected = simulate(design, bounded, raw, keys, seed=3)
    for name in ("keys", "l1", "l2"):
        assert got[name] == pytest.approx(getattr(expected, name), rel=tolerance), name

    weaker = table1_plan(triggers, epsilon=4.5, **privacy)
    other = simulate(Design.of(weaker, allocate(weaker)), bounded, raw, keys, seed=3)
    assert got["keys"] != pytest.approx(other.keys, rel=tolerance)

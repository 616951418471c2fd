"""The real pipeline against a direct simulation of the same mechanism on the paper's data.

The simulation shares nothing with the flow but sigma and tau: own data generator, admission,
Honaker estimator and noise.  Keys, L1 and L2 must agree; a sabotaged one (sigma of another
budget in the simulation) must not.

P6: names, rows, order and bytes of releases are functions of the plan and the released keys.
"""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from dpstream.accounting.budget.allocation import allocate
from dpstream.accounting.plan.plan import Plan
from dpstream.accounting.weights import MILD, STEEP, SelectionWeights
from dpstream.dp_transforms.flow import run_in_memory
from dpstream.pipelines.connectors.files.sink import release_path
from dpstream.pipelines.formats.encodings import read_releases
from dpstream.state import open as stores
from tests.bench.paper.jobs import Frame, Setting, parse_mode, write_job
from tests.bench.paper.one_run import in_child
from tests.bench.paper.runs import ONE_RUN
from tests.bench.paper.synth import Synth, generate
from tests.bench.paper.truth import Truth, errors, load
from tests.oracle.simulation import Design, admit, ranked, simulate, table1_plan, table1_records
from tests.streams import COUNT, MEAN, START, STEP, begin, make_plan, positioned
from tests.written import write_release

KINDS: dict[str, dict[str, Any]] = {
    "sticky,strategy=tree,weights=uniform": {"strategy": "tree"},
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
        if number in (0, 2, 5)
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
    in_child(ONE_RUN, str(job))
    truth = Truth(load(data, users=False), triggers)
    got = errors(truth, read_releases(job.parent / "releases"))

    raw = table1_records(users, keys, seed=9)
    bounded = admit(ranked(raw), 32)
    privacy = KINDS[kind]
    plan = table1_plan(triggers, **privacy)
    design = Design.of(plan, allocate(plan))
    expected = simulate(design, bounded, raw, keys, seed=3)
    for name in ("keys", "l1", "l2"):
        assert got[name] == pytest.approx(getattr(expected, name), rel=tolerance), name

    weaker = table1_plan(triggers, epsilon=4.5, **privacy)
    other = simulate(Design.of(weaker, allocate(weaker)), bounded, raw, keys, seed=3)
    assert got["keys"] != pytest.approx(other.keys, rel=tolerance)


ORDERED_KINDS = ("parquet", "csv", "jsonl")
SHUFFLES = 200
TRIGGERS = 3
#: (page, users): above the threshold by ten sds of its noise from the first trigger on, or a single
#: user each.
RELEASED = {f"k{n}": 360 + 3 * n for n in range(5)}
ALONE = {f"alone{n}": 1 for n in range(30)}


def plan_of() -> Plan:
    return make_plan(
        triggers=TRIGGERS, windows=1, aggregates=(COUNT, MEAN), epsilon=6.0, delta=1e-6,
        contributions=2,
    )  # fmt: skip


@pytest.fixture(autouse=True)
def closed_stores() -> Iterator[None]:
    yield
    stores.close_all()


def rows_of(pages: dict[str, int], seed: int = 1) -> list[tuple[str, str, int, float]]:
    """(user, page, event, value) of a stream that touches each page with so many users."""
    rng = np.random.default_rng(seed)
    return [
        (f"{page}-u{n}", page, START + int(rng.integers(0, TRIGGERS * STEP)), float(rng.normal()))
        for page, users in pages.items()
        for n in range(users)
    ]


def batches_of(
    rows: list[tuple[str, str, int, float]], seed: int | None = None
) -> list[pa.RecordBatch]:
    """Batches of the rows at fixed positions; a seed draws their sizes and their order."""
    rng = np.random.default_rng(seed)
    out, begin_at = [], 0
    while begin_at < len(rows):
        size = 64 if seed is None else int(rng.integers(1, 90))
        part = rows[begin_at : begin_at + size]
        columns: dict[str, Any] = dict(
            zip(("user", "page", "time", "value"), zip(*part, strict=True), strict=True)
        )
        columns["time"] = pa.array(columns["time"], pa.int64())
        out.append(positioned(columns, 0, begin_at))
        begin_at += size
    if seed is not None:
        out = [out[i] for i in rng.permutation(len(out))]
    return out


def release(batches: list[pa.RecordBatch], folder: Path, shards: int) -> list[pa.RecordBatch]:
    """Sealed releases of a run on a new store."""
    run = begin(plan_of(), folder / f"s{len(list(folder.glob('*.db')))}.db", shards)
    releases, _ = run_in_memory(run, batches)
    stores.close_all()
    return releases


def written(releases: list[pa.RecordBatch], folder: Path, kind: str) -> dict[str, bytes]:
    """Files of the releases by name."""
    for batch in releases:
        write_release(folder, kind, batch)
    files = (path for path in sorted(folder.rglob("*")) if path.is_file())
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}


def test_shuffles_give_the_same_bytes(tmp_path: Path) -> None:
    rows = rows_of(RELEASED | ALONE)
    calm = release(batches_of(rows), tmp_path, 2)
    expected = {kind: written(calm, tmp_path / kind, kind) for kind in ORDERED_KINDS}
    for kind, files in expected.items():
        names = [release_path(0, trigger, kind).as_posix() for trigger in (1, 2, 3)]
        assert list(files) == names
    for seed in range(SHUFFLES):
        releases = release(batches_of(rows, seed), tmp_path, 1 + seed % 3)
        kind = ORDERED_KINDS[seed % len(ORDERED_KINDS)]
        assert written(releases, tmp_path / f"out{seed}", kind) == expected[kind], f"seed {seed}"


def test_rows_are_sorted_and_say_nothing_more(tmp_path: Path) -> None:
    """Other values, other users, other order of first appearance: same names, rows and order."""
    one = release(batches_of(rows_of(RELEASED, 1)), tmp_path, 2)
    other = rows_of(dict(reversed(RELEASED.items())), 2)
    two = release(batches_of(other[::-1], 7), tmp_path, 3)
    for a, b in zip(one, two, strict=True):
        pages = a.column("page").to_pylist()
        assert pages == sorted(pages) == b.column("page").to_pylist()
        assert a.schema.equals(b.schema, check_metadata=True)
        for name in ("release_id", "window_start", "trigger_time", "n_sd", "run_id"):
            assert a.column(name) == b.column(name)
    assert one[-1].num_rows == len(RELEASED)


def test_keys_that_are_not_released_change_nothing(tmp_path: Path) -> None:
    """Single users on keys of their own, and dead letters, leave every byte as it was."""
    rows = rows_of(RELEASED)
    without = written(release(batches_of(rows), tmp_path, 2), tmp_path / "a", "parquet")
    bad = [("", "k0", START, 1.0), ("x", "k0", START - 1, 1.0), ("x", "k0", START, float("nan"))]
    releases = release(batches_of(rows + rows_of(ALONE, 3) + bad), tmp_path, 2)
    assert written(releases, tmp_path / "b", "parquet") == without


def test_every_trigger_has_its_file_even_when_empty(tmp_path: Path) -> None:
    for kind in ORDERED_KINDS:
        files = written(release([], tmp_path, 2), tmp_path / kind, kind)
        assert list(files) == [release_path(0, t, kind).as_posix() for t in (1, 2, 3)]


CHILD = """
import sys
from pathlib import Path
from tests.statistical import test_output_order as job
folder = Path(sys.argv[1])
rows = job.rows_of(job.RELEASED)
job.written(job.release(job.batches_of(rows, 3), folder, 3), folder / "out", "parquet")
"""


def test_hash_seeds_do_not_matter(tmp_path: Path) -> None:
    rows = rows_of(RELEASED)
    expected = written(release(batches_of(rows), tmp_path, 2), tmp_path / "out", "parquet")
    children = []
    for seed in ("0", "4242"):
        (tmp_path / seed).mkdir()
        command = [sys.executable, "-c", CHILD, str(tmp_path / seed)]
        root = Path(__file__).parents[2]
        environment = os.environ | {"PYTHONHASHSEED": seed}
        children.append(subprocess.Popen(command, cwd=root, env=environment))
    for seed, child in zip(("0", "4242"), children, strict=True):
        assert child.wait(120) == 0
        folder = tmp_path / seed / "out"
        assert {n: (folder / n).read_bytes() for n in expected} == expected

"""The whole flow: Beam gives the bytes of the pure function, and nothing private shapes them."""

import hashlib
import os
import pickle
import subprocess
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import apache_beam as beam
import msgspec
import numpy as np
import pyarrow as pa
import pytest
from apache_beam.runners.portability.fn_api_runner import FnApiRunner

from dpstream.accounting.plan.plan import Plan
from dpstream.accounting.weights import SelectionWeights
from dpstream.dp_transforms import flow
from dpstream.dp_transforms.batches import (
    DEAD_LETTER_SCHEMA,
    ArrowBatchCoder,
    release_schema,
    with_plain_stamps,
)
from dpstream.dp_transforms.flow import DPStream, Output, run_in_memory
from dpstream.dp_transforms.noise.secret_source import SecretSource
from dpstream.dp_transforms.run import Run
from dpstream.state import open as stores
from tests import streams
from tests.streams import (
    COUNT,
    MEAN,
    RUN_ID,
    STEP,
    SUM,
    UNITS,
    as_rows,
    begin,
    by_name,
    generate,
    make_plan,
    positioned,
    public_table,
    released,
)

#: What a key file of these tests holds.
KEY = bytes(range(64, 96))
PLANS: dict[str, Plan] = {
    "sticky": make_plan(aggregates=(COUNT, MEAN, SUM, UNITS)),
    "late": make_plan(stamped=True, triggers=16, lateness=4, skew=STEP, period=6),
    "sliding": make_plan(triggers=8, slide=4, windows=4),
    "public": make_plan(public="fixed list", aggregates=(COUNT, UNITS)),
    "combined": make_plan(
        aggregates=(COUNT, SUM), strategy="blt", contributions=5, epsilon=9.0,
        per_key_bound=1, weights=SelectionWeights(), combine=True,
    ),
    "skip": make_plan(
        aggregates=(COUNT, SUM), strategy="blt", contributions=5, epsilon=9.0, triggers=16,
        lateness=4, stamped=True, weights=SelectionWeights(1.0, 2.0), skip=True, tests=4,
    ),
}  # fmt: skip
MODES = pytest.mark.parametrize(
    "plan", PLANS.values(), ids=[name.replace(" ", "-") for name in PLANS]
)
Names = dict[tuple[int, int], bytes]


def options(plan: Plan) -> dict[str, object]:
    return {"public": public_table(plan, range(0, 90, 2))} if plan.public_keys else {}


def through_beam(
    transform: DPStream, source: list[pa.RecordBatch], folder: Path
) -> tuple[Names, list[dict[str, object]]]:
    """Sealed releases and dead letters of a run on the FnApiRunner in this process."""
    folder.mkdir()
    with beam.Pipeline(runner=FnApiRunner()) as pipeline:
        output = pipeline | beam.Create(source, reshuffle=False) | transform
        assert isinstance(output, Output)
        _ = output.releases | "Keep" >> beam.ParDo(Keep(str(folder / "release")))
        _ = output.dead_letter | "Dead" >> beam.ParDo(Keep(str(folder / "dead")))
    batches: dict[str, list[Any]] = {kind: [] for kind in ("release", "dead")}
    for path in sorted(folder.iterdir()):
        batches[path.name.split("-")[0]].append(ArrowBatchCoder().decode(path.read_bytes()))
    dead = [row for batch in batches["dead"] for row in batch.to_pylist()]
    return by_name(batches["release"]), dead


class Keep(beam.DoFn):
    """Writes every element to a file of its own."""

    def __init__(self, stem: str) -> None:
        self._stem, self._count = stem, 0

    def process(self, element: pa.RecordBatch) -> None:
        self._count += 1
        Path(f"{self._stem}-{self._count}-{id(self)}").write_bytes(
            ArrowBatchCoder().encode(element)
        )


def in_memory(
    plan: Plan, path: str, source: list[pa.RecordBatch]
) -> tuple[Names, list[dict[str, object]]]:
    run = begin(plan, path, **options(plan))  # type: ignore[arg-type]
    releases, dead = run_in_memory(run, source)
    stores.close_all()
    return by_name(releases), [row for batch in dead for row in batch.to_pylist()]


def ordered(rows: list[dict[str, object]]) -> list[tuple[object, ...]]:
    return sorted(tuple(row.values()) for row in rows)


# --- Beam ------------------------------------------------------------------------------


@MODES
def test_beam_gives_the_bytes_of_the_pure_function(
    plan: Plan, store_paths: Iterator[str], tmp_path: Path
) -> None:
    source = generate(plan).batches(300)
    expected, letters = in_memory(plan, next(store_paths), source)
    run = begin(plan, next(store_paths), **options(plan))  # type: ignore[arg-type]
    got, dead = through_beam(DPStream(plan, run), source, tmp_path / "first")
    assert got == expected
    assert ordered(dead) == ordered(letters)
    assert sum(len(as_rows(data)) for data in got.values()) > 50
    # Again on the same store: read back, not computed.
    stores.close_all()
    assert through_beam(DPStream(plan, run), source, tmp_path / "again")[0] == expected


def test_empty_input_seals_an_empty_object_for_every_window_and_trigger(
    store_paths: Iterator[str], tmp_path: Path
) -> None:
    plan = PLANS["late"]
    steps = {
        (w, t) for w in range(plan.timeline.windows) for t in range(1, plan.timeline.triggers + 1)
    }
    run = begin(plan, next(store_paths))
    for number, source in enumerate(([], generate(plan, records=5).batches(1)[:1])):
        got, _ = through_beam(DPStream(plan, run), source, tmp_path / str(number))
        assert set(got) == steps
        assert not any(as_rows(data) for data in got.values())
        run = begin(plan, next(store_paths))
    assert set(in_memory(plan, next(store_paths), [])[0]) == steps


def test_python_interface(store_paths: Iterator[str], tmp_path: Path) -> None:
    """``records | DPStream(plan, secret=..., store=...)`` with fresh noise each run."""
    plan = PLANS["sticky"]
    key = tmp_path / "noise.secret"
    key.write_text(KEY.hex())
    key.chmod(0o600)
    source = generate(plan).batches(300)
    results = []
    for number in range(2):
        store = f"sqlite:{next(store_paths)}"
        transform = DPStream(plan, secret=f"file:{key}", store=store, shards=2, source="stream 1")
        results.append(through_beam(transform, source, tmp_path / str(number))[0])
    first, second = ([row for data in r.values() for row in as_rows(data)] for r in results)
    assert len(first) > 50 and len(second) > 50
    runs = {row["run_id"] for row in first} | {row["run_id"] for row in second}
    assert len(runs) == 2 and RUN_ID not in runs
    sums = [
        {row["page"]: row["n"] for row in rows if row["trigger"] == 12} for rows in (first, second)
    ]
    shared = set(sums[0]) & set(sums[1])
    assert shared and all(sums[0][page] != sums[1][page] for page in shared)


def test_the_pipeline_holds_the_keys_path_and_never_the_key(tmp_path: Path) -> None:
    key = tmp_path / "noise.secret"
    key.write_text(KEY.hex())
    key.chmod(0o600)
    run = Run(PLANS["sticky"], SecretSource(f"file:{key}"), "sqlite:none", 2, RUN_ID)
    pickled = pickle.dumps(run)
    assert str(key).encode() in pickled
    assert KEY.hex().encode()[:16] not in pickled and KEY[:8] not in pickled
    with pytest.raises(TypeError):
        pickle.dumps(run.keys.ring())


def test_errors_leave_a_stage_without_what_they_say(
    store_paths: Iterator[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
) -> None:
    plan = PLANS["sticky"]
    source = generate(plan, records=50).batches(50)
    secret = source[0].column("user")[0].as_py()

    def leaking(*_: object) -> None:
        raise KeyError(secret)

    monkeypatch.setattr(flow, "decide_records", leaking)
    run = begin(plan, next(store_paths))
    with pytest.raises(Exception, match="failed with KeyError") as caught:
        through_beam(DPStream(plan, run), source, tmp_path / "out")
    output = "".join(traceback.format_exception(caught.value)) + caplog.text
    output += "".join(capfd.readouterr())
    assert "stage.trigger_time" in output and repr(secret) not in output
    assert repr(secret) in "".join(traceback.format_exception(KeyError(secret)))


# --- the same bytes however it is run ------------------------------------------------------


@MODES
def test_shards_batches_and_arrival_do_not_matter(plan: Plan, store_paths: Iterator[str]) -> None:
    stream = generate(plan)

    def result(rows: int, seed: int | None, shards: int) -> Names:
        source = stream.batches(rows, seed)
        return released(plan, source, next(store_paths), shards=shards, **options(plan))

    expected = result(10_000, None, 1)
    for shards, rows, seed in ((2, 5, 1), (3, 37, 2), (7, 400, None)):
        assert result(rows, seed, shards) == expected


@MODES
def test_repeated_and_recut_deliveries_do_not_matter(
    plan: Plan, store_paths: Iterator[str]
) -> None:
    stream = generate(plan)
    source = stream.batches(400)
    again = source + stream.batches(23, seed=4) + stream.batches(211, seed=5)[::2]
    assert released(plan, again, next(store_paths), **options(plan)) == released(
        plan, source, next(store_paths), **options(plan)
    )


SCRIPT = """
import hashlib, sys
from tests.dp_transforms.test_flow import PLANS, options
from tests.streams import generate, released
for number, plan in enumerate(PLANS.values()):
    got = released(plan, generate(plan).batches(300), f"{sys.argv[1]}-{number}", **options(plan))
    for name, data in got.items():
        print(*name, hashlib.sha256(data).hexdigest())
"""


def test_hash_seeds_do_not_matter(store_paths: Iterator[str]) -> None:
    expected = []
    for plan in PLANS.values():
        got = released(plan, generate(plan).batches(300), next(store_paths), **options(plan))
        expected += [f"{w} {t} {hashlib.sha256(data).hexdigest()}" for (w, t), data in got.items()]
    started = []
    for seed in ("0", "1", "4242"):
        env = os.environ | {"PYTHONHASHSEED": seed, "PYTHONPATH": os.pathsep.join(sys.path)}
        command = [sys.executable, "-c", SCRIPT, next(store_paths)]
        pipe = subprocess.PIPE
        started.append(subprocess.Popen(command, env=env, stdout=pipe, stderr=pipe, text=True))
    for process in started:
        out, error = process.communicate(timeout=300)
        assert process.returncode == 0, error
        assert out.splitlines() == expected


def test_other_plans_keys_and_runs_give_other_noise(
    store_paths: Iterator[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The equalities above would hold for a flow without noise; this one does not."""
    plan = PLANS["sticky"]
    source = generate(plan).batches(300)
    honest = released(plan, source, next(store_paths))
    other = msgspec.structs.replace(plan, source="another")
    assert figures(released(other, source, next(store_paths))) != figures(honest)
    monkeypatch.setattr(streams, "KEYS", SecretSource(None, "12" * 32))
    assert figures(released(plan, source, next(store_paths))) != figures(honest)


def figures(got: Names) -> list[object]:
    return [row["n"] for data in got.values() for row in as_rows(data)]


# --- what a release looks like ---------------------------------------------------------------


@MODES
def test_release_schema(plan: Plan, store_paths: Iterator[str]) -> None:
    run = begin(plan, next(store_paths), **options(plan))  # type: ignore[arg-type]
    releases, dead = run_in_memory(run, generate(plan).batches(300))
    timeline = plan.timeline
    seen = set()
    for batch in releases:
        assert with_plain_stamps(batch).schema.equals(release_schema(plan))
        window = int(batch.schema.metadata[b"dpstream.window"])
        trigger = int(batch.schema.metadata[b"dpstream.trigger"])
        rows = batch.to_pylist()
        assert [r["page"] for r in rows] == sorted({str(r["page"]) for r in rows})
        start = timeline.start + window * timeline.slide
        for row in rows:
            micros = [
                int(row[n].timestamp() * 1e6)
                for n in ("window_start", "window_end", "trigger_time")
            ]
            assert micros == [
                start,
                start + timeline.window,
                start + trigger * timeline.trigger_every,
            ]
            assert row["trigger"] == trigger
            assert (row["plan_hash"], row["run_id"]) == (plan.hash, "INSECURE-" + RUN_ID)
            for a in plan.aggregates:
                value, sd = row[a.name], row[f"{a.name}_sd"]
                assert sd > 0 if value is not None else (sd is None and a.kind == "mean")
            seen.add(row["release_id"])
    assert len(seen) == sum(batch.num_rows for batch in releases)
    assert all(batch.schema == DEAD_LETTER_SCHEMA for batch in dead)


@pytest.mark.parametrize("kinds", [("int",), ("bool", "string"), ("bytes", "int", "bool")])
def test_typed_keys_are_released_sorted(kinds: tuple[str, ...], store_paths: Iterator[str]) -> None:
    plan = make_plan(key=kinds, unit="int", windows=1)
    rng = np.random.default_rng(1)
    size = 900
    pools: dict[str, list[Any]] = {
        "int": [-5, 0, 2**63 - 1],
        "bool": [True, False],
        "string": ["b", "a", "\u00e9", ""],
        "bytes": [b"\xff", b"", b"a\0"],
    }
    keys = {
        field.column: [pools[kind][i] for i in rng.integers(0, len(pools[kind]), size)]
        for field, kind in zip(plan.key, kinds, strict=True)
    }
    time = plan.timeline.start + rng.integers(0, 12 * STEP, size)
    batch = positioned({"user": np.arange(size), "time": time, **keys})
    got = released(plan, [batch], next(store_paths))
    names = [field.column for field in plan.key]
    last = [tuple(row[n] for n in names) for row in as_rows(got[0, 12])]
    assert last == sorted(set(zip(*(keys[n] for n in names), strict=True)))

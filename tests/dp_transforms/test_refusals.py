"""What the flow refuses, and in which words: a golden text, renewed by ``REWRITE=1``."""

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import apache_beam as beam
import numpy as np
import pyarrow as pa
import pytest

from dpstream.dp_transforms.batches import HAND_OVER, ID, PARTITION, ROWS
from dpstream.dp_transforms.beam.clock import paced_clock
from dpstream.dp_transforms.flow import DPStream
from dpstream.dp_transforms.ingest.records import canonical_public_keys, positions, require_once
from dpstream.dp_transforms.noise.paths import Paths
from dpstream.dp_transforms.noise.prf import KeyRing
from dpstream.dp_transforms.noise.secret_source import SecretSource, read_secret
from dpstream.state import open as stores
from tests.dp_transforms.noise.test_paths import key_ids, stream_of
from tests.dp_transforms.runs import PLANS
from tests.golden.pinned import check, of_refusals
from tests.streams import begin, generate, make_plan

KEY = "5e" * 32
VERSIONS = "gcp:projects/p/secrets/s/versions"
BATCH = generate(PLANS["sticky"], records=10).batches(100)[0]
LARGE = pa.RecordBatch.from_pydict({"n": list(range(2000))})


def twice() -> None:
    where = {"partition": pa.array([0, 0], pa.int32()), "offset": pa.array([3, 3])}
    require_once(pa.RecordBatch.from_pydict({"unit": pa.array([bytes(16)] * 2, ID), **where}))


def public(*pages: str | None) -> None:
    canonical_public_keys(make_plan(public="list"), pa.table({"page": pages}))


def opened_by(first: Callable[[], object], second: Callable[[], object]) -> None:
    with first(), second():  # type: ignore[attr-defined]
        pass


def taken(times: int, ended: bool) -> None:
    with HAND_OVER.open():
        ticket = HAND_OVER.give(LARGE) or b""
        for _ in range(times):
            HAND_OVER.take(ticket)
    if ended:
        HAND_OVER.take(ticket)


def named_twice() -> None:
    table, rows = Paths(stream_of(9)), np.arange(3)
    table.start(rows, key_ids(3))
    for _ in range(2):
        table.advance(rows, np.full(3, 4))


def destroyed() -> None:
    ring = KeyRing(bytes(range(32)))
    ring.destroy()
    ring.name(())


@pytest.fixture
def calls(tmp_path: Path, store_paths: Iterator[str]) -> dict[str, Callable[[], object]]:
    """By what is wrong with them."""
    for name, text, mode in (("open", KEY, 0o644), ("short", KEY[:-1], 0o600)):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(mode)
    run, line = begin(PLANS["sticky"], next(store_paths)), PLANS["sticky"].timeline
    ring = SecretSource(None, KEY).ring()
    runs = f"{BATCH.num_rows},1".encode()
    return {
        "no batches": partial(positions, pa.table({})),
        "no position": partial(positions, BATCH.replace_schema_metadata(None)),
        "runs of other lengths": partial(
            positions,
            BATCH.replace_schema_metadata({**BATCH.schema.metadata, ROWS: runs, PARTITION: b"0"}),
        ),
        "a position twice": twice,
        "a public key that is NULL": partial(public, "a", None),
        "a clock that cannot wait": partial(paced_clock, beam.Create([1]), line, lambda at: at),
        "a batch taken twice": partial(taken, 2, False),
        "a batch of a run that has ended": partial(taken, 0, True),
        "bytes beside references": partial(opened_by, HAND_OVER.open, HAND_OVER.by_bytes),
        "references beside bytes": partial(opened_by, HAND_OVER.by_bytes, HAND_OVER.open),
        "a prefix twice": named_twice,
        "a ring that has ended": destroyed,
        "a key of another length": partial(KeyRing, b"\1" * 31),
        "two secrets": partial(SecretSource, "env:A", KEY),
        "no reference": partial(SecretSource, "noise.secret"),
        "a version that can move": partial(SecretSource, f"{VERSIONS}/latest"),
        "a test secret of other digits": partial(SecretSource, None, "5E" * 32),
        "no secret": SecretSource().ring,
        "no secret where one is needed": partial(SecretSource().required, "secret", "is needed"),
        "a secret of another run": SecretSource(None, KEY).of_run("r", "0" * 32).ring,
        "a variable that is not set": partial(read_secret, "env:DPSTREAM_NO_SUCH_VARIABLE"),
        "a file that others can read": partial(read_secret, f"file:{tmp_path / 'open'}"),
        "63 digits": partial(read_secret, f"file:{tmp_path / 'short'}"),
        "a stream without a source": partial(DPStream, run.plan, secret="env:A"),
        "a plan that is not the run's": partial(DPStream, make_plan(epsilon=5.5), run),
        "an account of a run": partial(DPStream, run.plan, run, account=ring),  # type: ignore[arg-type]
    }


def test_refusals(calls: dict[str, Callable[[], object]], tmp_path: Path) -> None:
    text = of_refusals(calls).replace(str(tmp_path), "FOLDER")
    stores.close_all()
    check(Path(__file__).with_name("refusals.txt"), text)

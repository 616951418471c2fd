"""kill -9 of a launcher whose runner does stage 1: one charge, one answer, nothing private left."""

import os
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest

from dpstream.dp_transforms.noise.prf import KeyRing
from dpstream.pipelines.sql.ask import ask, drawn
from dpstream.pipelines.sql.load import load_catalog
from dpstream.pipelines.sql.query_plan import question_of
from dpstream.pipelines.sql.receipt import read
from dpstream.state.ledger.events import Charge
from tests.pipelines.sql.asking import KEY, charges
from tests.pipelines.sql.test_spread import DIRECT, EVERY, shop
from tests.runners.engines import need_flink

#: Kills its own process, which is launcher and workers, right behind a step.
_CHILD = """
import os, signal, sys
from dpstream.pipelines.runners.bounded import Runner
from dpstream.pipelines.sql import ask as asking, flow, receipt, spread
from dpstream.pipelines.sql.load import load_catalog
from dpstream.state.ledger.contract import AnswerLog
catalog, text, runner, fault = sys.argv[1:]

def after(home, name, times=1):
    real, left = getattr(home, name), [times]
    def call(*args, **more):
        out = real(*args, **more)
        left[0] -= 1
        if not left[0]:
            if name == "drawn":
                print(receipt.read(out)[1].to_pylist(), flush=True)
            os.kill(os.getpid(), signal.SIGKILL)
        return out
    setattr(home, name, call)

spread.ROWS_AT_ONCE = 500
steps = {
    "charge": (AnswerLog, "begin"), "pipeline": (flow, "build"),
    "histograms": (flow, "write_counts", 2), "sums": (flow, "write_sums", 2),
    "handed over": (spread, "read_sums"), "draw": (asking, "drawn"),
    "receipt": (AnswerLog, "commit"),
}
after(*steps[fault])
asking.ask(load_catalog(catalog), text, shards=4, runner=Runner(runner))
"""
#: Where a killed launcher leaves files of its workers.
_LEFT = {"histograms": 2, "sums": 2, "handed over": 4}
_STEPS = ["charge", "pipeline", *_LEFT, "draw", "receipt"]


_MARK = "private page"


def _marked(path: Path) -> Path:
    """The catalog, of pages whose names can be found wherever they are written."""
    for file in path.parent.glob("visits-*.parquet"):
        table = pq.read_table(file)
        names = pc.binary_join_element_wise(pa.scalar(_MARK), table.column("page"), " ")
        place = table.schema.get_field_index("page")
        pq.write_table(table.set_column(place, "page", names), file, row_group_size=300)
    return path


@pytest.mark.parametrize(
    ("runner", "fault"),
    [
        *(pytest.param("DirectRunner", step, marks=() if step == "sums" else pytest.mark.slow)
          for step in _STEPS),
        *(pytest.param(runner, step, marks=pytest.mark.slow)
          for runner in ("PrismRunner", "FlinkRunner") for step in ("sums", "handed over")),
    ],
)  # fmt: skip
def test_a_killed_launcher_is_charged_once_and_leaves_nothing_private(
    runner: str, fault: str, tmp_path: Path
) -> None:
    if runner == "FlinkRunner":
        need_flink()
    path, elsewhere = _marked(shop(tmp_path / "shop")), tmp_path / "elsewhere"
    elsewhere.mkdir()
    killed = subprocess.run(
        [sys.executable, "-c", _CHILD, str(path), EVERY, runner, fault],
        capture_output=True, text=True, timeout=240, check=False,
        env={**os.environ, "TMPDIR": str(elsewhere),
             "JAVA_TOOL_OPTIONS": f"-Djava.io.tmpdir={elsewhere}"},
    )  # fmt: skip
    assert killed.returncode == -9, killed.stderr
    [charge] = charges(path.parent)
    files = list(path.parent.glob(".dpstream-work-*/files/shard-*.arrow"))
    assert len(files) >= _LEFT.get(fault, 0) and bool(files) == (fault in _LEFT)
    catalog = load_catalog(path)
    again = DIRECT if fault in ("pipeline", "handed over") else None
    answer = ask(catalog, EVERY, runner=again)
    assert answer.header.run_id == charge.run_id and not answer.charged
    rows_text = str(read(answer.receipt)[1].to_pylist())
    assert rows_text == _undisturbed(path, charge) and _MARK in rows_text
    if fault == "draw":
        assert rows_text == killed.stdout.strip()
    assert ask(catalog, EVERY).receipt == answer.receipt
    assert charges(path.parent) == [charge]
    assert not list(path.parent.glob(".dpstream-work-*"))
    left = [file for file in elsewhere.rglob("*") if file.is_file()]
    assert not [file for file in left if _MARK.encode() in file.read_bytes()]


def _undisturbed(path: Path, charge: Charge) -> str:
    """The answer of a charge in this process, without a runner."""
    catalog = load_catalog(path)
    with KeyRing(bytearray.fromhex(KEY)) as ring:
        receipt = drawn(question_of(EVERY, catalog), catalog, ring, charge)
    return str(read(receipt)[1].to_pylist())

"""kill -9 between charge, draw and receipt, here and where a runner does stage 1: one charge, one
answer, nothing private left; and clients at once at one limit."""

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
from tests import accounts
from tests.pipelines.sql.asking import COUNTED, FRESH, KEY, charges, data_set, dp
from tests.pipelines.sql.test_spread import DIRECT, EVERY, company
from tests.runners.engines import need_flink

_TEXT = dp(f"page, {COUNTED} AS n")
#: Asks; kills its own process, which is launcher and workers, right behind a step.
_CHILD = """
import os, signal, sys
from dpstream.pipelines.runners.bounded import Runner
from dpstream.pipelines.sql import ask as asking, flow, receipt, stage
from dpstream.pipelines.sql.load import load_catalog
from dpstream.state.ledger.contract import AnswerLog
catalog, text, fault, runner = sys.argv[1:]

def after(home, name, times=1):
    real, calls = getattr(home, name), [times]
    def call(*args, **more):
        out = real(*args, **more)
        calls[0] -= 1
        if not calls[0]:
            if name == "drawn":
                print(receipt.read(out)[1].to_pylist(), flush=True)
            os.kill(os.getpid(), signal.SIGKILL)
        return out
    setattr(home, name, call)

stage.PIECE_ROWS = 500
steps = {
    "charge": (AnswerLog, "begin"), "pipeline": (flow, "build"),
    "histograms": (flow, "write_counts", 2), "sums": (flow, "write_sums", 2),
    "handed over": (stage, "read_sums"), "draw": (asking, "drawn"),
    "receipt": (AnswerLog, "commit"),
}
if fault:
    after(*steps[fault])
more = {"shards": 4, "runner": Runner(runner)} if runner else {}
print(asking.ask(load_catalog(catalog), text, **more).header.run_id)
"""
#: Where a killed launcher leaves files of its workers.
_LEFT = {"histograms": 2, "sums": 2, "handed over": 4}
_STEPS = ["charge", "pipeline", *_LEFT, "draw", "receipt"]
_MARK = "private page"


def _child(
    catalog: Path, text: str, fault: str, runner: str = "", **more: str
) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-c", _CHILD, str(catalog), text, fault, runner],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={**os.environ, **more},
    )  # fmt: skip


@pytest.mark.parametrize("fault", ["charge", "draw", "receipt"])
def test_whoever_is_killed_is_charged_once_and_answered_once(fault: str, tmp_path: Path) -> None:
    path = data_set(tmp_path)
    killed = _child(path, _TEXT, fault)
    stdout, _ = killed.communicate(timeout=120)
    assert killed.returncode == -9
    [charge] = charges(tmp_path)
    answer = ask(load_catalog(path), _TEXT)
    assert answer.header.run_id == charge.run_id and not answer.charged
    if fault == "draw":  # the same run id is the same noise
        assert str(read(answer.receipt)[1].to_pylist()) == stdout.strip()
    assert ask(load_catalog(path), _TEXT).receipt == answer.receipt
    assert charges(tmp_path) == [charge]


def test_a_fresh_request_that_was_cut_off_goes_on(tmp_path: Path) -> None:
    path = data_set(tmp_path)
    first = ask(load_catalog(path), _TEXT)
    killed = _child(path, _TEXT.replace("n", "N", 1), "charge")
    killed.communicate(timeout=120)
    assert killed.returncode == -9 or len(charges(tmp_path)) == 1
    fresh = ask(load_catalog(path), _TEXT, FRESH)
    again = ask(load_catalog(path), _TEXT, FRESH)
    assert len({first.header.run_id, fresh.header.run_id, again.header.run_id}) == 3
    assert len(charges(tmp_path)) == 3


@pytest.mark.parametrize(
    ("clients", "limit"), [(3, 1.9), pytest.param(8, 3.0, marks=pytest.mark.slow)]
)
def test_clients_at_once_never_overspend(clients: int, limit: float, tmp_path: Path) -> None:
    path = data_set(tmp_path, epsilon=limit)
    counts = [COUNTED.replace("30", str(30 + i % 6)) for i in range(clients)]  # of 8 two ask twice
    texts = [dp(f"page, {count} AS n{i}") for i, count in enumerate(counts)]
    children = [_child(path, text, "") for text in texts]
    outcomes = [(child.communicate(timeout=300), child.returncode) for child in children]
    with_answer = {out.strip() for (out, _), code in outcomes if code == 0}
    refused = [err for (_, err), code in outcomes if code != 0]
    assert with_answer == {charge.run_id for charge in charges(tmp_path)}
    assert 1 <= len(with_answer) < min(6, clients) and refused
    assert all("PolicyError: account.limit" in err for err in refused)
    ledger = accounts.opened(tmp_path / "ledger.db", "shop")
    assert all(not piece.over(ledger.history().filters) for piece in ledger.history().spent.pieces)
    ledger.close()


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
    path, elsewhere = _marked(company(tmp_path / "shop")), tmp_path / "elsewhere"
    elsewhere.mkdir()
    places = {"TMPDIR": f"{elsewhere}", "JAVA_TOOL_OPTIONS": f"-Djava.io.tmpdir={elsewhere}"}
    killed = _child(path, EVERY, fault, runner, **places)
    stdout, stderr = killed.communicate(timeout=240)
    assert killed.returncode == -9, stderr
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
        assert rows_text == stdout.strip()
    assert ask(catalog, EVERY).receipt == answer.receipt
    assert charges(path.parent) == [charge]
    assert not list(path.parent.glob(".dpstream-work-*"))
    files = [file for file in elsewhere.rglob("*") if file.is_file()]
    assert not [file for file in files if _MARK.encode() in file.read_bytes()]


def _undisturbed(path: Path, charge: Charge) -> str:
    """The answer of a charge in this process, without a runner."""
    catalog = load_catalog(path)
    with KeyRing(bytearray.fromhex(KEY)) as ring:
        receipt = drawn(question_of(EVERY, catalog), catalog, ring, charge)
    return str(read(receipt)[1].to_pylist())

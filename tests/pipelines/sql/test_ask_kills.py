"""kill -9 between charge, draw and receipt: one charge, one answer; eight clients and one limit."""

import subprocess
import sys
from pathlib import Path

import pytest

from dpstream.pipelines.sql.ask import ask
from dpstream.pipelines.sql.load import load_catalog
from dpstream.pipelines.sql.receipt import read
from tests import accounts
from tests.pipelines.sql.asking import COUNTED, FRESH, charges, data_set, dp

_TEXT = dp(f"page, {COUNTED} AS n")
_CHILD = """
import os, signal, sys
from dpstream.pipelines.sql import ask as asking, receipt
from dpstream.pipelines.sql.load import load_catalog
from dpstream.state.ledger.contract import AnswerLog
catalog, text, fault = sys.argv[1:]

def after(home, name):
    real = getattr(home, name)
    def call(*args, **more):
        out = real(*args, **more)
        if name == "drawn":
            print(receipt.read(out)[1].to_pylist(), flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    setattr(home, name, call)

if fault == "charge":
    after(AnswerLog, "begin")
elif fault == "draw":
    after(asking, "drawn")
elif fault == "receipt":
    after(AnswerLog, "commit")
answer = asking.ask(load_catalog(catalog), text)
print(answer.header.run_id)
"""


def _child(catalog: Path, text: str, fault: str) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-c", _CHILD, str(catalog), text, fault],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
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

"""kill -9 between decision, charge, scan and answer: nothing is under-counted, and one answer
stands."""

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dpstream.dp_transforms import session as drawing
from dpstream.pipelines.ask import sequence
from dpstream.pipelines.formats.receipt import table_of
from dpstream.pipelines.session.session import Session
from dpstream.state.ledger import regions
from dpstream.state.ledger.contract import AnswerLog, Ledger
from tests.pipelines.session.small import config_at

#: What is killed, and whether its charge stands: before the end of the transaction nothing does.
FAULTS: dict[str, tuple[Any, str, bool]] = {
    "decision": (regions, "planned", False),
    "append": (Ledger, "append", False),
    "charge": (AnswerLog, "begin", True),
    "scan": (drawing, "answered", True),
    "draw": (sequence, "drawn", True),
    "answer": (AnswerLog, "commit", True),
}


def killed(work: Callable[[], Any], home: Any, name: str) -> bytes:
    """Do something in a process that dies as soon as a function has returned; what it said."""
    real = getattr(home, name)
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        os.close(reading)

        def once(*given: Any, **more: Any) -> Any:
            outcome = real(*given, **more)
            if name == "drawn":
                os.write(writing, outcome)
            os.kill(os.getpid(), signal.SIGKILL)
            return outcome

        setattr(home, name, once)
        try:
            work()
        finally:  # never go on as another pytest
            os._exit(1)
    os.close(writing)
    with open(reading, "rb") as pipe:
        output = pipe.read()
    assert os.waitpid(child, 0)[1] == signal.SIGKILL
    return output


@pytest.mark.parametrize("fault", FAULTS)
def test_whoever_is_killed_has_paid_before_records_are_read(fault: str, tmp_path: Path) -> None:
    config = config_at(tmp_path)
    home, name, stands = FAULTS[fault]

    def work() -> None:
        with Session(config) as session:
            session.where("epsilon >= 1").histogram("a", 0.5)

    receipt = killed(work, home, name)
    with Session(config) as session:
        assert len(session.open_table.account.history()) == stands
        assert session.table.max_consumed() == 0.5 * stands
        answer = session.where("epsilon >= 1").histogram("a", 0.5)
        assert answer.charged != stands and len(session.open_table.account.history()) == 1
        if fault == "draw":  # the same run id is the same noise
            assert table_of(receipt) == table_of(answer.receipt)
        again = session.where("epsilon >= 1").histogram("a", 0.5)
        assert again.receipt == answer.receipt and session.table.max_consumed() == 0.5


@pytest.mark.parametrize("fault", ["charge", "draw"])
def test_a_draw_that_is_killed_is_counted(fault: str, tmp_path: Path) -> None:
    config = config_at(tmp_path)
    with Session(config) as session:
        run_id = session.where("epsilon >= 1").as_pinq(1).run_id

    def work() -> None:
        with Session(config) as session:
            session.allotment(run_id).count(0.75)

    home, name, _ = FAULTS[fault]
    killed(work, home, name)
    with Session(config) as session:
        allotment = session.allotment(run_id)
        assert allotment.left == 0.25
        assert not allotment.count(0.75).charged
        assert allotment.left == 0.25 and allotment.count(0.25).charged

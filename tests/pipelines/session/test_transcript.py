"""The transcript: every entry, in order, as what it is."""

import contextlib
from pathlib import Path

from dpstream.accounting.errors import RunError
from dpstream.pipelines.session import transcript as transcripts
from dpstream.pipelines.session.session import Session
from dpstream.pipelines.session.sliding import close_before
from tests.pipelines.session.small import config_at


def test_every_entry_is_what_it_is(tmp_path: Path) -> None:
    with Session(config_at(tmp_path), analyst="alice") as session:
        session.where("a = 0 AND epsilon >= 1").histogram("b", 0.5, [0, 5, 10])
        session.open_table.analyst = "bob"
        allotment = session.where("a = 1 AND rho >= 0.5").as_pinq(0.5, "rho")
        allotment.where("b < 5").sum("b", 0.25)
        close_before(session.open_table, "b", 1)

        def gone() -> None:
            raise RunError("table", "is gone", "bring it back")

        session.open_table.scan = gone  # type: ignore[assignment,method-assign]
        with contextlib.suppress(RunError):
            session.where("a = 2 AND b >= 1 AND epsilon >= 1").count(0.25)
        lines = transcripts.transcript(session.open_table)
    assert [(line.what, line.analyst, line.kind, line.amount) for line in lines] == [
        ("question", "alice", "epsilon", 500_000),
        ("allotment", "bob", "rho", 500_000),
        ("draw", "bob", "rho", 250_000),
        ("closed", "bob", "", 0),
        ("cut off", "bob", "epsilon", 250_000),
    ]
    assert lines[0].question == "count by b (2)" and lines[2].question == "sum(b)"
    assert lines[0].where == ["a = 0 AND b IS NOT NULL AND epsilon >= 1"]
    assert lines[2].where == ["a = 1 AND b < 5 AND rho >= 0.5"] and lines[3].where == ["b = 0"]
    assert lines[2].allotment == lines[1].run_id and lines[0].allotment == ""
    assert bool(lines[0].answered) and not lines[1].answered and not lines[4].answered
    assert lines[0].as_dict()["amount"] == 0.5

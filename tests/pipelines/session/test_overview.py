"""The overview: what points have spent, at most and at least, and what is closed."""

from pathlib import Path

import pytest

from dpstream.accounting.errors import UsageError
from dpstream.pipelines.session.overview import overview
from dpstream.pipelines.session.session import Session
from dpstream.pipelines.session.sliding import close_before
from tests.pipelines.session.small import config_at

QUOTA = "\n[table.small.quota]\nepsilon = 1.5\n"


def test_what_is_left(tmp_path: Path) -> None:
    with Session(config_at(tmp_path, more=QUOTA), analyst="alice") as session:
        session.where("a < 2 AND epsilon >= 1").count(0.5)
        session.where("a = 1 AND epsilon >= 1").count(0.25)
        summary = overview(session.open_table, session.table.selection)
        assert summary["entries"] == 2 and set(summary["budgets"]) == {"epsilon", "rho"}
        part = summary["budgets"]["epsilon"]
        assert (part["most_spent"], part["least_spent"], part["most_initial"]) == (0.75, 0, 2)
        assert part["rows"][0] == {"where": "a = 1 AND epsilon >= 1", "spent": 0.75}
        assert summary["quotas"] == {
            "epsilon": {"analyst": "alice", "quota": 1.5, "most_charged": 0.75}
        }
        part_summary = overview(
            session.open_table, session.where("a = 0 AND epsilon >= 1").selection
        )
        assert part_summary["budgets"]["epsilon"]["least_spent"] == 0.5
        close_before(session.open_table, "b", 3)
        part = overview(session.open_table, session.table.selection)["budgets"]["epsilon"]
        assert part["most_spent"] == 0.75 and part["closed_boxes"] == 1
        assert part["rows"][0] == {"where": "b < 3", "spent": None}
        closed = overview(session.open_table, session.where("b = 0").selection)["budgets"][
            "epsilon"
        ]
        assert closed["most_spent"] == 0 and closed["closed_boxes"] == 1
        with pytest.raises(UsageError, match="true nowhere"):
            overview(session.open_table, session.where("a < 0").selection)

"""A store that lost what a test published: the test is taken again, or the store is refused."""

import itertools
from pathlib import Path

from dpstream.accounting.errors import PolicyError
from dpstream.state.sqlite.database import sqlite3
from tests.faults.runs import calm, job, released
from tests.faults.test_reshard import go_on
from tests.faults.test_store_faults import redelivered

#: The last test that a shard has committed in the midst of the first window.
LOST = "SELECT max(trigger) FROM steps WHERE shard = ? AND window = 0 AND trigger IN (1, 2, 4)"


def test_a_lost_test_has_one_value(tmp_path: Path) -> None:
    outcomes = []
    for commits, shard in itertools.product((6, 10), (0, 1)):
        path = tmp_path / f"s{commits}{shard}.db"
        run = job("skip", path)
        go_on(run, commits, 1)
        with sqlite3.connect(path) as db:
            where = "shard = ? AND window = 0 AND trigger"
            lost = db.execute(f"DELETE FROM steps WHERE {where} = ({LOST})", (shard, shard))
            assert lost.rowcount == 1
        db.close()
        try:
            assert released(run, redelivered(run.plan, 4)) == calm("skip")
            outcomes.append("taken again")
        except PolicyError as error:
            assert "damaged" in error.rule
            outcomes.append("refused")
    assert set(outcomes) == {"taken again", "refused"}

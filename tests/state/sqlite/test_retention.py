"""The embedded store's own life: the suite that every store passes, and what its file shows."""

from tests.state.conformance import take_step
from tests.state.life_conformance import RetentionConformance, decide_units, fill_step
from tests.state.sqlite.bench import SqliteBench, SqliteRetentionBench


class TestSqliteRetention(RetentionConformance):
    """The suite of every store's own life."""


def test_compaction_leaves_one_row_of_each_log(bench: SqliteBench) -> None:
    store = bench.open()
    for trigger in (1, 2, 3):
        take_step(store, trigger, [trigger, 7], trigger)
        decide_units(store, 0, trigger, [0, 2 * trigger])
    assert bench.rows("SELECT count(*) FROM admissions") == [(3,)]
    store._db.execute("INSERT INTO carried VALUES (9, 9, 9, zeroblob(1000000))")
    store._db.execute("DELETE FROM carried")
    assert store._db.execute("PRAGMA freelist_count").fetchone()[0] > 100
    store.compact()
    assert store._db.execute("PRAGMA freelist_count").fetchone() == (0,)
    assert bench.rows("SELECT count(*) FROM admissions") == [(1,)]
    assert bench.rows("SELECT count(states), count(*) FROM steps") == [(0, 3)]
    assert bench.rows("SELECT count(*) FROM snapshots") == [(1,)]
    assert bench.path.with_name(f"{bench.path.name}-wal").stat().st_size == 0


def test_dropped_releases_leave_no_row(life: SqliteRetentionBench) -> None:
    store = life.open()
    for window in range(3):
        fill_step(store, window, 0, 1, [0])
    store.drop_releases(2)
    assert life.rows("SELECT window FROM steps") == [(2,)]

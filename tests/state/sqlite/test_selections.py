"""The embedded store's log of selections: sealed, checked."""

from pathlib import Path

import pytest

from dpstream.accounting.errors import PolicyError
from dpstream.state.sqlite.backup import backup_file, check_file
from dpstream.state.sqlite.database import sqlite3
from tests.state.conformance import IDENTITY, log_of, named, take_step
from tests.state.sqlite.bench import SqliteBench


def test_only_what_was_selected_is_noted(bench: SqliteBench) -> None:
    store = bench.open()
    take_step(store, 1, [1, 2], 1)
    take_step(store, 2, [1, 2], 2, selected=[])
    assert log_of(store) == []
    take_step(bench.open(), 3, [1, 2], 3, selected=[1])
    assert log_of(bench.open()) == log_of(store) == [(30, 0, named(1))]


def test_backups_hold_it(bench: SqliteBench, tmp_path: Path) -> None:
    take_step(bench.open(), 1, [1, 2], 1, selected=[1, 2])
    backup_file(bench.path, tmp_path / "copy.db")
    with sqlite3.connect(tmp_path / "copy.db") as db:
        assert db.execute("SELECT count(*) FROM selections").fetchone() == (1,)
    db.close()


@pytest.mark.parametrize(
    "damage",
    [
        "UPDATE selections SET trigger_time = trigger_time + 1",
        "UPDATE selections SET keys = substr(keys, 1, length(keys) - 1) || x'77'",
        "UPDATE selections SET shard = 1",
        "DROP INDEX selections_by_shard",
    ],
)
def test_damage_is_noticed(bench: SqliteBench, damage: str) -> None:
    store = bench.open()
    take_step(store, 1, [1, 2], 1, selected=[1])
    with sqlite3.connect(bench.path) as db:
        db.execute(damage)
    db.close()
    if "DROP" not in damage:
        with pytest.raises(PolicyError, match="damaged"):
            [log_of(store, shard) for shard in range(IDENTITY.shards)]
    bench.close()
    with pytest.raises(PolicyError, match="damaged"):
        check_file(bench.path)

"""Fixtures of the SQLite store's tests."""

from pathlib import Path

import pytest

from tests.state.life_conformance import OLD
from tests.state.sqlite.bench import SqliteBench, SqliteRetentionBench


@pytest.fixture
def bench(tmp_path: Path) -> SqliteBench:
    made = SqliteBench(tmp_path / "deep" / "store.db")
    yield made  # type: ignore[misc]
    made.close()


@pytest.fixture
def life(tmp_path: Path) -> SqliteRetentionBench:
    made = SqliteRetentionBench(tmp_path / "life.db", OLD)
    yield made  # type: ignore[misc]
    made.close()

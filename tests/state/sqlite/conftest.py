"""Fixtures of the SQLite store's tests."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.state.life_conformance import OLD
from tests.state.sqlite.bench import SqliteBench, SqliteRetentionBench


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[SqliteBench]:
    made = SqliteBench(tmp_path / "deep" / "store.db")
    yield made
    made.close()


@pytest.fixture
def life(tmp_path: Path) -> Iterator[SqliteRetentionBench]:
    made = SqliteRetentionBench(tmp_path / "life.db", OLD)
    yield made
    made.close()

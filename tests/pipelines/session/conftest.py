"""A session of a small table, for each test."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.pipelines.session.statements import Session
from tests.pipelines.session.tables import small_config_at


@pytest.fixture
def session(tmp_path: Path) -> Iterator[Session]:
    """Alice's, of six usable records; its files are in ``tmp_path``."""
    with Session(small_config_at(tmp_path), analyst="alice") as session:
        yield session

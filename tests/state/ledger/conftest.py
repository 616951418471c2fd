"""Fixtures of the ledger's tests."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from dpstream.state.ledger.contract import Ledger
from dpstream.state.ledger.open import open_ledger


@pytest.fixture
def ledger(tmp_path: Path) -> Iterator[Ledger]:
    """An empty ledger in a folder that is not there yet."""
    made = open_ledger(tmp_path / "data" / "ledger.db", "flights")
    yield made
    made.close()

"""Fixtures of the ledger's tests."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from dpstream.state.ledger.contract import Ledger
from dpstream.state.ledger.open import create_ledger, open_ledger
from tests import emulator


@pytest.fixture
def ledger(tmp_path: Path) -> Iterator[Ledger]:
    """An empty ledger in a folder that is not there yet."""
    made = open_ledger(tmp_path / "data" / "ledger.db", "flights")
    yield made
    made.close()


@pytest.fixture(scope="module")
def running() -> Iterator[None]:
    """Spanner's emulator, named in the environment."""
    with emulator.running():
        yield


@pytest.fixture
def url(running: None) -> Iterator[str]:
    """An empty ledger in a database of its own."""
    made = emulator.fresh_url()
    create_ledger(made)
    yield made
    emulator.drop(made)

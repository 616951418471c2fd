"""Fixtures of the ledger's tests."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from dpstream.state.ledger.contract import Ledger
from tests import accounts, emulator


@pytest.fixture
def ledger(tmp_path: Path) -> Iterator[Ledger]:
    """An account without a charge in a folder that is not there yet."""
    made = accounts.opened(tmp_path / "data" / "ledger.db", limit=(3.0, 1e-6))
    yield made
    made.close()


@pytest.fixture(scope="module")
def running() -> Iterator[None]:
    """Spanner's emulator, named in the environment."""
    with emulator.running():
        yield


@pytest.fixture
def url(running: None) -> Iterator[str]:
    """An account without a charge in a database of its own."""
    made = emulator.fresh_url()
    accounts.create(made, "flights")
    yield made
    emulator.drop(made)

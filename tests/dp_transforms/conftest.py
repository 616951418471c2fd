"""Fixtures of the flow's tests; generators are in ``tests/streams.py``."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from dpstream.dp_transforms.noise.prf import KeyRing
from dpstream.state import open as stores
from tests.streams import KEYS, fresh_names

# Compiled kernels make first calls slow; the same examples are drawn in every run.
settings.register_profile("flow", deadline=None, derandomize=True)
settings.load_profile("flow")


@pytest.fixture(autouse=True)
def closed_stores() -> Iterator[None]:
    """Every test opens its stores anew."""
    stores.close_all()
    yield
    stores.close_all()


@pytest.fixture
def store_paths(tmp_path: Path) -> Iterator[str]:
    """An endless supply of unused store paths: ``next(store_paths)``."""
    return fresh_names(tmp_path)


@pytest.fixture(scope="session")
def ring() -> KeyRing:
    """The key ring of the fixed test secret."""
    return KEYS.ring()

"""Fixtures of the Spanner store's tests."""

from collections.abc import Iterator

import pytest

from tests import emulator
from tests.state.life_conformance import OLD
from tests.state.spanner.bench import SpannerBench, SpannerRetentionBench


@pytest.fixture(scope="module")
def running() -> Iterator[None]:
    """An emulator, named in the environment."""
    with emulator.running():
        yield


@pytest.fixture
def bench(running: None) -> Iterator[SpannerBench]:
    made = SpannerBench()
    yield made
    made.close()


@pytest.fixture
def life(running: None) -> Iterator[SpannerRetentionBench]:
    made = SpannerRetentionBench(OLD)
    yield made
    made.close()

"""Fixtures of the fault tests."""

import os
import warnings
from collections.abc import Iterator

import pytest

from dpstream.state import open as stores
from tests.faults.filecalls.server import Server, library, serving


@pytest.fixture(autouse=True)
def closed_stores() -> Iterator[None]:
    """No store stays open between tests."""
    yield
    stores.close_all()


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    """Commands below the preloaded library; without a compiler a loud skip, in CI a failure."""
    try:
        library()
    except FileNotFoundError as missing:
        if os.environ.get("CI"):
            raise
        warnings.warn(pytest.PytestWarning(str(missing)), stacklevel=1)
        pytest.skip(str(missing))
    with serving() as running:
        yield running

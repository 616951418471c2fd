"""Tests of strategies use one thread of the matrix library, as the solvers do."""

from collections.abc import Iterator

import pytest

from dpstream.accounting.libraries import one_thread


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    with one_thread():
        yield

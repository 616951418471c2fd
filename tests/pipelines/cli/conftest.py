"""Commands silence the process's logs; other tests need theirs."""

import logging
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def logs_come_back() -> Iterator[None]:
    yield
    logging.disable(logging.NOTSET)

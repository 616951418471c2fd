"""Fixtures of the accounting's tests."""

import pytest

from tests.accounting.plans import Make, build
from tests.golden.refusals import refused

__all__ = ["refused"]


@pytest.fixture(scope="session")
def make_plan() -> Make:
    return build

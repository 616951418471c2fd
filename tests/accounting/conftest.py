"""Fixtures of the accounting's tests."""

import pytest

from tests.accounting.plans import Make, build


@pytest.fixture(scope="session")
def make_plan() -> Make:
    return build

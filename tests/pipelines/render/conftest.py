"""Fixtures of the tests of text."""

import pytest

from tests.accounting.plans import Make, build


@pytest.fixture(scope="session")
def make_plan() -> Make:
    return build

"""A small office for each test, copied from one that is made once."""

import shutil
from pathlib import Path

import pytest

from tests.pipelines.tabulation.office import Office, office


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory) -> Office:
    """An office that nobody changes."""
    return office(tmp_path_factory.mktemp("office"))


@pytest.fixture
def spoilt(made: Office, tmp_path: Path) -> Office:
    """An office that a test may spoil."""
    own = Office(tmp_path / "parameters", tmp_path / "data")
    shutil.copytree(made.parameters, own.parameters)
    shutil.copytree(made.data, own.data)
    return own

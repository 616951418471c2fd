"""A small office for each test, copied from one that is made once."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from dpstream.pipelines.tabulation.config import Choice
from tests.pipelines.tabulation.errors.report import report
from tests.pipelines.tabulation.office import Office, executed, office


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


@pytest.fixture(scope="session")
def lively(tmp_path_factory: pytest.TempPathFactory) -> Office:
    """An office that nobody changes, whose thresholds give groups every detail."""
    own = office(tmp_path_factory.mktemp("lively"))
    config = json.loads(own.path("config.json").read_text())
    own.configure(thresholds_p={label: [4, 20, 60] for label in config["thresholds_p"]})
    return own


@pytest.fixture(scope="session")
def runs(lively: Office, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Its outputs in two executions of persons, which nobody changes."""
    folder = tmp_path_factory.mktemp("runs")
    for name in ("one", "two"):
        executed(lively, folder / name)
    return folder / "one", folder / "two"


@pytest.fixture(scope="session")
def reported(
    lively: Office, runs: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory
) -> tuple[dict[str, Any], Path]:
    """Figures and folder of a report on both, which nobody changes."""
    out = tmp_path_factory.mktemp("reports") / "out"
    return report(lively.parameters, lively.data, Choice("p"), runs, out), out

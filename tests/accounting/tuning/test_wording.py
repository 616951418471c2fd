"""Settings in the words of a project file."""

import tomllib

import pytest

from dpstream.accounting.tuning.changes import (
    duration_text,
    per_key_text,
    settings_text,
    toml,
    written,
)
from dpstream.accounting.weights import MILD
from dpstream.pipelines.project.text import duration_micros


@pytest.mark.parametrize("micros", [1, 1_500_000, 90_000_000, 3_600_000_000, 604_800_000_000])
def test_lengths_of_time_read_back(micros: int) -> None:
    assert duration_micros("window", duration_text(micros)) == micros


@pytest.mark.parametrize("value", [True, False, 7, 0.85, 1e-9, "7d"])
def test_values_read_back(value: object) -> None:
    assert tomllib.loads(f"a = {toml(value)}")["a"] == value
    assert tomllib.loads(f"a = {toml(MILD)}")["a"] == {"offset": 3, "power": 0.35}


def test_settings_in_words() -> None:
    settings = {"mechanism.selection_share": 0.9, "release_every": "7d", "aggregate.m": None}
    words = "mechanism.selection_share = 0.9, release_every = \"7d\", without column 'm'"
    assert settings_text(settings) == words
    uniform = written({"mechanism.weights": None, "mechanism.select_every": None})
    assert settings_text(uniform) == 'mechanism.weights = "uniform", no mechanism.select_every'
    assert settings_text({}) == ""


def test_bounds_per_key_in_words() -> None:
    assert [per_key_text(k) for k in (None, 1, 4)] == [
        "every record counts", "one record of a unit counts per key",
        "4 records of a unit count per key",
    ]  # fmt: skip

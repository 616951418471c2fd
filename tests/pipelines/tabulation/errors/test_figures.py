"""Figures of an output read again, against a plain reading; changed outputs; sums of errors."""

import csv
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from dpstream.accounting.errors import UsageError
from dpstream.accounting.tabulation.parameters import PERSONS
from dpstream.pipelines.tabulation.config import Choice
from dpstream.pipelines.tabulation.inputs import Prepared, inputs_of, prepared
from tests.pipelines.tabulation.errors.figures import Errors, interval, released_figures, size_of
from tests.pipelines.tabulation.office import Office

Group = tuple[str, ...]


def prepared_for(lively: Office) -> Prepared:
    return prepared(inputs_of(lively.parameters, lively.data, Choice("p")))


def plainly(folder: Path, width: int) -> dict[Group, dict[Group, int]]:
    """Counts by group and label, of all files."""
    out: dict[Group, dict[Group, int]] = {}
    for path in folder.glob("*.csv"):
        with open(path, newline="") as file:
            for row in list(csv.reader(file, delimiter="|"))[1:]:
                out.setdefault(tuple(row[:3]), {})[tuple(row[3 : 3 + width])] = int(row[-1])
    return out


def test_every_figure_is_read(lively: Office, runs: tuple[Path, Path]) -> None:
    prepared_run = prepared_for(lively)
    totals, ages = plainly(runs[0] / "t1", 0), plainly(runs[0] / "t2", 3)
    details = set()
    for level in prepared_run.domain.levels:
        for figures in released_figures(runs[0], PERSONS, level):
            details.add((figures.output.folder, figures.detail))
            mine = totals if figures.output.folder == "t1" else ages
            for group, values in zip(figures.groups.tolist(), figures.values, strict=True):
                region, iteration = divmod(group, len(level.iterations))
                name = (level.regions[region].as_py(), level.level.region_type,
                        level.iterations[iteration].as_py())  # fmt: skip
                rows = {row.labels: int(v) for row, v in zip(figures.rows, values, strict=True)}
                assert mine.pop(name) == rows
    assert not totals and not ages
    assert details == {*(("t1", d) for d in range(4)), *(("t2", d) for d in (1, 2, 3))}


def swap(lines: list[str]) -> list[str]:
    return [lines[0], lines[2], lines[1], *lines[3:]]


@pytest.mark.parametrize(
    ("folder", "change"),
    [
        ("t2", lambda lines: lines[:-1]),
        ("t2", swap),
        ("t2", lambda lines: [lines[0].replace("SEX", "GENDER"), *lines[1:]]),
        ("t1", lambda lines: [lines[0], lines[1].replace("1|", "9|", 1), *lines[2:]]),
        ("t1", lambda lines: [*lines, "1|USA|0004"]),
    ],
    ids=["row missing", "rows swapped", "header", "region", "cut off"],
)  # fmt: skip
def test_an_output_that_was_changed_is_refused(
    lively: Office, runs: tuple[Path, Path], tmp_path: Path, folder: str,
    change: Callable[[list[str]], list[str]],
) -> None:  # fmt: skip
    copy = tmp_path / "copy"
    shutil.copytree(runs[0], copy)
    path = copy / folder / "usa-1-000.csv"
    path.write_text("\n".join(change(path.read_text().splitlines())) + "\n")
    level = prepared_for(lively).domain.levels[0]
    with pytest.raises(UsageError, match=folder):
        released_figures(copy, PERSONS, level)


def test_a_file_that_is_gone_is_missed(
    lively: Office, runs: tuple[Path, Path], tmp_path: Path
) -> None:
    shutil.copytree(runs[0], tmp_path / "copy")
    (tmp_path / "copy" / "t1" / "usa-1-000.csv").unlink()
    with pytest.raises(UsageError, match="t1"):
        released_figures(tmp_path / "copy", PERSONS, prepared_for(lively).domain.levels[0])


def test_errors_of_many_parts_are_those_of_all() -> None:
    rng = np.random.default_rng(0)
    parts = [rng.integers(-spread, spread + 1, (n, 3)) for spread, n in ((5, 7), (90, 40), (0, 1))]
    errors = Errors()
    for part in parts:
        errors.add(part, len(part))
    every = np.concatenate([part.reshape(-1) for part in parts])
    assert (errors.figures, errors.groups) == (len(every), 48)
    assert errors.bias == pytest.approx(every.mean())
    assert errors.rmse == pytest.approx(np.sqrt((every**2).mean()))
    for chance in (0.0, 0.3, 0.95, 1.0):
        assert errors.quantile(chance) == pytest.approx(np.quantile(np.abs(every), chance))
    for margin in (0, 5, 1000):
        assert errors.within(margin) == pytest.approx((np.abs(every) <= margin).mean())


def test_sizes() -> None:
    sizes = size_of(np.array([0, 1, 2, 10, 11, 100, 101, 331_000_000]))
    assert sizes.tolist() == [0, 0, 1, 1, 2, 2, 3, 9]
    assert [interval(power) for power in (0, 1, 3)] == [
        "[0.0, 1.0]", "(1.0, 10.0]", "(100.0, 1000.0]",
    ]  # fmt: skip

"""``error_report.csv`` and ``multi_run_error_report.csv``, with production's columns.

A row of the first is a group of one run; errors are sums over the cells that were measured in it,
not over figures that are sums of them.  A row of the second is all groups of a kind of region, a
level of iterations and a size, over all runs; MOE is the 95% quantile of a measured cell's absolute
error.  Where production's programs count figures in the place of groups (``Number of pop groups``)
or sum up totals with their parts (the size of households), this counts groups and takes totals.
"""

import contextlib
import csv
import io
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import csv as pa_csv

from dpstream.accounting.arrays import Int64
from dpstream.accounting.tabulation.parameters import PERSONS, T3, Table
from dpstream.dp_transforms.tabulation.domain import LevelDomain
from dpstream.pipelines.tabulation.error_report.errors import Part
from dpstream.pipelines.tabulation.inputs import Prepared
from dpstream.state.durable import PRIVATE, replacing

#: What production calls the details of persons.
WORKLOADS = ("Total", "Sex x Age(4)", "Sex x Age(9)", "Sex x Age(23)")
_GROUP = ("REGION_ID", "REGION_TYPE", "ITERATION_CODE", "DETAILED_ONLY", "COARSE_ONLY")
_SIZE = "Population group size"
_ERRORS = ("Total absolute error", "Total squared error")


class RunFile:
    """Rows of one run's groups, level by level."""

    def __init__(self, file: IO[bytes], setup: Prepared, coarse_only: pa.StringArray) -> None:
        self._file, self._program = file, setup.plan.parameters.program
        self._coarse = coarse_only
        self._households = dict[str, dict[str, Int64]]()
        names = [*_GROUP, _SIZE]
        if self._program == "p":
            names += ["Workload selected", *_ERRORS]
        else:
            names += [f"{name} in {table}" for table in ("T3", "T4") for name in _ERRORS]
        file.write((",".join(names) + "\n").encode())

    def add(self, table: Table, level: LevelDomain, parts: list[Part]) -> None:
        """Add the groups of a table and level; those of households come when both tables have."""
        group_sums = _groups(parts)
        if table is PERSONS:
            names = pa.array(WORKLOADS).take(pa.array(group_sums["detail"]))
            self._write(
                level,
                group_sums,
                [group_sums["size"], names, group_sums["absolute"], group_sums["squared"]],
            )
            return
        first = self._households.pop(level.level.label, None)
        if first is None:
            self._households[level.level.label] = group_sums
            return
        t3, t4 = (group_sums, first) if table is T3 else (first, group_sums)
        _, left, right = np.intersect1d(t3["groups"], t4["groups"], return_indices=True)
        t3, t4 = ({k: v[at] for k, v in t.items()} for t, at in ((t3, left), (t4, right)))
        columns = [t["absolute" if n == 0 else "squared"] for t in (t3, t4) for n in (0, 1)]
        self._write(level, t3, [t3["size"], *columns])

    def _write(
        self, level: LevelDomain, group_sums: dict[str, Int64], columns: Sequence[Any]
    ) -> None:
        region, iteration = np.divmod(group_sums["groups"], len(level.iterations))
        codes = level.iterations.take(pa.array(iteration))
        coarse = pc.is_in(codes, self._coarse)
        truths = pa.array(["False", "True"])
        arrays = [
            level.regions.take(pa.array(region)),
            pa.array([level.level.region_type]).take(pa.array(np.zeros(len(region), np.int32))),
            codes,
            truths.take(pa.array(level.total_only[iteration].astype(np.int32))),
            truths.take(coarse.cast(pa.int32())),
            *(column if isinstance(column, pa.Array) else pa.array(column) for column in columns),
        ]
        rows = pa.table(arrays, names=[str(i) for i in range(len(arrays))])
        options = pa_csv.WriteOptions(include_header=False, quoting_style="none")
        pa_csv.write_csv(rows, self._file, options)


@contextlib.contextmanager
def run_file(folder: Path, setup: Prepared, coarse_only: pa.StringArray) -> Iterator[RunFile]:
    """The file of one run; it appears whole."""
    with replacing(folder / "error_report.csv", PRIVATE) as draft, open(draft, "wb") as file:
        yield RunFile(file, setup, coarse_only)


def _groups(parts: list[Part]) -> dict[str, Int64]:
    """Groups with measured cells, increasing: size, detail, and sums of errors of the cells."""
    measured_parts = [part for part in parts if part.measured]
    columns: dict[str, list[Int64]] = {
        name: [np.zeros(0, np.int64)]
        for name in ("groups", "size", "detail", "absolute", "squared")
    }
    for part in measured_parts:
        errors = np.abs(part.errors[:, part.measured])
        detail = np.full(len(errors), part.figures.detail, np.int64)
        for name, values in (
            ("groups", part.figures.groups),
            ("size", part.totals),
            ("detail", detail),
            ("absolute", errors.sum(axis=1)),
            ("squared", (errors**2).sum(axis=1)),
        ):
            columns[name].append(values)
    joined = {name: np.concatenate(values) for name, values in columns.items()}
    order = np.argsort(joined["groups"])
    return {name: values[order] for name, values in joined.items()}


def write_runs(out: Path, program: str, cells: Sequence[dict[str, Any]], runs: int) -> None:
    """Write the report over all runs.

    Args:
        cells: of `report.report`: groups that are alike, with the errors of their cells.
    """
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerows(_persons(cells) if program == "p" else _households(cells, runs))
    with replacing(out / "multi_run_error_report.csv", PRIVATE) as draft:
        draft.write_text(text.getvalue(), encoding="utf-8")


def _persons(cells: Sequence[dict[str, Any]]) -> Iterator[list[str]]:
    chosen = "Average proportion of pop groups with workload = {}"
    yield [
        "REGION_TYPE",
        "ITERATION_LEVEL",
        "DETAILED_ONLY",
        _SIZE,
        *(head.format(name) for name in WORKLOADS for head in (chosen, "MOE of {}")),
    ]
    rows: dict[tuple[str, int, bool, int], dict[int, dict[str, Any]]] = {}
    for cell in cells:
        key = (cell["region_type"], cell["iteration_level"], cell["detailed_only"], cell["power"])
        rows.setdefault(key, {})[cell["detail"]] = cell
    for (region, level, only, _), details in sorted(rows.items()):
        total = sum(cell["groups"] for cell in details.values())
        row = [region, str(level), str(only), next(iter(details.values()))["size"]]
        for detail in range(len(WORKLOADS)):
            entry = details.get(detail)
            row.append(_number(entry["groups"] / total if entry else 0.0))
            row.append(_number(entry["measured"]) if entry else "nan")
        yield row


def _households(cells: Sequence[dict[str, Any]], runs: int) -> Iterator[list[str]]:
    yield [
        "Table",
        "REGION_TYPE",
        "ITERATION_LEVEL",
        _SIZE,
        "STAT_LEVEL",
        "Number of pop groups",
        "Expected MOE",
        "MOE",
    ]
    for cell in sorted(cells, key=_place):
        yield [
            cell["table"],
            cell["region_type"],
            str(cell["iteration_level"]),
            cell["size"],
            str(cell["detail"]),
            f"{cell['groups'] / runs:g}",
            str(cell["target"]),
            _number(cell["measured"]),
        ]


def _place(cell: dict[str, Any]) -> tuple[Any, ...]:
    names = ("table", "region_type", "iteration_level", "detail", "power")
    return tuple(cell[name] for name in names)


def _number(figure: float) -> str:
    return f"{figure:.2E}" if 0 < figure < 0.01 else f"{figure:.2f}"

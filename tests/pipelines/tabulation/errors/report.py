"""Reports that compare published tables with the truth: NOT private, for public data only.

They read the records themselves, without noise, so that everything here says something about
single persons.  They are for invented data and for data that are public anyway: to see whether
margins hold, which detail groups of a size get, and what choosing it costs.

``error_report.csv`` and ``multi_run_error_report.csv`` have production's columns.  A row of the
first is a group of one run; errors are sums over the cells that were measured in it, not over
figures that are sums of them.  A row of the second is all groups of a kind of region, a level of
iterations and a size, over all runs; MOE is the 95% quantile of a measured cell's absolute error.
Where production's programs count figures in the place of groups (``Number of pop groups``) or sum
up totals with their parts (the size of households), this counts groups and takes totals.
"""

import contextlib
import csv
import io
import math
import operator
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import csv as pa_csv

from dpstream.accounting.arrays import Int64
from dpstream.accounting.errors import UsageError, required
from dpstream.accounting.tabulation import margins
from dpstream.accounting.tabulation.parameters import PERSONS, T3, Level, Table, draws
from dpstream.accounting.tabulation.plan import describe
from dpstream.accounting.tabulation.plan import figures as figures_of
from dpstream.dp_transforms.tabulation.domain import LevelDomain, Shard
from dpstream.dp_transforms.tabulation.expand import aggregated
from dpstream.pipelines.ask.draft import MANIFEST, Manifest, decoded
from dpstream.pipelines.ask.folder import Output
from dpstream.pipelines.tabulation.config import Choice
from dpstream.pipelines.tabulation.inputs import (
    Inputs,
    Prepared,
    inputs_of,
    lists_digest,
    load,
    prepared_of,
    public_paths,
)
from dpstream.pipelines.tabulation.private import pieces, read_piece
from dpstream.pipelines.tabulation.work import Tally, counted
from dpstream.state.disk_errors import file_errors
from dpstream.state.durable import PRIVATE, make_folder, replacing
from tests.pipelines.tabulation.errors.figures import (
    Cell,
    Errors,
    Kind,
    Part,
    cells_of,
    interval,
    kinds_of,
    part_of,
    released_figures,
)

#: What production calls the details of persons.
WORKLOADS = ("Total", "Sex x Age(4)", "Sex x Age(9)", "Sex x Age(23)")
_GROUP = ("REGION_ID", "REGION_TYPE", "ITERATION_CODE", "DETAILED_ONLY", "COARSE_ONLY")
_SIZE = "Population group size"
_ERRORS = ("Total absolute error", "Total squared error")
_BY_TABLE = operator.itemgetter("table", "region_type", "iteration_level", "detail", "power")


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
    """Write the file of one run, which appears complete or not at all."""
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
        cells: of `report`: groups that are alike, with the errors of their cells.
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
    for cell in sorted(cells, key=_BY_TABLE):
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


def _number(figure: float) -> str:
    return f"{figure:.2E}" if 0 < figure < 0.01 else f"{figure:.2f}"


STAMP = "PUBLIC DATA ONLY: computed from the records without noise, NOT private, do not publish"
NOTICE = "NOT-PRIVATE.txt"


class RunErrors(NamedTuple):
    """The errors of all runs together.

    Attributes:
        kinds: errors of each kind of figure; cells: of measured cells of groups that are alike;
            totals: of their published totals (persons).
    """

    kinds: dict[Kind, Errors]
    cells: dict[Cell, Errors]
    totals: dict[Cell, Errors]


def report(
    parameters: Path, data: Path, choice: Choice, runs: Sequence[Path], out: Path
) -> dict[str, Any]:
    """Write the reports on the outputs of some runs; replaces an older report, nothing else.

    Args:
        parameters, data: folders of the files that the runs were of.
        choice: what they were asked for.
        runs: folders of outputs of one plan.
        out: folder of the reports: ``error_report.csv`` (in ``run-N/`` if there are several runs),
            ``multi_run_error_report.csv``.

    Returns:
        The figures, JSON-able.

    Raises:
        UsageError: a run is of another plan, or a file is not usable.
        RunError: a file cannot be read or written.
    """
    inputs = inputs_of(parameters, data, choice)
    loaded = load(parameters, data, choice)
    lists = lists_digest(public_paths(parameters, data, choice.program))
    setup, iterations = prepared_of(loaded, lists), loaded.files.iterations
    coarse = iterations["CODE"].filter(iterations["COARSE_ONLY"]).combine_chunks()
    manifests = [_manifest(run, setup) for run in runs]
    if not runs:
        raise UsageError("--run", "is missing", "name the folder of an output")
    error_totals = RunErrors({}, {}, {})
    with file_errors("OUT", "cannot be written, or a file not read"):
        make_folder(out, PRIVATE)
        tally = exact_tally(setup, inputs)
        with contextlib.ExitStack() as files:
            for number, run in enumerate(runs, 1):
                folder = out / f"run-{number}" if len(runs) > 1 else out
                make_folder(folder, PRIVATE)
                file = files.enter_context(run_file(folder, setup, coarse))
                for table, level, parts in _held(setup, tally, run):
                    file.add(table, level, parts)
                    _gather(error_totals, table, level, parts)
        figures = _figures(setup, manifests, error_totals)
        write_runs(out, choice.program, figures["cells"], len(runs))
        (out / NOTICE).write_text(STAMP + "\n", encoding="utf-8")
    return figures


def _manifest(run: Path, setup: Prepared) -> Manifest:
    there = Output(run, MANIFEST, "--run").existing_manifest()
    if there is None:
        fix = "name the --out of a `dpstream census execute`"
        raise UsageError("--run", f"{run.name!r} is no output folder", fix)
    manifest = decoded(there)
    if manifest.plan_hash != setup.plan.hash:
        raise UsageError(
            "--run",
            "is an output of another plan",
            "name the census run that it was made of",
        )
    return manifest


def exact_tally(setup: Prepared, inputs: Inputs) -> Tally:
    """Return the exact counts of all records. NOT private."""
    batches = (
        part.records for piece in pieces(inputs.records) for part in read_piece(piece, setup.lookup)
    )
    return counted(setup, batches)


def _held(
    setup: Prepared, tally: Tally, run: Path
) -> Iterator[tuple[Table, LevelDomain, list[Part]]]:
    """Each table and level with what was published of it and the truth."""
    on = {(table.name, level) for table, level, _ in setup.plan.measured()}
    for number, table in enumerate(setup.plan.parameters.tables):
        for place, level in enumerate(setup.domain.levels):
            if (table.name, level.level) in on:
                shard = Shard(0, place, 0, 0, level.groups)
                counts = aggregated(shard, table, tally.of(number, place))
                parts = [
                    part_of(figures, table, level, counts)
                    for figures in released_figures(run, table, level)
                ]
                yield table, level, parts


def _gather(error_totals: RunErrors, table: Table, level: LevelDomain, parts: list[Part]) -> None:
    for part in parts:
        for kind, errors, groups in kinds_of(part, table, level):
            error_totals.kinds.setdefault(kind, Errors()).add(errors, groups)
        for cell, errors, groups in cells_of(part, table, level, part.measured):
            error_totals.cells.setdefault(cell, Errors()).add(errors, groups)
        if part.figures.output.folder == "t1":
            for cell, errors, groups in cells_of(part, table, level, [0]):
                error_totals.totals.setdefault(cell, Errors()).add(errors, groups)


def _figures(setup: Prepared, manifests: list[Manifest], error_totals: RunErrors) -> dict[str, Any]:
    """What the page shows."""
    plan, expected = describe(setup.plan), _expected(setup)
    rows = []
    for kind, errors in error_totals.kinds.items():
        target, rmse, cells = expected[kind]
        rows.append(
            {
                **kind._asdict(),
                "cells": cells,
                "target": target,
                "measured": errors.quantile(),
                "within": errors.within(target),
                "figures": errors.figures,
                "groups": errors.groups,
                "rmse": errors.rmse,
                "census_rmse": rmse,
                "bias": errors.bias,
            }
        )
    return {
        "stamp": STAMP,
        "program": plan["program"],
        "plan": plan,
        "runs": [{"run_id": m.run_id, "insecure": m.insecure} for m in manifests],
        "margins": rows,
        "cells": [
            _cell(setup, *pair)
            for pair in sorted(error_totals.cells.items(), key=operator.itemgetter(0))
        ],
        "totals": [
            _cell(setup, *pair)
            for pair in sorted(error_totals.totals.items(), key=operator.itemgetter(0))
        ],
    }


def _expected(setup: Prepared) -> dict[Kind, tuple[int, float, int]]:
    """Of each kind of figure: margin, RMSE of the sum of its measured cells, number of cells."""
    out = {}
    for table, level, noise in setup.plan.measured():
        for row in figures_of(setup.plan, table, noise):
            own = noise.total if row["detail"] is None else noise.detail
            rmse = math.sqrt(row["cells"] * margins.chances(required(own, "own is there")).variance)
            kind = Kind(level.label, row["table"], row["figure"], row["detail"])
            out[kind] = row["margin"], rmse, row["cells"]
    return out


def _cell(setup: Prepared, cell: Cell, errors: Errors) -> dict[str, Any]:
    """Figures of groups that are alike; ``target`` is the margin of a single measured cell."""
    level = Level(cell.iteration_level, cell.region_type)
    table = next(t for t in setup.plan.parameters.tables if t.name == cell.table)
    groups = setup.plan.stability[level].groups
    noise = required(draws(setup.plan.parameters, table, level, groups), "a level that is on")
    detail = required(noise.detail, "a cell was measured")
    own = noise.total if cell.detailed_only and noise.total is not None else detail
    return {
        **cell._asdict(),
        "size": interval(cell.size),
        "power": cell.size,
        "groups": errors.groups,
        "target": margins.margin(own),
        "measured": errors.quantile(),
        "rmse": errors.rmse,
        "bias": errors.bias,
    }

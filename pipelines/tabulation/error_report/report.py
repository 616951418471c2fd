"""Reports on published tables held against the truth: NOT private, for public data only.

They read the records themselves, without noise, so that everything here says something about
single persons.  They are for invented data and for data that are public anyway: to see whether
margins hold, which detail groups of a size get, and what choosing it costs.
"""

import contextlib
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from dpstream.accounting.errors import InvariantError, PolicyError, UsageError, required
from dpstream.accounting.tabulation import margins
from dpstream.accounting.tabulation.describe import describe
from dpstream.accounting.tabulation.describe import figures as figures_of
from dpstream.accounting.tabulation.parameters import Level, Table
from dpstream.accounting.tabulation.scales import draws
from dpstream.dp_transforms.tabulation.aggregate import aggregated
from dpstream.dp_transforms.tabulation.domain import LevelDomain, Shard
from dpstream.pipelines.ask.draft import Manifest, existing_manifest
from dpstream.pipelines.report.report import MARK
from dpstream.pipelines.tabulation.config import Choice
from dpstream.pipelines.tabulation.error_report.errors import (
    Cell,
    Errors,
    Kind,
    Part,
    cells_of,
    interval,
    kinds_of,
    part_of,
)
from dpstream.pipelines.tabulation.error_report.files import run_file, write_runs
from dpstream.pipelines.tabulation.error_report.page import render
from dpstream.pipelines.tabulation.error_report.releases import released_figures
from dpstream.pipelines.tabulation.files import load
from dpstream.pipelines.tabulation.inputs import Inputs, Prepared, inputs_of, prepared_of
from dpstream.pipelines.tabulation.pieces import pieces
from dpstream.pipelines.tabulation.private import read_piece
from dpstream.pipelines.tabulation.work import Tally, counted
from dpstream.state.disk_errors import file_errors
from dpstream.state.durable import PRIVATE, make_folder, replacing

STAMP = "PUBLIC DATA ONLY: computed from the records without noise, NOT private, do not publish"
PAGE, NOTICE = "report.html", "NOT-PRIVATE.txt"
#: Owners alone may read what is not private.


class RunErrors(NamedTuple):
    """What all runs together show.

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
            ``multi_run_error_report.csv``, ``report.html``.

    Returns:
        The figures of the page, JSON-able.

    Raises:
        UsageError: a run is of another plan, or a file is not usable.
        PolicyError: the reports would lie among what is published.
        RunError: a file cannot be read or written.
    """
    inputs = inputs_of(parameters, data, choice)
    loaded = load(parameters, data, choice)
    setup, iterations = prepared_of(loaded, inputs.digest), loaded.files.iterations
    coarse = iterations["CODE"].filter(iterations["COARSE_ONLY"]).combine_chunks()
    manifests = [_manifest(run, setup) for run in runs]
    if not runs:
        raise UsageError("--run", "is missing", "name the folder of an output")
    _check_place(out, [*runs, parameters, data])
    error_totals = RunErrors({}, {}, {})
    with file_errors("OUT", "cannot be written, or a file not read"):
        make_folder(out, PRIVATE)
        tally = truth(setup, inputs)
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
        for name, text in ((PAGE, render(figures)), (NOTICE, STAMP + "\n")):
            with replacing(out / name, PRIVATE) as draft:
                draft.write_text(text, encoding="utf-8")
    return figures


def _manifest(run: Path, setup: Prepared) -> Manifest:
    manifest = existing_manifest(run)
    if manifest is None:
        raise UsageError("--run", "is no output", "name the folder of an output")
    if manifest.plan_hash != setup.plan.hash:
        raise UsageError(
            "--run",
            "is an output of another plan",
            "name the census run that it was made of",
        )
    return manifest


def _check_place(out: Path, others: Sequence[Path]) -> None:
    """Refuse a place where something else lies, or among what is published or read.

    Raises:
        UsageError: it holds something else.
        PolicyError: it lies in one of the others' folders.
    """
    inside = {out.resolve(), *out.resolve().parents}
    if any(other.resolve() in inside for other in others):
        raise PolicyError("OUT", "lies among other files", "keep what is not private elsewhere")
    if out.is_dir() and any(out.iterdir()):
        with contextlib.suppress(OSError), open(out / PAGE, "rb") as file:
            if file.read(len(MARK)) == MARK.encode():
                return
        raise UsageError("OUT", "exists and holds no report", "name a new folder")


def truth(setup: Prepared, inputs: Inputs) -> Tally:
    """Exact counts of all records.  NOT private."""
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
        "cells": [_cell(setup, *pair) for pair in sorted(error_totals.cells.items(), key=_first)],
        "totals": [_cell(setup, *pair) for pair in sorted(error_totals.totals.items(), key=_first)],
    }


def _first(pair: tuple[Cell, Errors]) -> Cell:
    return pair[0]


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
    noise = draws(setup.plan.parameters, table, level, setup.plan.stability[level].groups)
    if noise is None or noise.detail is None:
        raise InvariantError("noise is not None and noise.detail is not None")
    own = noise.total if cell.detailed_only and noise.total is not None else noise.detail
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

"""The output of an answer: a folder of answers and of the estimate that gives more answers.

    OUT/answers.parquet or .csv   the answers, with standard errors and 95% intervals; absent if
                                  one table cannot hold them
    OUT/estimate.npz              estimates of the cells, and the mix of their noise
    OUT/release.json              the receipt: domain and mechanism, and the digests of both files

All of it is public.  It is written to a temporary folder and renamed as a whole.  The receipt names
the domain: a workload over another one is refused, even if it has as many cells.
"""

import contextlib
import io
import math
import os
import sys
import zipfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq

from dpstream.accounting.arrays import Int32, Int64
from dpstream.accounting.errors import PolicyError, UsageError
from dpstream.accounting.query.plan import Family
from dpstream.accounting.strategies.cells.bases import Fitted
from dpstream.accounting.strategies.cells.stored import bases_arrays, bases_of
from dpstream.accounting.workloads.attributes import Attribute, Factor
from dpstream.accounting.workloads.workload import Workload
from dpstream.pipelines.ask.folder import Output, Written, is_written, written
from dpstream.pipelines.formats.receipt import Header, encoded, header_of
from dpstream.pipelines.jobs.keys import domain_digest
from dpstream.pipelines.workload.estimate import Answers, Estimate, TableEstimate
from dpstream.pipelines.workload.planning import MAX_ANSWERS
from dpstream.state.disk_errors import ABSENT, file_error, file_errors
from dpstream.state.durable import make_folder, replacing
from dpstream.state.locks import private_folder

# Released estimates as plain arrays.


def to_arrays(estimate: Estimate | TableEstimate) -> dict[str, Any]:
    """Return the estimate as arrays by name, for ``np.savez``."""
    if isinstance(estimate, Estimate):
        return {
            "cells": estimate.cells,
            "scale": estimate.scale,
            "half_width": np.array(estimate.half_width),
            "summed": np.array(estimate.summed, np.int64),
            **{f"mix{number}": factor for number, factor in enumerate(estimate.mix)},
        }
    return {
        "counts": np.array([len(key) for key in estimate.keys], np.int64),
        "keys": np.array([axis for key in estimate.keys for axis in key], np.int64),
        "sds": estimate.sds,
        "found": np.concatenate([array.ravel() for array in estimate.measured]),
        **bases_arrays(estimate.bases),
    }


def of_arrays(held: Mapping[str, Any]) -> Estimate | TableEstimate:
    """Return the estimate of its arrays.

    Raises:
        KeyError, ValueError: they are of another form.
    """
    if "bases" not in held:
        mix = tuple(held[f"mix{number}"] for number in range(len(held) - 4))
        summed = tuple(held["summed"].tolist())
        return Estimate(held["cells"], held["scale"], mix, float(held["half_width"]), summed)
    bases = bases_of(held)
    sizes = [basis.size for basis in bases]
    ends = np.cumsum(held["counts"])
    keys = tuple(tuple(key.tolist()) for key in np.split(held["keys"], ends[:-1]))
    shapes = [[sizes[axis] - 1 for axis in key] for key in keys]
    cuts = np.cumsum([int(np.prod(shape)) for shape in shapes])
    parts = np.split(held["found"], cuts[:-1])
    arrays = tuple(part.reshape(shape) for part, shape in zip(parts, shapes, strict=True))
    return TableEstimate(bases, keys, held["sds"], arrays)


RECEIPT, ESTIMATE = "release.json", "estimate.npz"
_FIELD = "--from"


class Moment(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The release that an estimate belongs to: its window (micros since the epoch) and trigger
    time.
    """

    window_start: int
    window_end: int
    trigger: int
    trigger_time: int


class Receipt(Header, frozen=True, kw_only=True):
    """The description of a release; public.

    Attributes:
        domain: attributes as workload files write them.
        domain_digest: digest of names, values and edges.
        workload: digest of the workload that was answered.
        strategy: what was measured.
        mixing: digest of the mix of noise; null if there is none.
        mechanism: family of the noise.
        epsilon, delta, mu: what it cost.
        contributions: the most records of a unit that count.
        aggregate: name and kind of what is counted or summed.
        insecure: whether a fixed test secret was used.
        moments: one for each estimate, in order.
        files: digests by name.
    """

    domain: list[dict[str, Any]]
    domain_digest: str
    workload: str
    strategy: str
    mixing: str | None
    mechanism: Family
    epsilon: float
    delta: float
    mu: float | None
    contributions: int
    aggregate: tuple[str, str]
    insecure: bool
    moments: list[Moment]
    files: dict[str, Written]


class Released(NamedTuple):
    """A receipt and its estimate."""

    receipt: Receipt
    estimate: Estimate | TableEstimate


def check_place(out: Path, plan_hash: str, workload: Workload, fresh: bool = False) -> None:
    """Refuse an output folder that holds something else than an answer of the same plan.

    Args:
        fresh: whether it is a new answer, which needs an unused folder.

    Raises:
        UsageError: something else is at the path.
    """
    if not out.exists():
        return
    if fresh:
        raise UsageError(
            "--out", "exists, and --fresh keeps the answers that are there", "name a new folder"
        )
    with file_errors("--out", "cannot be read"), contextlib.suppress(*ABSENT, PolicyError):
        there = _receipt(out)
        if (there.plan_hash, there.workload) == (plan_hash, workload.digest):
            return
    raise UsageError("--out", "exists, and is not of this answer", "name a new folder")


def write_release(
    out: Path,
    receipt: Receipt,
    estimate: Estimate | TableEstimate,
    answers: pa.Table | None,
    form: str | None,
    nonnegative: bool = False,
) -> Receipt:
    """Publish a release in its folder, which may already hold the same release.

    A file of the same release that was damaged since is written again.

    Args:
        form: format of the table of answers; ``None``: that of the folder, else parquet.
        nonnegative: whether the answers are those of `answers` with ``consistent``.

    Returns:
        The receipt with all files of the folder.

    Raises:
        UsageError: something else is at the path.
        RunError: a file cannot be written.
    """
    stored = stored_form(out, receipt.run_id)
    if form is not None and stored not in (None, form):
        raise UsageError(
            "--format",
            f"is {form}, and {out.name} has these answers as {stored}",
            f"type --format {stored}, or name a new folder with --out: the same answer at no "
            "charge",
        )
    form = form or stored or "parquet"
    with file_errors("--out", "cannot be written"):
        make_folder(out.parent)
        with private_folder(out.parent, "--out") as draft:
            write_estimate(draft, estimate)
            if answers is not None:
                write_table(draft / f"answers.{form}", answers)
            files = {path.name: written(path) for path in sorted(draft.iterdir())}
            receipt = msgspec.structs.replace(receipt, files=files)
            _check_same(out, receipt, nonnegative)

            def fill(folder: Path, names: Iterable[str]) -> None:
                for name in names:
                    os.rename(draft / name, folder / name)

            for name in Output(out, RECEIPT, "--out").publish(encoded(receipt), files, fill):
                print(f"{name} was damaged or missing; it is written again.", file=sys.stderr)
    return receipt


def stored_form(out: Path, run_id: str) -> str | None:
    """Return the format in which a folder has the answers of a run; ``None``: it has none."""
    with contextlib.suppress(OSError, PolicyError):
        receipt = _receipt(out)
        forms = [name.removeprefix("answers.") for name in receipt.files if name != ESTIMATE]
        return forms[0] if receipt.run_id == run_id and forms else None
    return None


def _check_same(out: Path, receipt: Receipt, nonnegative: bool) -> None:
    """Refuse a folder with other answers of the same run, and say what differs.

    Raises:
        UsageError: see above.
    """
    with contextlib.suppress(OSError, PolicyError):
        there = _receipt(out)
        if there.run_id != receipt.run_id or there == receipt:
            return
        if there.workload != receipt.workload:
            rule, flag = "has the answers of another workload", ""
        elif nonnegative:
            rule, flag = "has these answers without --nonnegative", "leave out --nonnegative, or "
        else:
            rule, flag = "has these answers with --nonnegative", "type --nonnegative, or "
        raise UsageError(
            "--out", f"{rule}, of the same estimate", f"{flag}name a new folder: nothing is charged"
        )


def write_estimate(folder: Path, estimate: Estimate | TableEstimate) -> None:
    """Write an estimate into a folder; equal estimates give equal bytes.

    Raises:
        OSError: the file cannot be written.
    """
    np.savez(folder / ESTIMATE, **to_arrays(estimate))  # type: ignore[arg-type]


def read_release(folder: Path) -> Released:
    """Return a release, after a check of its estimate against the receipt.

    Raises:
        UsageError: there is no release.
        PolicyError: it is damaged, or another program's.
    """
    try:
        receipt = _receipt(folder)
        data = (folder / ESTIMATE).read_bytes()
    except ABSENT:
        rule = f"{folder.name!r} is no folder that `dpstream workload answer` wrote"
        raise UsageError(_FIELD, rule, "name its --out") from None
    except OSError as error:
        raise file_error(_FIELD, "cannot be read", error) from None
    with file_errors(_FIELD, "cannot be read"):
        intact = is_written(folder / ESTIMATE, receipt.files.get(ESTIMATE))
    if not intact:
        raise PolicyError(_FIELD, "has an estimate that is not what was released", "restore it")
    return released_of(receipt, data)


def released_of(receipt: Receipt, data: bytes) -> Released:
    """Return a release from the bytes of its estimate.

    Raises:
        PolicyError: the bytes have another form.
    """
    try:
        with np.load(io.BytesIO(data), allow_pickle=False) as held:
            released = Released(receipt, of_arrays({name: held[name] for name in held.files}))
            if _fits(released):
                return released
    except (ValueError, KeyError, TypeError, AttributeError, zipfile.BadZipFile):
        pass
    raise PolicyError(_FIELD, "has an estimate of another form", "restore it")


def _fits(released: Released) -> bool:
    """Return whether an estimate has the shapes of its receipt, and finite numbers."""
    receipt, estimate = released
    sizes = tuple(len(a["edges"]) - 1 if "edges" in a else len(a["values"]) for a in receipt.domain)
    releases, cells = len(receipt.moments), math.prod(sizes)
    if isinstance(estimate, TableEstimate):
        roots = [basis.root for basis in estimate.bases if isinstance(basis, Fitted)]
        numbers = [estimate.sds, *estimate.measured, *roots]
        fits = estimate.sizes == sizes and releases == 1
    else:
        numbers = [estimate.cells, estimate.scale, *estimate.mix]
        mixes = [factor.shape for factor in estimate.mix]
        fits = (
            estimate.cells.shape == (releases, cells)
            and estimate.scale.shape == (releases,)
            and mixes in ([(cells, cells)], [(size, size) for size in sizes])
        )
    return fits and all(x.dtype == np.float64 and np.isfinite(x).all() for x in numbers)


def check_domain(receipt: Receipt, workload: Workload) -> None:
    """Refuse a workload that a release cannot answer.

    Raises:
        UsageError: the workload has another domain.
    """
    if receipt.domain_digest != domain_digest(workload.aligned.attributes):
        names = ", ".join(attribute["name"] for attribute in receipt.domain)
        raise UsageError(
            "domain",
            f"is not the release's ({names}): names, and the values and edges of each, must be the "
            "same",
            f"take the domain of its {RECEIPT}",
        )


def write_table(path: Path, table: pa.Table) -> None:
    """Write a table in the format of the file's ending: parquet, csv, or Arrow IPC.

    Raises:
        UsageError: another ending.
    """
    if path.suffix not in (".parquet", ".csv", ".arrow"):
        raise UsageError("--out", "ends with .parquet, .csv or .arrow", "name such a file")
    with (
        file_errors("--out", "cannot be written"),
        replacing(path) as draft,
        open(draft, "wb") as file,
    ):
        if path.suffix == ".parquet":
            pq.write_table(table, file)
        elif path.suffix == ".csv":
            write_csv(table, file)
        else:
            with pa.ipc.new_file(file, table.schema) as writer:
                writer.write_table(table)


def write_csv(table: pa.Table, file: Any) -> None:
    """Write a table as CSV."""
    plain = [
        column.cast(pa.string()) if pa.types.is_dictionary(column.type) else column
        for column in table.columns
    ]
    pa.csv.write_csv(pa.table(plain, names=table.column_names), file)


def _receipt(folder: Path) -> Receipt:
    return header_of((folder / RECEIPT).read_bytes(), Receipt, _FIELD)


# What each answer is of, in words: a column for each attribute, without a text for each row.

#: Of an attribute that is summed out.
ALL = "all"
#: Columns beside those of attributes, which get another name where theirs is one of these.
RESERVED = frozenset(
    (
        "product",
        "value",
        "sd",
        "low",
        "high",
        "window_start",
        "window_end",
        "trigger_time",
        "trigger",
    )
)


def labelled(workload: Workload) -> dict[str, pa.Array]:
    """Return columns ``product`` (number, from 0) and one for each attribute, in the queries'
    order.

    Attributes are dictionaries: each text is there once.
    """
    texts: list[dict[str, int]] = [{} for _ in workload.attributes]
    numbers: list[list[Int32]] = [[] for _ in workload.attributes]
    products = []
    code_cache: dict[tuple[int, int], Int32] = {}
    for number, product in enumerate(workload.products):
        factors = workload.factors_of(product)
        rows = [factor.rows for factor in factors]
        total = int(np.prod(rows))
        products.append(np.full(total, number, np.int32))
        for axis, factor in enumerate(factors):
            key = (axis, -1 if factor.kind == "total" else id(factor))
            if key not in code_cache:
                codes = [
                    texts[axis].setdefault(text, len(texts[axis]))
                    for text in _of_factor(workload.attributes[axis], factor)
                ]
                code_cache[key] = np.array(codes, np.int32)
            after = int(np.prod(rows[axis + 1 :]))
            each = np.repeat(code_cache[key], after)
            numbers[axis].append(np.tile(each, total // len(each)))
    columns = {"product": pa.array(np.concatenate(products))}
    for attribute, own, code_arrays in zip(workload.attributes, texts, numbers, strict=True):
        name = attribute.name + "_" * (attribute.name in RESERVED)
        columns[name] = pa.DictionaryArray.from_arrays(
            pa.array(np.concatenate(code_arrays)), pa.array(list(own), pa.string())
        )
    return columns


def _of_factor(attribute: Attribute, factor: Factor) -> list[str]:
    """A text for each query of a factor."""
    if factor.kind == "total":
        return [ALL]
    if factor.matrix is not None:
        return [f"row {row}" for row in range(factor.rows)]
    first, last = factor.spans
    if attribute.edges:
        edges = [
            f"{edge:.17g}" if edge != int(edge) else f"{int(edge)}" for edge in attribute.edges
        ]
        return [
            f"[{edges[low]}, {edges[high + 1]})"
            for low, high in zip(first.tolist(), last.tolist(), strict=True)
        ]
    values = [str(value) for value in attribute.values]
    return [
        values[low] if low == high else f"{values[low]} .. {values[high]}"
        for low, high in zip(first.tolist(), last.tolist(), strict=True)
    ]


_TIME_COLUMNS = ("window_start", "window_end", "trigger_time")


def answers(
    workload: Workload,
    estimate: Estimate | TableEstimate,
    moments: Sequence[Moment],
    over_time: bool = False,
    consistent: bool = False,
) -> pa.Table | None:
    """Return one row for each release and query; ``None`` if one table cannot hold them.

    Such a workload is asked of the release, part by part.

    Args:
        over_time: add the release's window and trigger time.
        consistent: values are of the non-negative estimate of least squares; ``sd`` and the
            interval stay those of the linear answers, which they are exact for.
    """
    if len(moments) * workload.queries > MAX_ANSWERS:
        return None
    labels, rows, parts = labelled(workload), workload.aligned_rows, []
    aligned = estimate.answers(workload.aligned, consistent)
    for moment, answer in zip(moments, aligned, strict=True):
        columns = _moment(moment, len(answer.sd)) if over_time else {}
        figures = _figures(answer, rows, estimate.half_width)
        parts.append(pa.table({**columns, **labels, **figures}))
    return pa.concat_tables(parts)


def _figures(answer: Answers, rows: Int64, half_width: float) -> dict[str, pa.Array]:
    """Return the columns of figures.

    Args:
        answer: of the aligned workload; rows: its row of each query as it is asked.
    """
    wide = half_width * answer.sd
    columns = {
        "value": answer.displayed,
        "sd": answer.sd,
        "low": answer.estimates - wide,
        "high": answer.estimates + wide,
    }
    return {name: pa.array(column[rows]) for name, column in columns.items()}


def _moment(moment: Moment, rows: int) -> dict[str, pa.Array]:
    stamp = pa.timestamp("us", "UTC")
    columns = {
        name: pa.array(np.full(rows, getattr(moment, name))).cast(stamp) for name in _TIME_COLUMNS
    }
    return {**columns, "trigger": pa.array(np.full(rows, moment.trigger, np.int32))}

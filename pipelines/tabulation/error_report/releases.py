"""Published tables read again, group by group: what a report holds against the truth."""

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import csv as pa_csv

from dpstream.accounting.arrays import Int64
from dpstream.accounting.errors import UsageError
from dpstream.accounting.tabulation.parameters import Table
from dpstream.dp_transforms.tabulation.domain import LevelDomain
from dpstream.dp_transforms.tabulation.release import GROUP_COLUMNS, Output, Row, outputs
from dpstream.pipelines.tabulation.text import SEPARATOR


class Figures(NamedTuple):
    """Published figures of groups of one detail.

    Attributes:
        output: that they are of; detail: of the groups; rows: what each figure is.
        groups: (n,) numbers in the level, increasing; values: (n, rows).
    """

    output: Output
    detail: int
    rows: tuple[Row, ...]
    groups: Int64
    values: Int64


def released_figures(run: Path, table: Table, level: LevelDomain) -> list[Figures]:
    """All figures of a table and level in the folder of an output.

    Raises:
        UsageError: a file is not as this program writes it.
    """
    figures, detail_of = list[Figures](), dict[int, Int64]()
    # A total does not say of which detail its group is: its further figures do, and come first.
    for output in reversed(outputs(table)):
        groups, labels, counts = _read(run, output, level)
        for detail, at in _by_detail(output, groups, detail_of).items():
            rows = output.rows[detail]
            expected = np.tile(list(_labels_of(output, rows)), len(at) // len(rows))
            if (labels[at] != expected).any():
                raise _foreign(output.folder)
            of = groups[at][:: len(rows)]
            figures.append(Figures(output, detail, rows, of, counts[at].reshape(-1, len(rows))))
            if len(output.rows) > 1 and output.columns:
                detail_of[detail] = of
    return figures[::-1]


def _read(run: Path, output: Output, level: LevelDomain) -> tuple[Int64, Int64, Int64]:
    """(groups, places of labels among all, counts) of all rows."""
    kind = level.level
    pattern = f"{kind.region_type.lower()}-{kind.iteration_level}-*.csv"
    paths = sorted((run / output.folder).glob(pattern))
    if not paths:
        raise _foreign(output.folder)
    table = pa.concat_tables([_table(path, output) for path in paths]).unify_dictionaries()
    region = _places(table["REGION_ID"], level.regions)
    iteration = _places(table["ITERATION_CODE"], level.iterations)
    label = np.zeros(table.num_rows, np.int64)
    if output.columns:
        texts = [table[name].cast(pa.string()) for name in output.columns]
        joined = pc.binary_join_element_wise(*texts, SEPARATOR).dictionary_encode()
        label = _places(joined, pa.array(_every_label(output)))
    groups = region * len(level.iterations) + iteration
    if any(len(p) and p.min() < 0 for p in (region, iteration, label)) or _falls(groups):
        raise _foreign(output.folder)
    return groups, label, np.asarray(table["COUNT"].to_numpy(), np.int64)


def _table(path: Path, output: Output) -> pa.Table:
    names = [*GROUP_COLUMNS, *output.columns, "COUNT"]
    types = {name: pa.dictionary(pa.int32(), pa.string()) for name in names[:-1]}
    try:
        table = pa_csv.read_csv(
            path,
            pa_csv.ReadOptions(use_threads=False),
            pa_csv.ParseOptions(delimiter=SEPARATOR, quote_char=False),
            pa_csv.ConvertOptions(column_types={**types, "COUNT": pa.int64()}),
        )
    except (OSError, pa.ArrowInvalid):
        raise _foreign(output.folder) from None
    if table.column_names != names:
        raise _foreign(output.folder)
    return table


def _places(column: pa.ChunkedArray, names: pa.StringArray) -> Int64:
    """(n,) the place of each text among known ones, -1: none."""
    parts = [np.zeros(0, np.int64)]
    for chunk in column.chunks:
        place = pc.index_in(chunk.dictionary, value_set=names).fill_null(-1)
        of = np.asarray(place.to_numpy(zero_copy_only=False), np.int64)
        parts.append(of[chunk.indices.to_numpy()])
    return np.concatenate(parts)


def _every_label(output: Output) -> list[str]:
    """Each label that any detail has, once."""
    rows = [row for detail in output.rows.values() for row in detail]
    return list(dict.fromkeys(SEPARATOR.join(row.labels) for row in rows))


def _labels_of(output: Output, rows: tuple[Row, ...]) -> list[int]:
    """Places of the labels of a detail's rows among all."""
    if not output.columns:
        return [0]
    every = {label: place for place, label in enumerate(_every_label(output))}
    return [every[SEPARATOR.join(row.labels)] for row in rows]


def _by_detail(output: Output, groups: Int64, detail_of: Mapping[int, Int64]) -> dict[int, Int64]:
    """Places of the rows of each detail."""
    details = np.zeros(len(groups), np.int64)
    if output.columns:
        # So many rows as a group has, its detail has figures.
        starts = np.flatnonzero(np.diff(groups, prepend=-1))
        sizes = np.diff(starts, append=len(groups))
        widths = {len(rows): detail for detail, rows in output.rows.items()}
        if not set(np.unique(sizes).tolist()) <= widths.keys():
            raise _foreign(output.folder)
        by_width = np.array([widths.get(width, 0) for width in range(max(widths) + 1)])
        details = np.repeat(by_width[sizes], sizes)
    else:
        for detail, detail_groups in detail_of.items():
            details[np.isin(groups, detail_groups)] = detail
    return {detail: np.flatnonzero(details == detail) for detail in np.unique(details).tolist()}


def _falls(groups: Int64) -> bool:
    return bool((np.diff(groups) < 0).any())


def _foreign(folder: str) -> UsageError:
    return UsageError(
        folder, "is not as this program writes it", "name the folder of an output as it was made"
    )

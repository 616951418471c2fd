"""RELEASE: the published text of measured counts; post-processing without private data.

Persons (program p): ``t1`` has the total of every group: measured where it was, else the sum of its
cells.  ``t2`` has the cells of groups with detail, and for each sex their sum.  Households (program
h): each detail has a file of its own (``t3/T03001`` to ``T03004``, ``t4/T04001``, ``T04002``) with
all data cells that it yields.

Zero suppression takes totals out of ``t1`` that were measured as totals in regions below the state:
kept are those above the quantile of their noise at the chance, so that a group without anybody is
kept with at most 1 - chance.  Without noise every quantile is 0, and totals of 0 are taken out, as
production does.  It compares the measured figure, before one below 0 is set to 0, and before step 1
is combined with it: which groups are kept does not depend on how they are estimated.

Figures are sums of measured counts, those below 0 set to 0 before where they may not be published;
or, ``combined``, least-squares estimates over both steps (`accounting.tabulation.margins`).

Beside each table lie its *margins*: the same rows with the exact 95% margin in the place of the
count, which is a function of the plan and of the published detail alone.
"""

import functools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from dpstream.accounting.arrays import Int64
from dpstream.accounting.errors import InvariantError, required
from dpstream.accounting.tabulation.margins import combine, published_margin, quantile, weight
from dpstream.accounting.tabulation.parameters import AGE_BINS, OLDEST, Parameters, Table
from dpstream.dp_transforms.tabulation.domain import LevelDomain
from dpstream.dp_transforms.tabulation.perturb import Measured

GROUP_COLUMNS = ("REGION_ID", "REGION_TYPE", "ITERATION_CODE")
AGE_COLUMNS = ("AGESTART", "AGEEND", "SEX")
ALL, SEPARATOR = "*", "|"
#: Column of exact 95% margins.
MARGIN = "MARGIN_95"


class Row(NamedTuple):
    """A published row of a group at one detail, without the group's columns.

    Attributes:
        labels: texts of the label columns; cells: numbers of the measured cells that are summed.
    """

    labels: tuple[str, ...]
    cells: tuple[int, ...]


class PublishedTable(NamedTuple):
    """A table as it is published.

    Attributes:
        folder: folder of the table's files.
        columns: columns of the header between those of the group and ``COUNT``.
        rows: by detail, what is published of a group; none of a detail that has no entry.
    """

    folder: str
    columns: tuple[str, ...]
    rows: dict[int, tuple[Row, ...]]

    def header(self, figure: str = "COUNT") -> str:
        """Return the first line of each file, of counts or of ``MARGIN``."""
        return SEPARATOR.join((*GROUP_COLUMNS, *self.columns, figure)) + "\n"


class Text(NamedTuple):
    """A part of a table: files of counts and of their margins, row by row."""

    counts: bytes
    margins: bytes


def outputs(table: Table) -> tuple[PublishedTable, ...]:
    """Return the published outputs of a table."""
    details = range(len(table.details))
    if not table.data_cells:
        total = [Row((), tuple(range(detail.size))) for detail in table.details]
        return (
            PublishedTable("t1", (), {d: (total[d],) for d in details}),
            PublishedTable(
                "t2", AGE_COLUMNS, {d: _ages(table.details[d].size) for d in details if d}
            ),
        )
    number = table.name.removeprefix("t")
    return tuple(
        PublishedTable(
            f"{table.name}/T0{number}00{d + 1}",
            (f"{table.name.upper()}_DATA_CELL",),
            {d: tuple(Row((str(cell),), cells) for cell, cells in table.published(d))},
        )
        for d in details
    )


def _ages(size: int) -> tuple[Row, ...]:
    """Sex by age, and the margin of each sex."""
    bins = size // 2
    starts = (0, *AGE_BINS[bins])
    ends = (*(edge - 1 for edge in AGE_BINS[bins]), OLDEST)
    out = []
    for sex in (1, 2):
        mine = range((sex - 1) * bins, sex * bins)
        for cell, start, end in zip(mine, starts, ends, strict=True):
            out.append(Row((str(start), str(end), str(sex)), (cell,)))
        out.append(Row((ALL, ALL, str(sex)), tuple(mine)))
    return tuple(out)


def released(
    level: LevelDomain, output: PublishedTable, parts: Sequence[Measured], parameters: Parameters
) -> Text:
    """Return the text of a shard's part of a table: the header, then groups in public order."""
    groups, labels, counts = list[Int64](), list[Int64](), list[Int64]()
    names, margins = list[tuple[str, ...]](), list[int]()
    for part in parts:
        rows = output.rows.get(part.detail)
        if rows is None:
            continue
        survivors = _unsuppressed(level, output, part, parameters)
        groups.append(np.repeat(survivors.groups, len(rows)))
        labels.append(np.tile(np.arange(len(names), len(names) + len(rows)), len(survivors.groups)))
        counts.append(np.stack(figures_of(survivors, rows, parameters), axis=1).reshape(-1))
        names += [row.labels for row in rows]
        margins += _margins(part, rows, parameters)
    if not groups:
        return Text(output.header().encode(), output.header(MARGIN).encode())
    group = np.concatenate(groups)
    order = np.argsort(group, kind="stable")
    label = np.concatenate(labels)[order]
    start = _starts(level, group[order])
    middles = [SEPARATOR + "".join(f"{text}{SEPARATOR}" for text in name) for name in names]
    ends = [f"{text}{margin}\n" for text, margin in zip(middles, margins, strict=True)]
    count = pa.array(np.concatenate(counts)[order]).cast(pa.string())
    return Text(
        _text(output.header(), [*start, _taken(middles, label), count, "\n"]),
        _text(output.header(MARGIN), [*start, _taken(ends, label)]),
    )


def _unsuppressed(
    level: LevelDomain, output: PublishedTable, part: Measured, parameters: Parameters
) -> Measured:
    """What is measured, without suppressed groups."""
    chance = parameters.zero_suppression
    suppressed = output.folder == "t1" and part.detail == 0 and not level.level.detailed
    if not suppressed or chance == 0:
        return part
    mask = part.values[:, 0] > _quantile(part.noise, chance)
    first = None if part.first is None else part.first[mask]
    return part._replace(groups=part.groups[mask], values=part.values[mask], first=first)


def figures_of(part: Measured, rows: Sequence[Row], parameters: Parameters) -> list[Int64]:
    """Return (groups,) figures of each row."""
    values, negative = part.values, parameters.allow_negative
    if parameters.estimates == "census" or part.first is None:
        values = values if negative else np.maximum(values, 0)
        return [values[:, list(row.cells)].sum(axis=1) for row in rows]
    if part.first_noise is None:
        raise InvariantError("step 1 has noise")
    size = values.shape[1]
    estimates = combine(
        part.first, values, _weight(part.first_noise, part.noise, size), allow_negative=negative
    )
    out = list[Int64]()
    for row in rows:
        if len(row.cells) == size:
            out.append(estimates.total)
        elif len(row.cells) == 1:
            out.append(estimates.cells[:, row.cells[0]])
        else:
            sexes = required(estimates.sexes, "a margin is one of two")
            out.append(sexes[:, row.cells[0] // (size // 2)])
    return out


def _margins(part: Measured, rows: Sequence[Row], parameters: Parameters) -> list[int]:
    """The exact 95% margin of each row's figure."""
    size = part.values.shape[1]
    return [
        published_margin(parameters, part.first_noise, part.noise, size, len(row.cells))
        for row in rows
    ]


_weight = functools.lru_cache(maxsize=256)(weight)
_quantile = functools.lru_cache(maxsize=256)(quantile)


def _starts(level: LevelDomain, groups: Int64) -> list[pa.StringArray]:
    """How the row of each group begins: its region with the type, and its iteration."""
    region, iteration = np.divmod(groups, len(level.iterations))
    kind = f"{level.level.region_type}{SEPARATOR}"
    regions = pc.binary_join_element_wise(level.regions, kind, SEPARATOR)
    return [regions.take(pa.array(region)), level.iterations.take(pa.array(iteration))]


def _taken(texts: list[str], labels: Int64) -> pa.StringArray:
    return pa.array(texts).take(pa.array(labels))


def _text(header: str, parts: list[pa.StringArray | str]) -> bytes:
    """Rows whose texts are joined as they are: ids, codes and numbers need no quotes."""
    lines = pc.binary_join_element_wise(*parts, "")
    _, offsets, data = lines.buffers()
    size = int(np.frombuffer(offsets, np.int32)[len(lines)]) if len(lines) else 0
    return header.encode() + (data.slice(0, size).to_pybytes() if size else b"")

"""The page of a table's account: what is left, over two dimensions and over time, and what was
asked; and its pictures as files.

It is made of the account alone, which is public: neither records nor answers nor the secret are
read, so that every analyst may have it.
"""

from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from markupsafe import Markup

from dpstream.accounting.arrays import Int64
from dpstream.accounting.errors import PolicyError, UsageError, instance
from dpstream.accounting.regions import amounts
from dpstream.accounting.regions.amounts import MICRO
from dpstream.accounting.regions.dimensions import Budget
from dpstream.accounting.regions.spent import Spent
from dpstream.pipelines.render import charts
from dpstream.pipelines.render.charts import pages, picture_fields
from dpstream.pipelines.session import drawing, sentences
from dpstream.pipelines.session.open_table import OpenTable
from dpstream.pipelines.session.overview import overview
from dpstream.pipelines.session.pictures import heat_map, kinds, over_time
from dpstream.pipelines.session.selection import Selection
from dpstream.pipelines.session.transcript import Line, transcript
from dpstream.state.disk_errors import file_errors
from dpstream.state.durable import replacing

#: What a page begins with; a file that begins otherwise is never replaced.
MARK = '<!doctype html>\n<html lang="en" data-made-by="dpstream session">'
_PNG = b"\x89PNG\r\n\x1a\n"
#: Entries on a page.
MOST_LINES = 500


class Chosen(NamedTuple):
    """The options of a page or picture.

    Attributes:
        by: dimensions of the maps; none: the first two that are not budgets.
        initial: initial budget of the points in the maps, in millionths; ``None``: the most.
        within: (d, 2) box that the maps show; ``None``: the whole space.
        kind: kind of budget of a picture; ``None``: the first.
        over_time: draw spending over time instead of a map.
    """

    by: tuple[tuple[str, str], ...] = ()
    initial: int | None = None
    within: Int64 | None = None
    kind: str | None = None
    over_time: bool = False


def pairs_of(texts: Sequence[str]) -> tuple[tuple[str, str], ...]:
    """Return pairs of dimensions, each written as ``NAME,NAME``.

    Raises:
        UsageError: a text is not such a pair.
    """
    pairs = [tuple(part.strip() for part in text.split(",")) for text in texts]
    if any(len(pair) != 2 for pair in pairs):
        raise UsageError("--by", "must be two dimensions", "write NAME,NAME")
    return tuple((across, up) for across, up in pairs)


def initial_of(text: str | None) -> int | None:
    """Return an initial budget in millionths.

    Raises:
        UsageError: the text is not a budget.
    """
    return None if text is None else amounts.initial_of(text, "--epsilon")


def frame_of(boxes: Int64) -> Int64:
    """Return (d, 2) the least box with all boxes in it.

    Raises:
        UsageError: there is no box.
    """
    if not len(boxes):
        raise UsageError("where", "is true nowhere", "name at least one point")
    return np.stack([boxes[:, :, 0].min(axis=0), boxes[:, :, 1].max(axis=0)], axis=1)


def render(open_table: OpenTable, chosen: Chosen) -> str:
    """One self-contained HTML document."""
    return pages().get_template("session.html.j2").render(context(open_table, chosen))


def png(open_table: OpenTable, chosen: Chosen) -> bytes:
    """One picture: a map, or spending over time.

    Raises:
        UsageError: the table has one dimension or not such budgets, or several maps are chosen.
    """
    kind = chosen.kind or kinds(open_table.space)[0]
    open_table.space.budget_place(kind)
    if chosen.over_time:
        return drawing.spending_png(
            over_time(open_table.table, kind, open_table.account.history()), kind
        )
    by = chosen.by or default_by(open_table)
    if len(by) != 1:
        raise UsageError("--by", "must be one pair of dimensions for a .png", "name one pair")
    spent = open_table.account.spent(kind)  # type: ignore[arg-type]
    heat = heat_map(spent, *by[0], chosen.initial, chosen.within)
    return drawing.heat_png(open_table.space, heat, kind)


def context(open_table: OpenTable, chosen: Chosen) -> dict[str, Any]:
    """Return the values of the template; only `Markup` is not escaped."""
    summary = overview(open_table, Selection(open_table.space))
    lines = transcript(open_table)[::-1]
    return {
        "mark": Markup(MARK),
        "made": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "insecure": open_table.insecure,
        "overview": summary,
        "both": len(summary["budgets"]) > 1,
        "kinds": [
            _kind(open_table, kind, summary["budgets"][kind], chosen)
            for kind in kinds(open_table.space)
        ],
        "legend": list(zip(charts.swatches(len(drawing.LINES)), drawing.LINES, strict=True)),
        "lines": [_first_two(line) for line in lines[:MOST_LINES]],
        "more": len(lines) > MOST_LINES,
    }


def _kind(
    open_table: OpenTable, kind: str, budget: dict[str, Any], chosen: Chosen
) -> dict[str, Any]:
    spent = open_table.account.spent(kind)  # type: ignore[arg-type]
    maps = [
        drawing.heat(
            open_table.space,
            heat_map(spent, *pair, _top(spent, chosen), chosen.within),
            kind,
            f"{kind}{n}",
        )
        for n, pair in enumerate(chosen.by or default_by(open_table))
    ]
    moments = over_time(open_table.table, kind, open_table.account.history())
    return {
        "kind": kind,
        "most": _amount(budget["most_spent"]),
        "least": _amount(budget["least_spent"]),
        "initial": _amount(budget["most_initial"]),
        "regions": budget["regions"],
        "maps": [picture_fields(picture) for picture in maps],
        "time": picture_fields(drawing.spending(moments, kind)) if moments else None,
        "rows": [
            row | {"spent": "closed" if row["spent"] is None else _amount(row["spent"])}
            for row in budget["rows"]
        ],
    }


def _top(spent: Spent, chosen: Chosen) -> int | None:
    """Return the chosen initial budget, if records can have it of this kind; else the most."""
    dimension = spent.space.dimensions[spent.place]
    dimension = instance(dimension, Budget)
    most = (dimension.values - 1) * dimension.step
    return chosen.initial if chosen.initial is None or chosen.initial <= most else None


def _first_two(line: Line) -> dict[str, Any]:
    return line._asdict() | {"amount": sentences.amount(line.amount) if line.kind else ""}


def _amount(budget: float) -> str:
    return sentences.amount(round(budget * MICRO))


def default_by(open_table: OpenTable) -> tuple[tuple[str, str], ...]:
    """Return the first two dimensions that are not budgets; if there is only one, with a budget."""
    names = [d.name for d in open_table.space.dimensions if not isinstance(d, Budget)]
    names += [d.name for d in open_table.space.dimensions if isinstance(d, Budget)]
    return ((names[0], names[1]),) if len(names) > 1 else ()


def write(out: Path, text: str | bytes) -> None:
    """Write a page or picture; replace an existing file only if it is one of the same kind.

    Raises:
        UsageError: the path ends otherwise.
        PolicyError: another file is there.
        RunError: the file cannot be written.
    """
    data = text.encode() if isinstance(text, str) else text
    first = MARK.encode() if isinstance(text, str) else _PNG
    with file_errors("--out", "cannot be written"):
        if out.exists() and not out.read_bytes().startswith(first):
            raise PolicyError("--out", "is a file of something else", "choose another name")
        with replacing(out) as draft:
            draft.write_bytes(data)


def kind_of(out: Path) -> str:
    """Return ``html`` or ``png``, by the name of a file.

    Raises:
        UsageError: the name ends otherwise.
    """
    ending = out.suffix.lower().removeprefix(".")
    if ending not in ("html", "png"):
        raise UsageError("--out", "must end in .html or .png", "name it so")
    return ending

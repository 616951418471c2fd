"""The page of a table's account: what is left, over two dimensions and over time, and what was
asked; and its pictures as files.

It is made of the ledger alone, which is public: neither records nor answers nor the key are read,
so that it can be given to every analyst.
"""

from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from markupsafe import Markup

from dpstream.accounting.arrays import Int64
from dpstream.accounting.errors import PolicyError, RunError, UsageError
from dpstream.accounting.regions.amounts import MICRO
from dpstream.accounting.regions.dimensions import Budget
from dpstream.pipelines.report import charts
from dpstream.pipelines.report.pages import pages
from dpstream.pipelines.session import drawing, words
from dpstream.pipelines.session.desk import Desk
from dpstream.pipelines.session.overview import overview
from dpstream.pipelines.session.pictures import heat_map, kinds, over_time
from dpstream.pipelines.session.selection import Selection
from dpstream.pipelines.session.transcript import Line, transcript
from dpstream.state.durable import replacing

#: What a page begins with; a file that begins otherwise is never replaced.
MARK = '<!doctype html>\n<html lang="en" data-made-by="dpstream session">'
_PNG = b"\x89PNG\r\n\x1a\n"
#: Entries on a page.
MOST_LINES = 500


def render(
    desk: Desk, by: list[tuple[str, str]], initial: int | None = None, within: Int64 | None = None
) -> str:
    """One self-contained HTML document.

    Args:
        by: dimensions of the maps; none: the first two that are no budgets.
        initial: budget that the maps are of, in millionths; by default the most.
        within: (d, 2) box that the maps look at.
    """
    return pages().get_template("session.html.j2").render(context(desk, by, initial, within))


def context(
    desk: Desk, by: list[tuple[str, str]], initial: int | None, within: Int64 | None
) -> dict[str, Any]:
    """What the template is given; only `Markup` is not escaped."""
    found = overview(desk, Selection(desk.space))
    lines = transcript(desk)[::-1]
    return {
        "mark": Markup(MARK),
        "made": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "insecure": desk.insecure,
        "overview": found,
        "both": len(found["budgets"]) > 1,
        "kinds": [
            _kind(desk, kind, found["budgets"][kind], by or default_by(desk), initial, within)
            for kind in kinds(desk.space)
        ],
        "legend": list(zip(charts.swatches(len(drawing.LINES)), drawing.LINES, strict=True)),
        "lines": [_shown(line) for line in lines[:MOST_LINES]],
        "more": len(lines) > MOST_LINES,
    }


def _kind(
    desk: Desk, kind: str, found: dict[str, Any], by: list[tuple[str, str]],
    initial: int | None, within: Int64 | None,
) -> dict[str, Any]:  # fmt: skip
    spent = desk.account.spent(kind)  # type: ignore[arg-type]
    maps = [
        drawing.heat(desk.space, heat_map(spent, *pair, initial, within), kind, f"{kind}{n}")
        for n, pair in enumerate(by)
    ]
    moments = over_time(desk.table, kind, desk.account.history())
    return {
        "kind": kind,
        "most": _amount(found["most_spent"]),
        "least": _amount(found["least_spent"]),
        "initial": _amount(found["most_initial"]),
        "regions": found["regions"],
        "maps": [_marked(picture) for picture in maps],
        "time": _marked(drawing.spending(moments, kind)) if moments else None,
        "shown": [row | {"spent": _amount(row["spent"])} for row in found["shown"]],
    }


def _shown(line: Line) -> dict[str, Any]:
    return line._asdict() | {"amount": words.amount(line.amount) if line.kind else ""}


def _amount(budget: float) -> str:
    return words.amount(round(budget * MICRO))


def _marked(picture: charts.Picture) -> dict[str, Any]:
    # Its texts are names of dimensions and codes, which matplotlib escapes, and numbers.
    return {"svg": Markup(picture.svg), "words": picture.words}


def default_by(desk: Desk) -> list[tuple[str, str]]:
    """The first two dimensions that are no budgets; of fewer, with a budget."""
    names = [d.name for d in desk.space.dimensions if not isinstance(d, Budget)]
    names += [d.name for d in desk.space.dimensions if isinstance(d, Budget)]
    return [(names[0], names[1])] if len(names) > 1 else []


def write(out: Path, text: str | bytes) -> None:
    """Put a page or picture at a path; only one of its own kind is replaced.

    Raises:
        UsageError: the path ends otherwise; PolicyError: another file is there.
        RunError: it cannot be written.
    """
    data = text.encode() if isinstance(text, str) else text
    first = MARK.encode() if isinstance(text, str) else _PNG
    try:
        if out.exists() and not out.read_bytes().startswith(first):
            raise PolicyError("--out", "is a file of something else", "choose another name")
        with replacing(out) as draft:
            draft.write_bytes(data)
    except OSError:
        raise RunError("--out", "cannot be written", "check the folder") from None


def kind_of(out: Path) -> str:
    """``html`` or ``png``, by the name of a file.

    Raises:
        UsageError: it is neither.
    """
    ending = out.suffix.lower().removeprefix(".")
    if ending not in ("html", "png"):
        raise UsageError("--out", "must end in .html or .png", "name it so")
    return ending

"""The figures of a page: what `tests/bench/figures.json` must know where each comes from.

A figure is a number with a unit, a percent sign or "times" in the text of a page, outside of code;
and every cell with a number, but for its label, of a table whose head names what was measured, or
of any table of the page of benchmarks.
"""

import json
import re
from collections import Counter
from typing import Any

from tests.docs.pages import ROOT, prose

#: The page whose tables are all measured.
BENCHMARKS = "docs/benchmarks.md"
RECORDED = ROOT / "tests" / "bench" / "figures.json"
_NUMBER = r"(?<![\w.,/^#-])\d+(?:,\d{3})*(?:\.\d+)?"
_UNIT = (
    r"(?: ?%| times\b| ?×(?! ?\d)|x\b| (?:CPU )?(?:s|ms|µs|ns)\b| CPU (?:ms|µs)\b"
    r"| (?:CPU )?(?:seconds?|minutes?)\b| ?(?:KB|MB|GB|kB|KiB|MiB|GiB)\b|(?: [a-z]+)?/s\b|M/s\b"
    r"| (?:records|rows|keys|messages|draws|commits) a second)"
)
_FIGURE = re.compile(_NUMBER + _UNIT)
_TABLE = re.compile(r"^\|(.*)\|\n\|[-:| ]+\|\n((?:\|.*\|\n?)*)", re.M)
_MEASURED = re.compile(r"\b(?:seconds|CPU|times|records/s|states/s|memory|MiB|L1|exponent)\b")


def _masked(text: str) -> str:
    """Without code and without the addresses of links."""
    text = re.sub(r"`[^`]*`", "`#`", text)
    return re.sub(r"\]\([^)]*\)", "]", text)


def _cells(row: str) -> list[str]:
    return [cell.strip().strip("*") for cell in row.strip().strip("|").split("|")]


def figures(page: str, all_tables: bool = False) -> Counter[str]:
    """The figures of a page's text, each as often as it stands there.

    Args:
        all_tables: every table holds what was measured, whatever its head says.
    """
    text = _masked(prose(page))
    seen: Counter[str] = Counter()

    def measured(table: re.Match[str]) -> str:
        if not all_tables and not _MEASURED.search(table[1]):
            return table[0]
        labels = [table[1]]
        for row in table[2].splitlines():
            label, *cells = _cells(row)
            labels.append(label)
            seen.update(cell for cell in cells if re.search(r"\d", cell))
        return "\n".join(labels) + "\n"

    rest = " ".join(_TABLE.sub(measured, text).split())
    return seen + Counter(_FIGURE.findall(rest))


def recorded() -> dict[str, Any]:
    """The file of figures."""
    content: dict[str, Any] = json.loads(RECORDED.read_text())
    return content


def expected(content: dict[str, Any], name: str) -> Counter[str]:
    """The figures that a page may have: of each of its commands, and its constants."""
    commands = content["documents"].get(name, {})
    constants = content["constants"].get(name, [])
    return Counter([f for of in [*commands.values(), constants] for f in of])


def faults(content: dict[str, Any], name: str, page: str) -> list[str]:
    """Figures of a page without a command, and recorded ones that it no longer has."""
    there, listed = figures(page, name == BENCHMARKS), expected(content, name)
    return [
        *(f"{name}: {figure!r} has no command" for figure in sorted((there - listed).elements())),
        *(f"{name}: {figure!r} is not there" for figure in sorted((listed - there).elements())),
    ]

"""Pages of the documentation and what they show: blocks of code, commands, names, links."""

import importlib.util
import re
import shlex
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
CHANGES = ROOT / "docs" / "changes"  # gathered by a release, no pages of the site
PAGES = [README, *(p for p in sorted((ROOT / "docs").rglob("*.md")) if p.parent != CHANGES)]
#: A fence, with the comment on the line before it that says what a test does with the block.
_BLOCK = re.compile(r"(?:^<!-- ([^\n]*?) -->\n)?^```([a-z]*)\n(.*?)^```$", re.M | re.S)


class Block(NamedTuple):
    """A fenced block.

    Attributes:
        mark: of the comment before it, ``run`` or ``file: NAME``; else empty.
        language, text: of the fence.
    """

    mark: str
    language: str
    text: str


def named(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def blocks(text: str) -> list[Block]:
    return [Block(*groups) for groups in _BLOCK.findall(text)]


def prose(text: str) -> str:
    """The text without its blocks."""
    return _BLOCK.sub("", text)


def lines(text: str) -> list[list[str]]:
    """The commands of a shell block as words, comments and line ends taken away."""
    commands = text.replace("\\\n", " ").splitlines()
    return [words for words in (shlex.split(line, comments=True) for line in commands) if words]


def inline(text: str) -> list[str]:
    """What stands between single backticks outside of blocks, in one line each."""
    return [" ".join(span.split()) for span in re.findall(r"`([^`]+)`", prose(text))]


def anchors(text: str) -> set[str]:
    """Names of the headings of a page, as links call them."""
    heads = re.findall(r"^#+ (.*)$", prose(text), re.M)
    return {re.sub(r"[\s-]+", "-", re.sub(r"[^\w\s-]", "", head.lower()).strip()) for head in heads}


def generator() -> ModuleType:
    """`docs/generate.py`, which is no part of a package."""
    spec = importlib.util.spec_from_file_location("generate", ROOT / "docs" / "generate.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module

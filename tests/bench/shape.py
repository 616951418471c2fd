"""Sizes of the source and of the tests: ``python -m tests.bench.shape [FOLDER]``, ``make shape``.

A statement is a node of the syntax tree that is one, without imports and docstrings.  Words of the
documentation are those outside of code and comments, without mechanism.md.  FOLDER is a checkout,
by default this one, so that two commits can be compared.  What fails on structure are the tests in
tests/test_structure.py, which ``make shape`` runs before.
"""

import argparse
import ast
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

#: Folders of the source; the rest of a checkout's Python is tests.
SOURCE = ("accounting", "state", "dp_transforms", "pipelines", "deploy", "dpstream/__init__.py")


class Size(NamedTuple):
    """Statements and modules."""

    statements: int
    modules: int


def statements(text: str) -> int:
    """Statements of a module, without imports and docstrings."""
    tree = ast.parse(text)
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    docstrings = sum(
        ast.get_docstring(node, clean=False) is not None
        for node in ast.walk(tree)
        if isinstance(node, documented)
    )
    nodes = [node for node in ast.walk(tree) if isinstance(node, ast.stmt)]
    return sum(not isinstance(node, ast.Import | ast.ImportFrom) for node in nodes) - docstrings


def modules(root: Path, names: tuple[str, ...]) -> Iterator[Path]:
    """Python files below some folders of a checkout."""
    for name in names:
        place = root / name
        yield from [place] if place.is_file() else sorted(place.rglob("*.py"))


def size(root: Path, names: tuple[str, ...]) -> Size:
    """Of some folders of a checkout."""
    sizes = [statements(path.read_text(encoding="utf-8")) for path in modules(root, names)]
    return Size(sum(sizes), len(sizes))


def words(root: Path) -> int:
    """Words of README and docs without mechanism.md, code blocks and comments."""
    pages = [root / "README.md", *sorted((root / "docs").rglob("*.md"))]  # fragments are no pages
    texts = [
        page.read_text(encoding="utf-8")
        for page in pages
        if page.name != "mechanism.md" and page.parent.name != "changes"
    ]
    prose = [re.sub(r"```.*?```|<!--.*?-->", "", text, flags=re.S) for text in texts]
    return sum(len(re.findall(r"[A-Za-z][A-Za-z'’-]*", text)) for text in prose)


def unformatted(root: Path, names: tuple[str, ...]) -> int:
    """Lines that opt out of the formatter."""
    texts = [path.read_text(encoding="utf-8") for path in modules(root, names)]
    return sum(len(re.findall(r"#\s*fmt:\s*skip", text)) for text in texts)


def main() -> None:
    """Print both sizes as one line of JSON."""
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("folder", nargs="?", type=Path, default=Path())
    root = options.parse_args().folder
    sizes = {"source": size(root, SOURCE), "tests": size(root, ("tests",))}
    shape: dict[str, object] = {name: of._asdict() for name, of in sizes.items()}
    shape["fmt: skip in source"] = unformatted(root, SOURCE)
    shape["words of docs"] = words(root)
    print(json.dumps(shape))


if __name__ == "__main__":
    main()

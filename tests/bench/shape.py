"""Sizes of the source and of the tests: ``python -m tests.bench.shape [FOLDER]``, ``make shape``.

A statement is a node of the syntax tree that is one, without imports and docstrings.  Words of the
documentation are those outside of code and comments, without mechanism.md.  Records are classes of
fields; small functions have at most two statements, and their names stand once in the source
outside of their definition.  FOLDER is a checkout, by default this one, so that two commits can be
compared.

No size may exceed its ceiling (`tests/bench/ceiling.json`, held by tests/bench/test_shape.py).  A
commit that needs more raises the ceiling and says in its body why; one that needs less lowers it.
"""

import argparse
import ast
import json
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple, cast

import click

CEILING = Path(__file__).with_name("ceiling.json")
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


def records(trees: list[ast.Module]) -> int:
    """Classes that are made of fields."""
    bases = {"NamedTuple", "Struct", "Section", "TypedDict"}
    return sum(
        isinstance(node, ast.ClassDef)
        and (
            any(_name(base) in bases for base in node.bases)
            or any(_name(one) == "dataclass" for one in node.decorator_list)
        )
        for tree in trees
        for node in ast.walk(tree)
    )


def _name(node: ast.expr) -> str:
    """The last part of a name, also of a call."""
    node = node.func if isinstance(node, ast.Call) else node
    return node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")


def small_functions(trees: list[ast.Module]) -> int:
    """Functions of at most two statements that are referenced once."""
    nodes = [node for tree in trees for node in ast.walk(tree)]
    used = Counter(
        node.id if isinstance(node, ast.Name) else node.attr
        for node in nodes
        if isinstance(node, ast.Name | ast.Attribute)
    )
    functions = [node for node in nodes if isinstance(node, ast.FunctionDef)]
    bodies = {
        function.name: len(function.body) - (ast.get_docstring(function) is not None)
        for function in functions
        if not function.decorator_list
    }
    return sum(used[name] == 1 and length <= 2 for name, length in bodies.items())


def habits(trees: list[ast.Module]) -> dict[str, int]:
    """What ties tests to the shape or the words of the source: it may only become less."""
    nodes = [node for tree in trees for node in ast.walk(tree)]
    calls = [node for node in nodes if isinstance(node, ast.Call)]
    return {
        "private attributes in tests": sum(
            isinstance(node, ast.Attribute)
            and re.fullmatch("_(?!replace|asdict|fields)[a-z].*", node.attr) is not None
            and not (isinstance(node.value, ast.Name) and node.value.id in ("self", "cls"))
            for node in nodes
        ),
        "texts matched in tests": sum(
            keyword.arg == "match" for call in calls for keyword in call.keywords
        ),
        "patches in tests": sum(
            isinstance(call.func, ast.Attribute)
            and (call.func.attr == "setattr" or ast.unparse(call.func).startswith("mock.patch"))
            for call in calls
        ),
    }


def commands() -> dict[str, int]:
    """Commands of this checkout's program that do something, their options, and the fields that a
    job declares with those of its mechanism."""
    from dpstream.pipelines.cli.main import cli
    from dpstream.pipelines.project.job_section import JobSection, MechanismSection

    waiting, leaves = [cast("click.Command", cli)], list[click.Command]()
    while waiting:
        command = waiting.pop()
        if isinstance(command, click.Group):
            context = click.Context(command)
            names = command.list_commands(context)
            waiting += [one for n in names if (one := command.get_command(context, n)) is not None]
        else:
            leaves.append(command)
    options = sum(isinstance(one, click.Option) for leaf in leaves for one in leaf.params)
    fields = len(JobSection.__struct_fields__) + len(MechanismSection.__struct_fields__)
    return {"commands": len(leaves), "options": options, "fields of a job": fields}


def shape_of(root: Path) -> dict[str, int]:
    """Return all sizes of a checkout by name."""
    source, tests = size(root, SOURCE), size(root, ("tests",))
    trees = [ast.parse(path.read_text(encoding="utf-8")) for path in modules(root, SOURCE)]
    return {
        "statements of source": source.statements,
        "modules of source": source.modules,
        "statements of tests": tests.statements,
        "modules of tests": tests.modules,
        "records": records(trees),
        "small functions": small_functions(trees),
        "fmt: skip in source": unformatted(root, SOURCE),
        "words of docs": words(root),
    } | habits([ast.parse(path.read_text(encoding="utf-8")) for path in modules(root, ("tests",))])


def main() -> None:
    """Print the sizes as one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", nargs="?", type=Path)
    folder = parser.parse_args().folder
    print(json.dumps(shape_of(folder or Path()) | ({} if folder else commands())))


if __name__ == "__main__":
    main()

"""Every optional import belongs to an extra, whose command fits the way of the installation."""

import ast
import json
import shlex
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from dpstream.accounting import extras
from dpstream.accounting.errors import UsageError

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
DEVELOPMENT = {"peers", "test", "docs", "dev"}
#: Package -> the name that is imported, where it is another one.
IMPORTED = {
    "apache-beam": "apache_beam", "python-flint": "flint", "prometheus-client": "prometheus_client",
    "typing-extensions": "typing_extensions",
}  # fmt: skip
#: What apache-beam, pinned exactly, brings and the program speaks to its runners with.
BEAMS = {"grpc", "google.protobuf"}
#: What each client of Google's brings with it; it is loaded behind that client only.
GOOGLES = {"google.api_core", "google.auth", "google.cloud.spanner"}


def imports(source: str) -> Iterator[str]:
    """Every module that a source file imports, wherever in it."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names = (alias.name for alias in node.names)
            spread = node.module in ("google", "google.cloud")
            yield from (f"{node.module}.{name}" for name in names) if spread else [node.module]


def undeclared(source: str) -> set[str]:
    """Imports of a source file that neither a dependency nor an extra brings."""
    plain = {IMPORTED.get(r.name, r.name) for r in map(Requirement, PROJECT["dependencies"])}
    optional = {module for extra in extras.EXTRAS.values() for module in extra.modules}
    brought = {*plain, *optional, *BEAMS, *GOOGLES, "dpstream"}
    return {
        name
        for name in imports(source)
        if name.partition(".")[0] not in sys.stdlib_module_names
        and not any(name == top or name.startswith(f"{top}.") for top in brought)
    }


def test_every_import_is_declared() -> None:
    folders = ("accounting", "state", "dp_transforms", "pipelines", "dpstream")
    for path in (path for folder in folders for path in (ROOT / folder).rglob("*.py")):
        assert undeclared(path.read_text()) == set(), path


@pytest.mark.parametrize("line", ["import dp_accounting", "def f():\n    from requests import get",
                                  "from google.cloud import storage"])  # fmt: skip
def test_an_undeclared_import_is_seen(line: str) -> None:
    assert undeclared(line)


def test_the_table_lists_the_extras_of_the_package() -> None:
    assert set(extras.EXTRAS) == set(PROJECT["optional-dependencies"]) - DEVELOPMENT
    page = (ROOT / "docs/start/install.md").read_text()
    for name, extra in extras.EXTRAS.items():
        assert f"| `dpstream[{name}]` | {extra.purpose} |\n" in page


@pytest.mark.parametrize("name", extras.EXTRAS)
def test_a_missing_module_names_its_extra(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in extras.EXTRAS[name].modules:
        monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(UsageError) as refused:
        extras.require(name, "a.field")
    assert refused.value.field == "a.field" and f"`{name}`" in refused.value.rule
    assert extras.installing(name) in refused.value.fix
    module = extras.EXTRAS[name].modules[0]
    error = ModuleNotFoundError(f"No module named {module!r}", name=module)
    translated = extras.missing_extra(error, "a.field")
    assert translated is not None and translated.as_dict() == refused.value.as_dict()


def test_another_missing_module_names_none() -> None:
    assert extras.missing_extra(ModuleNotFoundError("x", name="numpy"), "a.field") is None
    assert extras.missing_extra(ImportError("x"), "a.field") is None


@pytest.mark.parametrize(
    ("origin", "expected"),
    [
        (None, "dpstream[kafka]"),
        ({"url": "file:///a%20b/c", "dir_info": {"editable": True}}, "-e|/a b/c[kafka]"),
        ({"url": "file:///clone", "dir_info": {}}, "/clone[kafka]"),
        (
            {"url": "file:///d/dpstream-0.1.0-py3-none-any.whl", "archive_info": {}},
            "dpstream[kafka] @ file:///d/dpstream-0.1.0-py3-none-any.whl",
        ),
    ],
)
def test_each_origin_has_its_command(origin: dict[str, object] | None, expected: str) -> None:
    command = extras._command(None if origin is None else json.dumps(origin), "kafka")
    words = shlex.split(command)
    assert words[:2] == ["pip", "install"] and "|".join(words[2:]) == expected
    if origin is None or "archive_info" in origin:
        assert Requirement(words[-1]).extras == {"kafka"}


def test_this_installation_has_one() -> None:
    assert "[spanner]" in extras.installing("spanner")

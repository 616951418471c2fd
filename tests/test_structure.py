"""The shape of the code: who imports whom, sizes, docstrings, and no hidden nondeterminism.

Each check is a function from source text to offences and is also shown a bad source.
"""

import ast
import functools
import gc
import re
import tomllib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
from setuptools import find_packages

from tests.lanes import EXTENDED, SLOW, read_list

ROOT = Path(__file__).parents[1]
#: The name that users import; the four folders stand beside it and are imported below it.
FACE = "dpstream"
#: In the order of the import rule: a package may import itself and those before it.
LAYERS = ("accounting", "state", "dp_transforms", "pipelines")
DATABASES = {"sqlite3", "google", "sqlalchemy", "duckdb"}
FORBIDDEN = {
    "accounting": DATABASES | {"apache_beam", "pyarrow"},
    "state": {"apache_beam"},
    "dp_transforms": DATABASES,
    "pipelines": set(),
}
#: Stages that only the joiners (step, flow) may bring together.
STAGES = ("bounding", "aggregation", "selection", "perturbation")
MAX_LINES, MAX_FUNCTION = 600, 60
MAX_MODULES = 25


@functools.cache
def parsed(source: str) -> ast.Module:
    """The tree of a text, parsed once for all checks; not to be changed."""
    gc.disable()  # the trees stay, and to look through all of them again takes most of the time
    try:
        tree = ast.parse(source)
        gc.freeze()
    finally:
        gc.enable()
    return tree


@functools.cache
def nodes(source: str) -> list[ast.AST]:
    """All nodes of a text's tree."""
    return [*ast.walk(parsed(source))]


def sources(*folders: str) -> Iterator[Path]:
    for folder in folders:
        for path in sorted((ROOT / folder).rglob("*.py")):
            if "__pycache__" not in path.parts:
                yield path


PRODUCT = [ROOT / FACE / "__init__.py", ROOT / FACE / "__main__.py", *sources(*LAYERS)]
EVERYTHING = [*PRODUCT, *sources("tests", "deploy")]


def named(path: Path) -> str:
    return str(path.relative_to(ROOT))


@functools.cache
def imports(source: str) -> frozenset[str]:
    """Dotted names of all modules a source imports, inside functions too."""
    return frozenset(_imported(nodes(source)))


def _imported(among: Iterable[ast.AST]) -> Iterator[str]:
    for node in among:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            yield node.module or ""
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


#: The one module of the flow that asks a cloud service, and only for the secret.
CLOUD = "dp_transforms/noise/secret_source.py"


@functools.cache
def runtime_imports(source: str) -> frozenset[str]:
    """The same without those that only type checkers make."""
    types = [
        node
        for node in nodes(source)
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
    ]
    hidden = {id(node) for block in types for part in block.body for node in ast.walk(part)}
    return frozenset(_imported(node for node in nodes(source) if id(node) not in hidden))


def circles(modules: dict[str, str]) -> list[tuple[str, ...]]:
    """Modules that import each other, over however many others; function-level imports count.

    Args:
        modules: the source of each module by its dotted name.
    """
    direct = {name: runtime_imports(source) & modules.keys() for name, source in modules.items()}

    def reached(name: str) -> set[str]:
        seen, left = set[str](), [name]
        while left:
            new = direct[left.pop()] - seen
            seen |= new
            left += new
        return seen

    beyond = {name: reached(name) for name in modules}
    return sorted(
        {tuple(sorted(n for n in seen if name in beyond[n])) for name, seen in beyond.items()
         if name in seen}
    )  # fmt: skip


def folder_of(module: str) -> str:
    """``LAYER.FOLDER`` of a module below a folder of a layer; "" of a layer's own modules."""
    parts = module.removeprefix(f"{FACE}.").split(".")
    return ".".join(parts[:2]) if len(parts) > 2 else ""


def folder_circles(modules: dict[str, str]) -> list[tuple[str, ...]]:
    """Folders of layers that import each other; imports in functions and for types count.

    Args:
        modules: the source of each module by its dotted name.
    """
    targets = dict[str, set[str]]()
    for name, source in modules.items():
        imported = {folder_of(module) for module in imports(source) & modules.keys()}
        targets.setdefault(folder_of(name), set()).update(imported)
    targets.pop("", None)
    return circles({
        folder: "".join(f"import {other}\n" for other in sorted(others - {folder, ""}))
        for folder, others in targets.items()
    })  # fmt: skip


#: The systems that a job can read from and publish to, a folder each.
CONNECTORS = f"{FACE}.pipelines.connectors."
#: What all of them share; and what is files too: a folder that grows.
SHARED, OF_FILES = {"records"}, {"folder"}


def strange_connectors(name: str, source: str) -> list[str]:
    """Imports of one connector by another."""
    system = name.partition(".")[0]
    allowed = {system, *SHARED}
    allowed |= {"files"} if system in OF_FILES else set()
    systems = {path.name for path in (ROOT / "pipelines/connectors").iterdir() if path.is_dir()}
    connectors = {n.removeprefix(CONNECTORS).split(".")[0] for n in imports(source)
             if n.startswith(CONNECTORS)}  # fmt: skip
    return sorted(connectors & systems - allowed)


def layer_offences(package: str, source: str, path: str = "") -> list[str]:
    """Imports that a package may not have."""
    later = {f"{FACE}.{name}" for name in LAYERS[LAYERS.index(package) + 1 :]}
    banned = FORBIDDEN[package] | {"tests"}
    if path == CLOUD:
        banned = banned - {"google"}
    return sorted(
        name
        for name in imports(source)
        if name.split(".")[0] in banned or name == FACE or ".".join(name.split(".")[:2]) in later
    )


def bare_imports(source: str) -> list[str]:
    """Imports of the folders by their own names, which would load a module a second time."""
    return sorted(name for name in imports(source) if name.split(".")[0] in LAYERS)


def long_functions(source: str) -> list[str]:
    """Functions of more than 60 lines behind their docstring."""
    lengths = [
        (
            node.name,
            (node.end_lineno or 0) - node.body[bool(ast.get_docstring(node)) :][0].lineno + 1,
        )
        for node in nodes(source)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and len(node.body) > bool(ast.get_docstring(node))
    ]
    return [f"{name}: {lines}" for name, lines in lengths if lines > MAX_FUNCTION]


def dropped(source: str) -> list[str]:
    """Statements that ``python -O`` drops: a check of data, of state or of privacy is none."""
    tree = nodes(source)
    return [f"assert in line {node.lineno}" for node in tree if isinstance(node, ast.Assert)]


def undocumented(source: str) -> list[str]:
    """Module, public classes and functions (methods too) without a docstring."""
    tree = parsed(source)
    out = [] if ast.get_docstring(tree) else ["module"]

    def visit(body: list[ast.stmt]) -> None:
        for node in body:
            if not isinstance(node, ast.ClassDef | ast.FunctionDef) or node.name.startswith("_"):
                continue
            overrides = any("override" in ast.unparse(d) for d in node.decorator_list)
            if not overrides and not ast.get_docstring(node):
                out.append(node.name)
            if isinstance(node, ast.ClassDef):
                visit(node.body)

    visit(tree.body)
    return out


#: Calls whose answer differs between processes or runs.
UNSTEADY = {
    "hash",
    "id",
    "time.time",
    "time.time_ns",
    "datetime.now",
    "datetime.utcnow",
    "datetime.today",
    "os.urandom",
    "uuid.uuid4",
    "secrets.token_hex",
    "secrets.token_bytes",
}


def unsteady(source: str) -> list[str]:
    """Randomness, clocks and salted hashes that no key, plan or input determines."""
    out = [f"import {n}" for n in imports(source) if n.split(".")[0] in ("random", "uuid")]
    for node in nodes(source):
        if isinstance(node, ast.Call) and ast.unparse(node.func) in UNSTEADY:
            out.append(ast.unparse(node.func))
        if isinstance(node, ast.Attribute) and ast.unparse(node).startswith("np.random"):
            out.append("np.random")
    return out


def offending(paths: list[Path], check: Callable[[str], list[str]]) -> dict[str, list[str]]:
    """Files with offences, of a check of their text."""
    by_module = {named(path): check(path.read_text()) for path in paths}
    return {name: offences for name, offences in by_module.items() if offences}


def test_import_rule() -> None:
    by_module = {
        named(path): layer_offences(package, path.read_text(), named(path))
        for package in LAYERS
        for path in sources(package)
    }
    assert not {name: offences for name, offences in by_module.items() if offences}


def test_one_name_is_imported() -> None:
    assert offending(EVERYTHING, bare_imports) == {}


def dotted(path: Path) -> str:
    return f"{FACE}.{named(path).removesuffix('.py').removesuffix('/__init__').replace('/', '.')}"


#: The one module that opens files of SQLite and decides their durability.
SQLITE = "state/sqlite/database.py"


def foreign_sqlite(source: str) -> list[str]:
    """SQLite's own library, settings of durability, and connections that cannot roll back."""
    settings = ("journal_mode = WAL", "PRAGMA synchronous", "mode=ro", "immutable=1", "query_only")
    libraries = imports(source) & {"sqlite3", "pysqlite3", "apsw"}
    return [*sorted(libraries), *(word for word in settings if word in source)]


def test_one_module_opens_files_of_sqlite() -> None:
    others = [path for path in sources(*LAYERS) if named(path) not in {SQLITE, READS_OF_OTHERS}]
    assert offending(others, foreign_sqlite) == {}


#: Tables of other programs, whose journal is rolled back by a connection of our own before.
READS_OF_OTHERS = "pipelines/tables/databases.py"


def test_no_module_imports_itself_over_others() -> None:
    assert circles({dotted(path): path.read_text() for path in sources(*LAYERS)}) == []


def test_folders_import_each_other_in_one_direction() -> None:
    modules = {dotted(path): path.read_text() for path in sources(*LAYERS)}
    assert folder_circles(modules) == []
    below = {f"{FACE}.pipelines.a.one": "import dpstream.pipelines.b.two\n"}
    above = {f"{FACE}.pipelines.b.two": "def f():\n    import dpstream.pipelines.a.one\n"}
    assert folder_circles(below | above) == [("pipelines.a", "pipelines.b")]


def test_no_folder_has_too_many_modules() -> None:
    folders = Counter(named(path.parent) for path in sources(*LAYERS) if path.name != "__init__.py")
    assert {name: count for name, count in folders.items() if count > MAX_MODULES} == {}


def test_connectors_do_not_import_each_other() -> None:
    folder = ROOT / "pipelines" / "connectors"
    for path in sources("pipelines/connectors"):
        system = path.relative_to(folder)
        if len(system.parts) > 1:
            name = ".".join(system.with_suffix("").parts)
            assert strange_connectors(name, path.read_text()) == [], name


def test_stages_do_not_import_each_other() -> None:
    for stage in STAGES:
        source = (ROOT / "dp_transforms" / f"{stage}.py").read_text()
        others = {f"{FACE}.dp_transforms.{name}" for name in {*STAGES, "flow", "step"} - {stage}}
        assert not imports(source) & others, stage


def too_long(source: str) -> list[str]:
    """A file of more than 500 lines."""
    lines = len(source.splitlines())
    return [str(lines)] if lines > MAX_LINES else []


def test_sizes() -> None:
    assert offending(EVERYTHING, too_long) == {}
    assert offending(EVERYTHING, long_functions) == {}


#: Words that do not say what a variable holds, or that stand for another word of the glossary.
VAGUE = {
    "asked", "book", "clamp", "desk", "found", "hands", "kept", "known", "purse", "said", "shown",
    "some", "standing", "told", "whole", "wish",
}  # fmt: skip


def vague_names(source: str) -> list[str]:
    """Classes, functions, fields, attributes, variables and parameters with such a name."""
    names = []
    for node in nodes(source):
        if isinstance(node, ast.arg):
            names.append(node.arg)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.append(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            names.append(node.attr)
        elif isinstance(node, ast.ClassDef | ast.FunctionDef):
            names.append(node.name)
    return sorted({name for name in names if name.strip("_").lower() in VAGUE})


def test_names_say_what_they_hold() -> None:
    assert offending(EVERYTHING, vague_names) == {}
    assert [path for path in EVERYTHING if path.stem in VAGUE] == []


def private_imports(source: str) -> list[str]:
    """Names with an underscore that a module takes from another of ours."""
    return [
        alias.name
        for node in nodes(source)
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in (FACE, "tests")
        for alias in node.names
        if alias.name.startswith("_")
    ]


def test_no_private_name_is_imported() -> None:
    assert offending(EVERYTHING, private_imports) == {}


def test_python_drops_no_check() -> None:
    """`accounting.errors.InvariantError` stands where an ``assert`` would."""
    assert offending(PRODUCT, dropped) == {}


def test_docstrings() -> None:
    assert offending(PRODUCT, undocumented) == {}


def nameless(source: str) -> list[str]:
    """A module that does not say what it is."""
    return [] if not source or ast.get_docstring(parsed(source)) else ["module"]


def test_every_module_says_what_it_is() -> None:
    assert offending(EVERYTHING, nameless) == {}


#: The run id is the one draw that no key determines; it is committed before the first noise.
#: A commit's own mark only tells its writer from others, a token which copy of a store goes on;
#: a draft's name and age decide which file is swept.
ALLOWED = {
    # A run's id, and when a charge was made: its entry says so, and a steward's rules go by it.
    "state/ledger/events.py": ["secrets.token_hex", "time.time_ns"],
    "state/spanner/schema.py": ["secrets.token_hex"],
    "state/ledger/lineage.py": ["secrets.token_hex"],
    "state/ledger/spanner.py": ["secrets.token_hex"],
    # A draft's name and its age where it cannot be locked; never what is in it.
    "state/durable.py": ["secrets.token_hex"],
    "state/locks.py": ["time.time", "secrets.token_hex"],
    # Which hand-over a ticket is of, so that it stands for no other's batch; never what is in it.
    "dp_transforms/batches.py": ["secrets.token_bytes"],
    # When a trigger time is announced; never what is in it.
}


def test_nothing_unsteady_in_the_flow() -> None:
    assert offending(list(sources("accounting", "state", "dp_transforms")), unsteady) == ALLOWED


#: What charges an account, and what commits an answer to it.
SEQUENCE = ("begin", "commit", "charge_within", "append", "answer", "enter", "promise")
#: Of the account itself, of questions, and of streams.
OWNERS = ("state/ledger/", "pipelines/ask/", "pipelines/stream/")


def account_calls(source: str) -> list[str]:
    """Calls of an account's register, or of a ledger, that charge or commit."""
    if "dpstream.state.ledger" not in source:
        return []
    names = {"register", "ledger", "tokens", "opened", "book", "_register", "_ledger"}
    calls = []
    for node in nodes(source):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            owner = ast.unparse(node.func.value).rpartition(".")[2]
            if node.func.attr in SEQUENCE and owner in names:
                calls.append(f"{owner}.{node.func.attr}")
    return calls


def test_one_sequence_charges_and_commits() -> None:
    """Questions are charged by `pipelines.ask`, streams by `pipelines.stream`: nobody else."""
    offenders = offending(list(sources("pipelines", "dp_transforms")), account_calls)
    assert {name for name in offenders if not name.startswith(OWNERS)} == set()
    assert "pipelines/ask/sequence.py" in offenders and "pipelines/stream/begin.py" in offenders


#: A label and its text, as the lines of plans, accounts and answers begin.
LABELLED = re.compile(r"[A-Z][A-Za-z ]{2,11} {2,}\S")


def labelled_lines(source: str) -> list[str]:
    """Texts that lay out a label themselves, instead of by `pipelines.render.layout`."""
    return [
        node.value
        for node in nodes(source)
        if isinstance(node, ast.Constant)
        and isinstance(node.value, str)
        and LABELLED.match(f"{node.value}.")
    ]


def test_one_folder_lays_out_text() -> None:
    """So a plan, an account or an answer has one look; tables have heads of their own."""
    others = [path for path in sources(*LAYERS) if "/render/" not in named(path)]
    assert offending(others, labelled_lines) == {}


def test_every_folder_is_a_package_that_the_build_finds() -> None:
    setup = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    assert setup["packages"] == {"find": {"include": [FACE, f"{FACE}.*"]}}
    folders = {named(path.parent) for path in sources(*LAYERS)}
    assert all((ROOT / name / "__init__.py").exists() for name in folders)
    packages = {f"{FACE}.{name}".replace("/", ".") for name in folders} | {FACE}
    assert packages == set(find_packages(str(ROOT), include=[FACE, f"{FACE}.*"]))


def test_the_layers_are_links_below_the_name() -> None:
    for name in LAYERS:
        link = ROOT / FACE / name
        assert link.is_symlink() and link.readlink() == Path("..", name)


def strangers(names: Iterable[str]) -> list[str]:
    """Names of tests that are not in their file, or in none where a class may inherit them."""
    written = {named(path): path.read_text() for path in sources("tests")}
    every = "".join(written.values())
    places = ((name, *name.partition("[")[0].split("::")) for name in names)
    return [
        name
        for name, path, *classes, function in places
        if f"def {function}("
        not in (every if classes and path in written else written.get(path, ""))
    ]


@pytest.mark.parametrize("path", [SLOW, EXTENDED], ids=["slow", "extended"])
def test_the_lists_name_tests(path: Path) -> None:
    assert strangers(read_list(path)) == []
    assert strangers(["tests/test_structure.py::test_nothing_at_all"]) != []


def test_golden_refusals_are_those_of_tests() -> None:
    files = [path for path in (ROOT / "tests").rglob("refusals/test_*.txt")]
    names = [
        f"{named(path.parents[1] / path.stem)}.py::{name}"
        for path in files
        for name in re.findall(r"^== (.*)$", path.read_text(), re.M)
    ]
    assert len(files) > 20 and strangers(names) == []


BAD: list[tuple[Callable[[str], list[Any]], str]] = [
    (lambda s: layer_offences("accounting", s), "def f():\n    import apache_beam as beam\n"),
    (lambda s: layer_offences("accounting", s), "from dpstream.state.store import Store\n"),
    (lambda s: layer_offences("accounting", s), "import sqlite3\n"),
    (foreign_sqlite, "import sqlite3\n"),
    (foreign_sqlite, "PLACE = 'file:ledger.db?mode=ro'\n"),
    (lambda s: layer_offences("state", s), "from apache_beam import DoFn\n"),
    (lambda s: layer_offences("state", s), "import dpstream.dp_transforms.flow\n"),
    (lambda s: layer_offences("dp_transforms", s), "from dpstream.pipelines import job\n"),
    (lambda s: layer_offences("dp_transforms", s), "import google.auth\n"),
    (lambda s: layer_offences("dp_transforms", s, CLOUD), "import sqlite3\n"),
    (lambda s: layer_offences("pipelines", s), "from tests.streams import STEP\n"),
    (lambda s: layer_offences("state", s), "from dpstream import DPStream\n"),
    (lambda s: strange_connectors("kafka.sink", s), f"from {CONNECTORS}pubsub.sink import X\n"),
    (lambda s: strange_connectors("kafka.source", s), f"import {CONNECTORS}files.source\n"),
    (lambda s: strange_connectors("records.rows", s), f"import {CONNECTORS}files.small\n"),
    (lambda s: strange_connectors("replay.source", s), f"from {CONNECTORS}kafka import x\n"),
    (lambda s: circles({"a": s, "b": "def f():\n    import c\n", "c": "import a\n"}), "import b"),
    (bare_imports, "from state.store import Store\n"),
    (bare_imports, "def f():\n    import accounting.plan.plan\n"),
    (too_long, "x = 1\n" * 601),
    (nameless, "x = 1\n"),
    (long_functions, "def f():\n" + "    x = 1\n" * 61),
    (dropped, "assert x\n"),
    (labelled_lines, "x = f'Read        {rows} rows'\n"),
    (private_imports, "def f():\n    from dpstream.state.store import _rows\n"),
    (vague_names, "found = 1\n"),
    (vague_names, "def f(whole):\n    pass\n"),
    (vague_names, "class A:\n    kept: int\n"),
    (vague_names, "class _Known:\n    pass\n"),
    (vague_names, "def _told():\n    pass\n"),
    (vague_names, "self._asked = 1\n"),
    (undocumented, "x = 1\n"),
    (undocumented, '"""M."""\ndef f():\n    return 1\n'),
    (undocumented, '"""M."""\nclass A:\n    """A."""\n    def f(self):\n        return 1\n'),
    (unsteady, "from random import choice\n"),
    (unsteady, "import time\nnow = time.time()\n"),
    (unsteady, "shard = hash(key) % 4\n"),
    (unsteady, "x = np.random.default_rng()\n"),
]


def test_a_circle_of_types_is_none() -> None:
    typed = "if TYPE_CHECKING:\n    import a\n"
    assert circles({"a": "import b\n", "b": typed}) == []
    assert circles({"a": "import b\n", "b": "import a\n"}) == [("a", "b")]


@pytest.mark.parametrize(("check", "source"), BAD)
def test_every_check_can_fail(check: Callable[[str], list[str]], source: str) -> None:
    assert check(source)


#: The helpers that skip: they fail where CI=true, or say why a machine of CI may do without.
SKIPPING = {
    "tests/browser.py", "tests/emulator.py", "tests/kafka_broker.py", "tests/pubsub_emulator.py",
    "tests/runners/engines.py", "tests/runners/prism.py", "tests/faults/conftest.py",
    "tests/state/ledger/test_head.py",
}  # fmt: skip


def test_no_test_is_skipped_silently() -> None:
    """`.ci/run` says that it is CI, and nothing else decides to skip."""
    lines = (ROOT / ".ci" / "run").read_text().splitlines()
    [export_line] = [n for n, line in enumerate(lines) if line.startswith("export CI=true")]
    assert export_line < min(n for n, line in enumerate(lines) if line.startswith("make "))
    silent = re.compile(r"pytest\.(?:skip|importorskip|xfail)\(|mark\.(?:skip|xfail)")
    skipping_files = {named(path) for path in sources("tests") if silent.search(path.read_text())}
    assert skipping_files == SKIPPING

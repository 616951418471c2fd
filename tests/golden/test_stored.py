"""The form of everything that is stored and read back: structs, and tables of SQLite files.

A change of `stored.txt` is a change of a file format: the version of that format changes with it.
Found by reading the source: every type that JSON is decoded into, outside of what only passes
between workers.  ``REWRITE=1`` writes the file anew.
"""

import ast
import importlib
import os
import sqlite3
import types
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from dpstream.accounting.plan.plan import Plan
from dpstream.pipelines.connectors.sink import SealMessage
from dpstream.state import open as stores
from tests import accounts
from tests.golden.pinned import check, of_cases
from tests.golden.questions import KINDS, processor
from tests.runners.engines import without
from tests.streams import begin, make_plan
from tests.test_structure import LAYERS, dotted, parsed, sources

STORED = Path(__file__).with_name("stored.txt")
#: Elements of pipelines, and text of others: nothing that is read back later.
PASSING = {"pipelines/sql/flow.py", "pipelines/tabulation/flow.py", 
           "pipelines/session/records/flow.py",
           "pipelines/drafting/ask.py"}  # fmt: skip
#: Written by this program, and read back by another, or as text.
WRITTEN = (Plan, SealMessage)


def decoded(source: str) -> Iterator[tuple[str | None, str]]:
    """(class around it, expression) of the type of every ``msgspec.json.decode(.., type=..)``, and
    of the header of every receipt (``header_of(.., type)``)."""
    classes = [node for node in ast.walk(parsed(source)) if isinstance(node, ast.ClassDef)]
    for node in ast.walk(parsed(source)):
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "msgspec.json.decode":
            inside = [c.name for c in classes if node in ast.walk(c)]
            for keyword in node.keywords:
                if keyword.arg == "type":
                    yield inside[-1] if inside else None, ast.unparse(keyword.value)
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("header_of"):
            yield from ((None, ast.unparse(kind)) for kind in node.args[1:2])
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "msgspec.json.Decoder":
            yield from ((None, ast.unparse(kind)) for kind in node.args[:1])


def stored_types() -> dict[str, Any]:
    """Every struct that is stored, by its dotted name."""
    out: dict[str, Any] = {f"{of.__module__}.{of.__qualname__}": of for of in WRITTEN}
    for path in sources(*LAYERS):
        if str(path).endswith(tuple(PASSING)):
            continue
        for around, text in decoded(path.read_text()):
            module = importlib.import_module(dotted(path))
            if text == "kind":  # the caller's: a message's struct
                continue
            of = eval(around if text == "cls" and around else text, dict(vars(module)))
            for struct in structs_in(of):
                out[f"{struct.__module__}.{struct.__qualname__}"] = struct
    return out


def structs_in(of: Any) -> list[Any]:
    """Structs that a type names."""
    if isinstance(of, type) and issubclass(of, msgspec.Struct):
        return [of]
    return [struct for argument in typing.get_args(of) for struct in structs_in(argument)]


def worded(of: Any) -> str:
    """A type without the names of this program's own classes."""
    if is_record(of):
        return "record"
    if typing.get_origin(of) is typing.Annotated:  # bounds are no form
        return worded(typing.get_args(of)[0])
    arguments = typing.get_args(of)
    if isinstance(of, types.UnionType) or typing.get_origin(of) is typing.Union:
        return " | ".join(sorted(map(worded, arguments)))
    if typing.get_origin(of) is typing.Literal:
        return f"one of {', '.join(map(repr, arguments))}"
    if of is Ellipsis:
        return "..."
    origin = typing.get_origin(of) or of
    name = getattr(origin, "__name__", str(origin))
    return f"{name}[{', '.join(map(worded, arguments))}]" if arguments else name


def is_record(of: Any) -> bool:
    """A struct, or a tuple of named fields."""
    return isinstance(of, type) and (issubclass(of, msgspec.Struct) or hasattr(of, "_fields"))


def records_in(of: Any) -> list[Any]:
    """Records that a type is made of."""
    return [of] if is_record(of) else [r for a in typing.get_args(of) for r in records_in(a)]


def fields_of(of: Any) -> Iterator[tuple[str, Any, str]]:
    """(stored name, type, default) of each field in its order."""
    if issubclass(of, msgspec.Struct):
        for field in msgspec.structs.fields(of):
            made = field.default_factory is not msgspec.NODEFAULT
            default = field.default_factory() if made else field.default
            yield field.encode_name, field.type, "" if field.required else f" = {default!r}"
    else:
        hints = typing.get_type_hints(of)
        for name in of._fields:
            default = of._field_defaults
            yield name, hints[name], f" = {default[name]!r}" if name in default else ""


def lines_of(of: Any, indent: str = "  ") -> Iterator[str]:
    """A record's fields, and below each those of the records it is made of."""
    for name, kind, default in fields_of(of):
        yield f"{indent}{name}: {worded(kind)}{default}"
        for inner in records_in(kind):
            yield from lines_of(inner, indent + "    ")


def described(name: str, of: Any) -> str:
    """A struct with its options and fields."""
    config = of.__struct_config__
    options = ("tag", "array_like", "forbid_unknown_fields", "omit_defaults")
    settings = [
        f"{option}={getattr(config, option)}" for option in options if getattr(config, option)
    ]
    return "\n".join([f"{name} {' '.join(settings)}".rstrip(), *lines_of(of)]) + "\n"


def tables_of(path: Path) -> str:
    """Tables, indices and meta names of a SQLite file."""
    db = sqlite3.connect(path)
    made = db.execute("SELECT sql FROM sqlite_master WHERE sql IS NOT NULL ORDER BY name")
    version = db.execute("PRAGMA user_version").fetchone()[0]
    text = "".join(f"  {' '.join(sql.split())}\n" for (sql,) in made)
    db.close()
    return f"  user_version {version}\n{text}"


def test_stored_forms_are_as_recorded(tmp_path: Path) -> None:
    accounts.create(tmp_path / "ledger.db", "people")
    begin(make_plan(), str(tmp_path / "store.db"))
    stores.close_all()
    parts = [described(name, of) for name, of in sorted(stored_types().items())]
    parts.append(f"ledger in SQLite\n{tables_of(tmp_path / 'ledger.db')}")
    parts.append(f"store in SQLite\n{tables_of(tmp_path / 'store.db')}")
    check(STORED, "\n".join(parts))


def test_a_renamed_field_is_another_form() -> None:
    class Old(msgspec.Struct):
        run_id: str

    class New(msgspec.Struct):
        run: str

    class Same(msgspec.Struct):
        run: str = msgspec.field(name="run_id")

    assert described("x", Old) == described("x", Same) != described("x", New)


# Every kind of question releases the bytes that it released before, here and on a runner.


ANSWERS = Path(__file__).with_name("answers")


@pytest.mark.parametrize("name", KINDS)
def test_in_this_process(name: str, tmp_path: Path) -> None:
    kind, path = KINDS[name], ANSWERS / f"{name}.txt"
    head = f"Written on a processor of digest {processor()}\n\n" if kind.solved else ""
    if head and not os.environ.get("REWRITE") and not path.read_text().startswith(head):
        without(f"The processor that wrote {path.name} is missing: other last bits of figures")
    check(path, head + of_cases(kind.ask(tmp_path, ())))


@pytest.mark.parametrize("name", [name for name, kind in KINDS.items() if kind.runners])
def test_on_the_direct_runner(name: str, tmp_path: Path) -> None:
    cases = KINDS[name].ask(tmp_path, ("--runner", "DirectRunner"))
    assert of_cases(cases) == (ANSWERS / f"{name}.txt").read_text()

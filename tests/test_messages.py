"""What messages of the source name: sections and fields of the project file, and commands.

A message is every text of the source but docstrings; what an f-string inserts is X.
"""

import ast
import functools
import re
import shlex
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import click
import pytest
import tomlkit

from dpstream.accounting.errors import UsageError
from dpstream.pipelines.cli.main import cli
from dpstream.pipelines.project.project import decode_project
from dpstream.state.ledger.open import PROJECT_FILE
from tests.projects import PROJECT

ROOT = Path(__file__).parents[1]
FOLDERS = ("accounting", "dp_transforms", "dpstream", "pipelines", "state")
_SECTION = re.compile(r"(?<![\w)\]])\[\[?([a-z_]+(?:\.\w+)*)\]\]?(?![\w*+?{(])")
_QUOTED = re.compile(r"`\[?([a-z_]+(?:\.\w+)+)\]?`")
_ASSIGNED = re.compile(r"(?<![\w.\"/}])([a-z_]+(?:\.\w+)+) ?=(?!=)")
#: A file with a section of each kind, and what messages call them.
FILE = PROJECT.replace(
    "version = 1\n",
    "version = 1\n"
    'workload.ages = { file = "ages.json", job = "daily" }\n'
    'census.persons = { parameters = "parameters", data = "data" }\n'
    "env.production.job.daily.threads = 2\n",
)
NAMES = {"data_set": "shop", "table": "visits", "job": "daily", "workload": "ages",
         "census": "persons", "env": "production"}  # fmt: skip
#: Where a field stands that is written without its section.
PARTS = ("job.daily", "table.visits", "data_set.shop")
#: Names with points, and words in brackets, of other languages: extras of pip, Kafka, git, SQL.
FOREIGN = {
    *("local", "auto", "cleanup.policy", "message.timestamp.type", "min.insync.replicas"),
    *("core.fsmonitor", "private.g", "stream.column", "a.unit", "a.attnum", "a.attrelid"),
    *("b.oid", "t.oid", "t.typtype", "i.indrelid", "it_.p", "a.X"),
}


class Message(NamedTuple):
    place: str
    text: str


def messages() -> Iterator[Message]:
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).rglob("*.py")):
            if path.relative_to(ROOT).parts[:2] in {("dpstream", one) for one in FOLDERS}:
                continue  # links
            for line, text in texts(ast.parse(path.read_text())):
                yield Message(f"{path.relative_to(ROOT)}:{line}", text)


def texts(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Line and text of each constant and f-string, but docstrings."""
    inside = set[int]()
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if isinstance(body, list) and body and isinstance(body[0], ast.Expr):
            inside.add(id(body[0].value))
        if isinstance(node, ast.JoinedStr):
            inside.update(map(id, node.values))
            parts = (getattr(value, "value", None) for value in node.values)
            yield node.lineno, "".join(p if isinstance(p, str) else "X" for p in parts)
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Constant)
            and isinstance(node.value, str)
            and id(node) not in inside
        ):
            yield node.lineno, node.value


MESSAGES = tuple(messages())


@functools.cache
def refused(path: str, is_section: bool) -> bool:
    """Whether a project file in which something stands at a path has an unknown key."""
    tables: Any = tomllib.loads(FILE)
    *outer, last = path.split(".")
    place = tables
    for name in outer:
        place = place.setdefault(name, {})
        if not isinstance(place, dict):
            return True
    place.setdefault(last, {} if is_section else 0)
    try:
        decode_project(tomlkit.dumps(tables).encode(), ROOT / PROJECT_FILE).job("daily")
    except UsageError as error:
        return error.rule == "is not a known key"
    return False


def is_known(path: str, is_section: bool) -> bool:
    """Whether the file has such a section or field, in full or in a job, a table or a data set."""
    kind, *names = path.partition(".X.")[0].removesuffix(".X").split(".")
    if kind not in NAMES:
        return not all(refused(f"{part}.{path}", is_section) for part in PARTS)
    own = NAMES[kind]
    if names[:1] in (["NAME"], [own]) or (is_section and len(names) == 1):
        names = names[1:]
    return not refused(".".join((kind, own, *names)), is_section)


def unknown_names(text: str) -> list[str]:
    """Sections and fields of a text that no project file has."""
    sections = [path for path in _SECTION.findall(text) if path not in FOREIGN]
    fields = [*_QUOTED.findall(text), *_ASSIGNED.findall(text)]
    return [
        *(path for path in sections if path.split(".")[0] not in NAMES or not is_known(path, True)),
        *(path for path in fields if path not in FOREIGN and not is_known(path, False)),
    ]


def test_sections_and_fields_are_those_of_the_project_file() -> None:
    wrong = {m.place: names for m in MESSAGES if (names := unknown_names(m.text))}
    assert not wrong
    named = [path for m in MESSAGES for path in _SECTION.findall(m.text)]
    assigned = [path for m in MESSAGES for path in _ASSIGNED.findall(m.text)]
    assert len(named) > 20 and len(assigned) > 10


@pytest.mark.parametrize(
    "text",
    ["leave it out; [performance] threads uses more cores", "add [[aggregate]] tables",
     "join [[source.query.look_up]]", "`table.recordid` is required", "set mechanism.skips = true",
     "add [job.NAME.choise]", "keep one [[aggregate]] of kind 'count'"],
)  # fmt: skip
def test_a_name_that_no_file_has_is_seen(text: str) -> None:
    assert unknown_names(text)


@pytest.mark.parametrize(
    "text", ["`table.record_id`", "[job.NAME.choice]", "budget.delta = 0", "[env.X]", "column[0]"]
)
def test_a_name_that_a_file_has_is_known(text: str) -> None:
    assert not unknown_names(text)


#: Words that a command line shows in the place of a number or a size.
_NUMBERS = {"E": "1", "D": "1e-6", "EPSILON": "1", "DELTA": "1e-6", "N": "1"}


def fault_of(line: str) -> str:
    """What click says to a command line; a mention of a command may lack its arguments."""
    words = [_NUMBERS.get(word, word) for word in shlex.split(line)[1:]]
    called: click.Command = cli
    while isinstance(called, click.Group) and words:
        if words[0] not in called.commands:
            return f"no command {words[0]}"
        called, words = called.commands[words[0]], words[1:]
    try:
        if words:
            called.make_context("dpstream", words, help_option_names=["-h", "--help"])
    except click.MissingParameter:
        return ""
    except click.UsageError as error:
        return "" if "requires an argument" in error.format_message() else error.format_message()
    return ""


def test_commands_parse() -> None:
    lines = {
        (m.place, line) for m in MESSAGES for line in re.findall(r"`(dpstream [^`]*)`", m.text)
    }
    assert not {place: fault for place, line in sorted(lines) if (fault := fault_of(line))}
    assert len(lines) > 60


@pytest.mark.parametrize(
    "line", ["dpstream plam", "dpstream plan --tri x", "dpstream plan a b c", "dpstream state x"]
)
def test_a_command_that_is_wrong_is_seen(line: str) -> None:
    assert fault_of(line)

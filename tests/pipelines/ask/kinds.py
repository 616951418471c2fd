"""One small world for each kind of question, asked by its real command, and changes of its rows.

Add an entry here for a new kind: `test_question` holds it to everything that a kind must keep.
``python -m tests.pipelines.ask.kinds NAME OPTIONS`` asks in the current folder, as a process of
its own.

A world is that of `tests.faults.filecalls.commands`; what is compared is all that a command leaves
and says, but for its own private inputs.
"""

import contextlib
import io
import os
import re
import shlex
import shutil
import sqlite3
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import click.testing
import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq

import dpstream
from dpstream.accounting.errors import DpstreamError
from dpstream.pipelines.cli.main import cli
from dpstream.state.ledger.events import Received, text_of
from tests import accounts
from tests.faults.filecalls.commands import COMMANDS, Command

#: What rows there are: those of the world, without one unit's, none, not even a file, or a pipe,
#: which nobody may open.
ROWS = ("same", "neighbour", "empty", "missing", "pipe")
#: Those that are no table.
NO_ROWS = ("missing", "pipe")

ACCOUNT = Path("account/ledger.db")


class Outcome(NamedTuple):
    """How a command ended."""

    code: int
    stdout: str
    stderr: str


class Kind(NamedTuple):
    """A kind of question in its world.

    Attributes:
        command: of the world; ask: asks its question in the current folder, with more options.
        change: makes the rows those of a name of ``ROWS``.
        private: names of files and folders that hold rows.
        plant: adds private rows that hold a text.
        lost: output that is removed before the question is asked again: files, folders, a section
            at the end of the project file.
        large: options with which the account allows one charge and not two, once its limit is
            ``limit``; no limit: a fifth above what one charge costs.
        in_memory: a function on a table: rows cannot be missing, and what nobody foresaw is raised
            as it is.
        selects: whether noise decides how many rows the answer has.
        no_runner: why no runner's workers read its rows; empty: it takes ``--runner``.
    """

    command: Command
    ask: Callable[..., Outcome]
    change: Callable[[str], None]
    private: tuple[str, ...]
    plant: Callable[[str], None]
    lost: tuple[str, ...] = ()
    large: tuple[str, ...] = ()
    limit: tuple[float, float] | None = None
    in_memory: bool = False
    selects: bool = False
    no_runner: str = ""


@contextlib.contextmanager
def within(folder: Path) -> Iterator[None]:
    """The current folder, for a while."""
    with contextlib.chdir(folder):
        yield


def typed(*words: str) -> Outcome:
    """A command of the program, in this process."""
    done = click.testing.CliRunner().invoke(cli, list(words), prog_name="dpstream")
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    return Outcome(done.exit_code, done.stdout, done.stderr)


def fix_of(outcome: Outcome) -> list[str]:
    """The command that the refusal of an older account says to type, without its first word."""
    command = re.search(r"`(dpstream account recover [^`]+)`", outcome.stderr)
    assert outcome.code == 3 and command is not None, outcome
    return shlex.split(command[1])[1:]


def world(kind: Kind, folder: Path) -> None:
    """The files of a kind's world, in a new folder."""
    folder.mkdir()
    kind.command.world(folder)
    for path in folder.glob("*.toml"):  # so that several questions fit into the limit
        path.write_text(path.read_text().replace("epsilon = 15.0", "epsilon = 9.0"))
    with within(folder):
        for words in kind.command.before:
            if callable(words):
                words(Path())
                continue
            outcome = typed(*words)
            assert outcome.code == 0, outcome.stderr


def emptied(kind: Kind) -> None:
    """Remove the output, as somebody does who wants it again."""
    for name in kind.lost:
        if name.startswith("["):
            file = Path("dpstream.toml")
            file.write_text(file.read_text().partition(f"\n{name}\n")[0])
            continue
        for path in [Path(name), *Path(name).rglob("*")][::-1]:
            path.rmdir() if path.is_dir() else path.unlink(missing_ok=True)


def account_of(path: Path) -> list[str]:
    """All that an account's file holds."""
    with contextlib.closing(sqlite3.connect(path)) as db:
        return list(db.iterdump())


def left(folder: Path, private: tuple[str, ...]) -> dict[str, bytes | list[str]]:
    """All files below a folder but the private inputs; of the account what it holds."""
    out: dict[str, bytes | list[str]] = {}
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if path.is_file() and not name.startswith(private):
            is_account = name == ACCOUNT.as_posix()
            out[name] = account_of(path) if is_account else path.read_bytes()
    return out


def lines_of(name: str, unit: Callable[[str], bool]) -> Callable[[str], None]:
    """Changes a text file whose lines are rows, the first a header."""

    def change(rows: str) -> None:
        path, original = Path(name), Path(f"{name}.whole")
        if not original.exists():
            shutil.copyfile(path, original)
        if rows in NO_ROWS:
            path.unlink(missing_ok=True)
            if rows == "pipe":
                os.mkfifo(path)
            return
        head, *lines = original.read_text().splitlines(keepends=True)
        body = {"same": lines, "empty": [], "neighbour": [x for x in lines if not unit(x)]}[rows]
        path.write_text("".join([head, *body]))

    return change


def _appended(name: str, *lines: str) -> Callable[[str], None]:
    """Adds lines with a text to a file."""

    def plant(text: str) -> None:
        with open(name, "a") as file:
            file.writelines(line.format(text) + "\n" for line in lines)

    return plant


def _session(rows: str) -> None:
    """Records of a session's table are deleted: one, the others, or the folder."""
    if rows in NO_ROWS:
        shutil.rmtree("small.table", ignore_errors=True)
        if rows == "pipe":
            os.mkfifo("small.table")
    elif rows != "same":
        numbers = {7} if rows == "neighbour" else set(range(30)) - {7}
        Path("more.csv").write_text("name\n" + "".join(f"r{n}\n" for n in sorted(numbers)))
        outcome = typed("table", "change", "small", "more.csv", "--delete")
        assert outcome.code == 0, outcome.stderr


def _session_record(name: str) -> None:
    """A record of a name is added to a session's table."""
    Path("more.csv").write_text(f"name,a,epsilon\n{name},1,2\n")
    outcome = typed("table", "change", "small", "more.csv")
    assert outcome.code == 0, outcome.stderr


def _by_command(name: str, *more: str) -> Callable[..., Outcome]:
    def ask(*options: str) -> Outcome:
        return typed(*COMMANDS[name].words, *more, *options)

    return ask


def _points(*options: str) -> Outcome:
    """A count of points; ``large`` is a charge of five times as much."""
    program, text = COMMANDS["points"].words[:2]
    if "large" in options:
        text = text.replace("0.25", "1.25")
    return typed(program, text, "--json", *(option for option in options if option != "large"))


def _census(command: str, unit: str, line: str) -> Kind:
    """Tables of one program; the record of a line is left out."""
    name = f"data/{unit}-records.txt"
    change, plant = lines_of(name, lambda row: row.startswith(line)), _appended(name, "{0}|{0}")
    private = ("data/", "dead_letter")
    return Kind(
        COMMANDS[command], _by_command(command), change, private, plant, ("out",), selects=True
    )  # fmt: skip


def _frame(*options: str) -> Outcome:
    """A DataFrame function, with the options of the commands."""
    return _of_table(dpstream.count, options, max_keys=4, max_rows=5)


def _keys(*options: str) -> Outcome:
    """Keys without figures."""
    return _of_table(dpstream.keys, options, max_keys=4)


def _keys_in_sql(*options: str) -> Outcome:
    """The same by a statement."""
    privacy = "OPTIONS(epsilon = 5, delta = 1e-6, max_groups_contributed = 4)"
    text = f"SELECT WITH DIFFERENTIAL_PRIVACY {privacy} page FROM visits GROUP BY page"
    return typed("sql", text, *options)


def _of_table(function: Callable[..., Any], options: tuple[str, ...], **bounds: int) -> Outcome:
    account: Any = dpstream.account(
        "account/ledger.db", "d", id=accounts.ID, secret="file:noise.secret"
    )
    types = {"user": pa.int64(), "page": pa.string(), "time": pa.string()}
    table = pa.csv.read_csv("in.csv", convert_options=pa.csv.ConvertOptions(column_types=types))
    how: dict[str, Any] = {"fresh": "--fresh" in options, **bounds}
    how |= {"as_of": options[options.index("--as-of") + 1]} if "--as-of" in options else {}
    try:
        answer = function(
            table, unit="user", key="page", epsilon=5.0, account=account,
            **how,
        )  # fmt: skip
    except DpstreamError as error:
        return Outcome(error.exit_code, "", str(error))
    return Outcome(0, f"{answer.guarantee}\n{answer.table.to_pylist()}", "")


def _of_user_7(line: str) -> bool:
    return line.startswith("7,")


USERS = lines_of("in.csv", _of_user_7)
VISITS = ("in.csv", "in.csv.whole")
RARE = _appended("in.csv", "999,{0},2024-01-01T01:00:00Z", "998,{0},{0}")
CALLER = "a table in memory is the caller's: it is read in the caller's process"
LAUNCHER = "its mechanism draws for all cells at once, in the process that asks"
KINDS = {
    "frame": Kind(
        COMMANDS["sql"], _frame, USERS, VISITS, RARE, in_memory=True, selects=True,
        no_runner=CALLER,
    ),
    "keys": Kind(
        COMMANDS["sql"], _keys, USERS, VISITS, RARE, in_memory=True, selects=True, no_runner=CALLER
    ),
    "keys in SQL": Kind(COMMANDS["sql"], _keys_in_sql, USERS, VISITS, RARE, selects=True),
    "sql": Kind(COMMANDS["sql"], _by_command("sql"), USERS, VISITS, RARE, selects=True),
    "tuning": Kind(
        COMMANDS["choose"], _by_command("choose"), USERS, VISITS, RARE, ("[job.chosen]",),
        limit=(13.0, 0.02), no_runner="it reads the first hours alone, in the process that asks",
    ),
    "workload pure": Kind(
        COMMANDS["workload answer --mechanism=geometric"],
        _by_command("workload answer --mechanism=geometric"),
        USERS, VISITS, RARE, ("answers",), no_runner=LAUNCHER,
    ),
    "workload tables": Kind(
        COMMANDS["workload answer --tables"], _by_command("workload answer --tables"),
        USERS, VISITS, RARE, ("answers",), no_runner=LAUNCHER,
    ),
    "session": Kind(
        COMMANDS["points"], _points, _session,
        ("small.csv", "more.csv", "small.table"), _session_record, large=("large",),
    ),
    "census persons": _census("census execute", "person", "023|"),
    "census households": _census("census execute, households", "household", "72|"),
}  # fmt: skip
#: A run of a stream is not asked once: its store fixes its input.
STREAM = Kind(
    COMMANDS["run"], _by_command("run"), USERS, (*VISITS, "state"), RARE, ("out",), selects=True
)
ALL = KINDS | {"stream": STREAM}

if __name__ == "__main__":
    command_outcome = KINDS[sys.argv[1]].ask(*sys.argv[2:])
    print(command_outcome.stdout, end="")
    print(command_outcome.stderr, end="", file=sys.stderr)
    sys.exit(command_outcome.code)


#: Keyed by rows that they may not name: digests of released bytes, and of all that has those.
_DIGEST = re.compile(r"\b[0-9a-f]{16}([0-9a-f]{16})?\b")


def public_part(kind: Kind, outcome: Outcome) -> dict[str, object]:
    """Of the current folder, and of what a command said."""
    files = left(Path(), kind.private)
    return {
        "exit code": outcome.code,
        "stdout": shape(outcome.stdout),
        "stderr": outcome.stderr,
        "account": account(kind.selects),
        **{
            _DIGEST.sub("digest", name): _of_file(name, data, kind.selects)
            for name, data in files.items()
            if isinstance(data, bytes)
        },
    }


def shape(text: str) -> str:
    """A text without its figures and digests."""
    return re.sub(r"-?\d+(\.\d+)?(e[+-]?\d+)?", "#", _DIGEST.sub("digest", text))


def _of_file(name: str, data: bytes, selects: bool) -> object:
    if name.endswith(".parquet"):
        file = pq.ParquetFile(io.BytesIO(data))
        return str(file.schema_arrow), None if selects else file.metadata.num_rows
    if name.endswith(".npz"):
        with np.load(io.BytesIO(data)) as arrays:
            return {name: (arrays[name].shape, arrays[name].dtype) for name in arrays.files}
    if name.endswith(".head"):
        return len(data)
    text = data.decode()
    if name.endswith((".csv", ".jsonl")):
        head, *rows = text.splitlines() or [""]
        return shape(head), None if selects else len(rows)
    return shape(text)


def account(selects: bool) -> list[object]:
    """All that the account holds: of charges and requests every byte."""
    out = list[object]()
    with contextlib.closing(accounts.opened(ACCOUNT)) as ledger:
        out.append(len(ledger.storage.rows(0)))
        for entry in ledger.history().entries:
            text = re.sub(r'"at":\d+', "", text_of(entry.event))  # the time
            out.append(shape(text) if isinstance(entry.event, Received) else text)
        for charge in ledger.entries():
            out.append(len(ledger.tokens(charge.run_id)))  # they are random
            stored = ledger.request_of(charge.run_id) or ()
            answer = [part for part in stored[2:3] if isinstance(part, bytes)]
            out.append((stored[:2], *(_of_answer(part, selects) for part in answer)))
    return out


def _of_answer(data: bytes, selects: bool) -> object:
    """The header of a receipt and its table's columns; of a view there is a table alone."""
    end = data.find(b"\0") if data.startswith(b"{") else -1
    header = data if data.startswith(b"{") and end < 0 else data[: max(end, 0)]
    if data is header:
        return shape(header.decode())
    table = pa.ipc.open_stream(data[end + 1 :]).read_all()
    return shape(header.decode()), str(table.schema), None if selects else table.num_rows

"""Commands that write, each with a small world of files, and what of it must not depend on faults.

A world is made by plain files and earlier commands.  After a fault the same command is typed again:
its released files and figures are those of an undisturbed run, and the account has one charge.
"""

import contextlib
import json
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow.parquet as pq
from pyarrow import csv

from dpstream.pipelines.tabulation.generate import Size, generate
from dpstream.state.ledger.events import Created
from dpstream.state.ledger.open import open_path
from dpstream.state.sqlite.database import sqlite3
from tests import accounts
from tests.faults.filecalls.server import FUNCTIONS, Ended, Server

KEY = "3f7a91c4d2e85b60718293a4b5c6d7e8f90a1b2c3d4e5f60718293a4b5c6d7e8"
STREAM = f"""
version = 1

[data_set.d]
unit = {{ name = "user", type = "int" }}
account = {{ path = "account/ledger.db", limit = {{ epsilon = 90.0, delta = 0.02 }} }}
insecure_test_secret = "{KEY}"

[table.visits]
path = "in.csv"
unit_column = "user"
time_column = "time"

[job.daily]
table = "visits"
key = ["page"]
aggregate.n = {{ kind = "count" }}
start = "2024-01-01T00:00:00Z"
end = "2024-01-03T00:00:00Z"
window = "1d"
release_every = "12h"
budget = {{ epsilon = 15.0, delta = 1e-3, covers = "lifetime" }}
contributions = 6
store = "state/s.db"
shards = 1
sink = {{ kind = "csv", path = "out" }}
"""
PROJECT = """
version = 1
[data_set.d]
unit = { name = "user", type = "int" }
account = { path = "account/ledger.db", limit = { epsilon = 40, delta = 1e-5 } }
secret = "file:noise.secret"
[table.visits]
path = "in.csv"
unit_column = "user"
columns = { user = "INT64", page = "STRING", time = "STRING" }
"""
STATEMENT = (
    "SELECT WITH DIFFERENTIAL_PRIVACY OPTIONS(epsilon = 5, delta = 1e-6, "
    "max_groups_contributed = 4) page, COUNT(*, contribution_bounds_per_group => (0, 4)) AS n "
    "FROM visits GROUP BY page"
)
SESSION = f"""
version = 1
[data_set.d]
account = {{ path = "account/ledger.db" }}
insecure_test_secret = "{KEY}"
"""
TABLE = """
[table.small]
path = "small.csv"
record_id = "name"
dimension.a = { type = "integer", low = 0, high = 4 }
dimension.epsilon = { type = "budget", most = 2.0, step = 0.25 }
"""
SESSION += TABLE
WORKLOAD = {
    "domain": [{"name": "page", "values": [f"p{n}" for n in range(4)]}],
    "queries": [{"factors": {"page": "range"}}],
}


def stream(folder: Path) -> None:
    """A job in a project file, and its records."""
    visits(folder)
    accounts.write(folder / "dpstream.toml", STREAM)


def visits(folder: Path) -> None:
    """60 users on 4 pages over two days, and an empty folder for the store."""
    rows = ["user,page,time"]
    for user in range(60):
        for n, hour in enumerate((1, 7, 20, 30, 40)):
            day, clock = divmod(hour, 24)
            rows.append(f"{user},p{(user + n) % 4},2024-01-0{1 + day}T{clock:02d}:00:00Z")
    (folder / "in.csv").write_text("\n".join(rows) + "\n")
    (folder / "asked.json").write_text(json.dumps(WORKLOAD))
    (folder / "tables.json").write_text(json.dumps(WORKLOAD | {"queries": [{"ways": 1}]}))
    (folder / "state").mkdir()


def catalog(folder: Path) -> None:
    """The same records as a table of a project file."""
    visits(folder)
    accounts.write(folder / "dpstream.toml", PROJECT)
    (folder / "noise.secret").write_text(KEY + "\n")
    (folder / "noise.secret").chmod(0o600)


def parquet(folder: Path) -> None:
    """The same records in Parquet, in two folders."""
    catalog(folder)
    rows = csv.read_csv(folder / "in.csv")
    for number in range(2):
        (folder / f"part={number}").mkdir()
        half = rows.slice(number * rows.num_rows // 2, rows.num_rows // 2)
        pq.write_table(half, folder / f"part={number}" / "in.parquet")
    text = (folder / "dpstream.toml").read_text().replace("in.csv", "part=*/in.parquet")
    (folder / "dpstream.toml").write_text(text.partition("columns = {")[0])


def choosing(folder: Path) -> None:
    """The same records, and a job without contributions in a project file."""
    visits(folder)
    bound = "contributions = 6\n"
    assert bound in STREAM
    accounts.write(folder / "dpstream.toml", STREAM.replace(bound, ""))


def session(folder: Path) -> None:
    """Thirty records with budgets of their own."""
    rows = [f"r{n},{n % 4},{2 if n % 3 else 1.5}" for n in range(30)]
    (folder / "small.csv").write_text("\n".join(["name,a,epsilon", *rows]) + "\n")
    accounts.write(folder / "dpstream.toml", SESSION)


def without_account(folder: Path) -> None:
    """The records and the project file, whose account is not made yet."""
    session(folder)
    (folder / "account" / "ledger.db").unlink()
    (folder / "dpstream.toml").write_text(SESSION)


def wider(folder: Path) -> None:
    """The same table, and one with one value more."""
    session(folder)
    wide = TABLE.replace("high = 4", "high = 5").replace("table.small", "table.wide")
    with open(folder / "dpstream.toml", "a") as file:
        file.write(wide)


def records(folder: Path) -> None:
    """The same table, and records to add, to replace and to delete."""
    session(folder)
    (folder / "more.csv").write_text("name,a,epsilon\nn1,2,2\nn2,3,1.5\n")
    (folder / "other.csv").write_text("name,a,epsilon\nr3,0,1\n")
    (folder / "gone.csv").write_text("name\nr4\n")


def growing(folder: Path) -> None:
    """A folder that grows, with two files that no marker names."""
    (folder / "in").mkdir()
    for name in ("one.csv", "two.csv"):
        (folder / "in" / name).write_text("user,page,time\n1,p,2024-01-01T00:00:00Z\n")


def empty(_: Path) -> None:
    """Nothing."""


def totals(folder: Path) -> None:
    """What tables of households need of those of persons."""
    shutil.copytree(folder / "persons" / "t1", folder / "data" / "pop-group-totals.txt")


#: Of persons or households with an account, and of persons without one.
CENSUS = """\
version = 1
[data_set.d]
unit = {{ name = "{unit}" }}
account = {{ path = "account/ledger.db", id = "{id}" }}
secret = "file:noise.secret"
[data_set.free]
unit = {{ name = "person" }}
secret = "file:noise.secret"
[census.paid]
data_set = "d"
parameters = "parameters"
data = "data"
program = "{program}"
[census.free]
data_set = "free"
parameters = "parameters"
data = "data"
"""


def census(folder: Path, unit: str = "person") -> None:
    """An invented office with a secret, the project file and the account."""
    generate(folder / "parameters", folder / "data", Size(persons=60))
    (folder / "noise.secret").write_text(KEY + "\n")
    (folder / "noise.secret").chmod(0o600)
    accounts.create(folder / "account" / "ledger.db", "d", (99.0, 1e-5), unit)
    program = {"person": "p", "household": "h"}[unit]
    text = CENSUS.format(unit=unit, program=program, id=accounts.ID)
    (folder / "dpstream.toml").write_text(text)


def keep_answer(folder: Path) -> None:
    """A copy of the account's file."""
    shutil.copyfile(folder / "account" / "ledger.db", folder / "backup.db")


def put_back(folder: Path) -> None:
    """The account is restored: it has lost a charge, which its head file has."""
    shutil.copyfile(folder / "backup.db", folder / "account" / "ledger.db")


def homes(folder: Path) -> None:
    """The same, of households."""
    census(folder, "household")


def released(*places: str) -> Callable[[Path, Ended], Any]:
    """The files below some places, hidden ones apart."""

    def read(folder: Path, _: Ended) -> Any:
        return {
            path.relative_to(folder).as_posix(): path.read_bytes()
            for place in places
            for path in [folder / place, *sorted((folder / place).rglob("*"))]
            if path.is_file() and not path.name.startswith(".")
        }

    return read


def both_runs(folder: Path, ended: Ended) -> Any:
    """The new run's releases, the old one's, and that each has its store.  A run that was begun
    and not charged may have left one more."""
    folders = sorted(path.name for path in folder.iterdir() if path.name.startswith("out"))
    return released(*folders)(folder, ended), len(list((folder / "state").glob("*.db"))) > 1


def printed(*names: str) -> Callable[[Path, Ended], Any]:
    """Fields of what a command prints for programs."""

    def read(_: Path, ended: Ended) -> Any:
        value = json.loads(ended.stdout)
        value = value[0] if isinstance(value, list) else value
        return {name: value[name] for name in names}

    return read


def lines(*patterns: str) -> Callable[[Path, Ended], Any]:
    """Names and numbers of lines of the files of some patterns, whose bytes are random."""

    def read(folder: Path, _: Ended) -> Any:
        return {
            path.relative_to(folder).as_posix(): len(path.read_text().splitlines())
            for pattern in patterns
            for path in sorted(folder.glob(pattern))
        }

    return read


def created(folder: Path, ended: Ended) -> Any:
    """The section of the project file that is printed, with the account's id replaced."""
    [event] = accounts.events(folder / "new.db")
    assert isinstance(event, Created)
    return ended.stdout.replace(event.id, "ID")


def names(*places: str) -> Callable[[Path, Ended], Any]:
    """Names of the files below some places, whose bytes are random."""

    def read(folder: Path, ended: Ended) -> Any:
        return sorted(released(*places)(folder, ended))

    return read


def nothing(_: Path, __: Ended) -> Any:
    """What a command leaves whose files differ from run to run; `Command.then` looks at them."""


class Outcome(NamedTuple):
    """What is there in the end: files and figures, the account's entries, and accounts."""

    files: Any
    entries: Any
    accounts: int


@dataclass(frozen=True)
class Command:
    """A command, the world it runs in, and what it must leave in the end.

    Attributes:
        world: writes the files; before: commands that were run without a fault.
        words: the command under test.
        leaves: what must be the same after a fault, from the folder and how the command ended.
        charged: the account that lists one more charge, or none.
        renamed: the word that names what it makes, and another name for it.
        then: a command that must end well after it, and what it prints is the same.
        anew: it asks anew: what differs from another asking is not compared.
    """

    world: Callable[[Path], None]
    words: tuple[str, ...]
    leaves: Callable[[Path, Ended], Any]
    before: tuple[tuple[str, ...] | Callable[[Path], None], ...] = ()
    charged: str | None = "account/ledger.db"
    renamed: tuple[str, str] | None = None
    then: tuple[str, ...] = ()
    anew: bool = False

    def prepare(self, server: Server, folder: Path) -> None:
        """Make the world."""
        folder.mkdir()
        self.world(folder)
        for words in self.before:
            if callable(words):
                words(folder)
            else:
                ended = server.run(words, folder)
                assert ended.code == 0, ended.stderr

    def outcome(self, server: Server, folder: Path, ended: Ended) -> Outcome:
        """What is there in the end, and the account's entries."""
        files = self.leaves(folder, ended)
        if self.then:
            process = server.run(self.then, folder)
            files = (files, process.code, process.stdout)
        if self.charged is None:
            return Outcome(files, None, accounts_in(folder))
        process = account(server, folder, self.charged)
        text = re.sub(r'"at": (?:[0-9]+|"[^"]*")|"digest": "[0-9a-f]+"', "", process.stdout)
        entries: Any = process.code, text  # when it was asked differs
        if self.anew:
            entries = charges(process), unanswered(folder / self.charged)
        return Outcome(files, entries, accounts_in(folder))


def account(server: Server, folder: Path, path: str) -> Ended:
    """What an account says of its charges."""
    return server.run(["account", "show", path, "--json"], folder)


def accounts_in(folder: Path) -> int:
    """How many accounts there are."""
    return sum(is_account(path) for path in folder.rglob("*") if path.is_file())


def is_account(path: Path) -> bool:
    """Whether a file is one of SQLite with the tables of an account."""
    with open(path, "rb") as file:
        if file.read(16) != b"SQLite format 3\0":
            return False
    with contextlib.closing(sqlite3.connect(path)) as db:
        tables = {name for (name,) in db.execute("SELECT name FROM sqlite_master")}
    return {"log", "blobs"} <= tables


def charges(process: Ended) -> int:
    """How many there are."""
    return int(json.loads(process.stdout)["charges"]) if process.stdout else 0


def unanswered(path: Path) -> int:
    """How many charges of questions have no committed answer."""
    with contextlib.closing(open_path(path)) as ledger:
        return len(ledger.unanswered())


CREATE = (
    "account",
    "create",
    "new.db",
    "--data-set",
    "new",
    "--unit",
    "user",
    "--epsilon",
    "4",
    "--delta",
    "1e-6",
)
RECOVER = ("account", "recover", "d")
LIMIT = ("account", "limit", "--epsilon", "99", "--delta", "1e-3")
EXECUTE, FREELY = (("census", "execute", name, "--out") for name in ("paid", "free"))
RUN, PURELY = ("run", "--quiet"), "--mechanism=geometric"
ANSWER = ("workload", "answer", "asked.json", "--cache", "cache", "--quiet", "--out")
CHOOSE = ("choose", "daily", "--first", "1d", "--epsilon", "9", "--as", "chosen")
SQL = ("sql", STATEMENT, "--json")
QUANTILES = (
    "SELECT WITH DIFFERENTIAL_PRIVACY OPTIONS(epsilon = 5, delta = 1e-6) "
    "APPROX_QUANTILES(user, 2, contribution_bounds_per_row => (0, 60)) AS q FROM visits"
)
INIT = (
    *("init", "in.csv", "--unit", "user", "--key", "page", "--time", "time", "--window", "day"),
    *("--start", "2024-01-01", "--end", "2024-01-03", "--epsilon", "3", "--delta", "1e-6"),
    *("--contributions", "6"),
)
POINTS = "SELECT WITH DIFFERENTIAL_PRIVACY OPTIONS({}) {} FROM small WHERE epsilon >= 1.5".format
ASK = ("sql", POINTS("epsilon = 0.25", "COUNT(*) AS n"))
DRAW = ("sql", POINTS("epsilon = 0.25, allotment = 'later'", "COUNT(*) AS n"))
MADE = ("table", "init", "small")
ALLOT = ("sql", f"CREATE ALLOTMENT later AS {POINTS('epsilon = 0.5', '*')}")
TICK = ("sql", POINTS("epsilon = 0.5, sliding = 'a', width = 2, until = 4", "COUNT(*) AS n"),
        "--as-of", "1", "--json")  # fmt: skip
BUDGET = ("sql", "SELECT * FROM dpstream.budget", "--json")
INFO = ("state", "info", "--json")
COMMANDS: Mapping[str, Command] = {
    **{f: Command(catalog, (f,), lambda _, e: e.stdout.split("\n")[-1]) for f in FUNCTIONS},
    "init": Command(visits, INIT, lines("in.secret"), charged=None,
                    then=("plan", "in", "--json")),
    "secret new": Command(empty, ("secret", "new", "noise.secret"), lines("noise.secret"),
                       charged=None, renamed=("noise.secret", "other.secret")),
    "run": Command(stream, RUN, released("out")),
    "run --fresh": Command(stream, (*RUN, "--fresh"), both_runs, (RUN,), anew=True),
    "workload answer": Command(stream, (*ANSWER, "answers"), released("answers")),
    "workload answer --fresh": Command(
        stream, (*ANSWER, "again", PURELY, "--fresh"), names("again"),
        ((*ANSWER, "answers", PURELY),), renamed=("again", "third"), anew=True),
    f"workload answer {PURELY}": Command(stream, (*ANSWER, "answers", PURELY),
                                         released("answers")),
    "workload answer --tables": Command(
        stream, (*ANSWER[:2], "tables.json", *ANSWER[3:], "answers", "--tables"),
        released("answers")),
    "workload answer --over-time": Command(stream, (*ANSWER, "answers", "--over-time"),
                                           released("answers")),
    "workload answer --from": Command(
        stream, (*ANSWER[:3], "--from", "first", "--out", "a.csv"), released("a.csv"),
        ((*ANSWER, "first"),), charged=None),
    "workload plan": Command(stream, ("workload", "plan", "asked.json", "--epsilon", "1",
                                      "--delta", "1e-6", "--cache", "cache", "--json"),
                             printed("rmse"), charged=None),
    "choose": Command(choosing, CHOOSE, released("dpstream.toml")),
    "choose --fresh": Command(choosing, (*CHOOSE[:-1], "again", "--fresh"), lines("*.toml"),
                              (CHOOSE,), renamed=("again", "third"), anew=True),
    "sql": Command(catalog, SQL, printed("rows")),
    "sql, of Parquet": Command(parquet, SQL, printed("rows")),
    "init, of Parquet": Command(
        parquet, ("init", "part=*/in.parquet", *INIT[2:], "--project", "new.toml"),
        lines("in.secret"), charged=None, then=("plan", "in", "--project", "new.toml", "--json")),
    "sql --fresh": Command(catalog, (*SQL, "--fresh"), nothing, (SQL,), anew=True),
    "sql, quantiles": Command(catalog, ("sql", QUANTILES, "--json"), printed("rows")),
    "table init": Command(session, MADE, nothing, charged=None, then=BUDGET),
    "table init, with an account": Command(without_account, MADE, nothing, charged=None,
                                             then=BUDGET),
    "table init --migrate": Command(
        wider, ("table", "init", "wide", "--migrate", "small"), nothing, (MADE, ASK)),
    "table change": Command(records, ("table", "change", "small", "more.csv"), nothing,
                           (MADE,), charged=None, then=BUDGET),
    "table change --replace": Command(
        records, ("table", "change", "small", "other.csv", "--replace"), nothing, (MADE,),
        charged=None, then=BUDGET),
    "table change --delete": Command(
        records, ("table", "change", "small", "gone.csv", "--delete"), nothing, (MADE,),
        charged=None, then=BUDGET),
    "points": Command(session, (*ASK, "--json"), printed("rows"), (MADE,)),
    "points --fresh": Command(session, (*ASK, "--fresh"), nothing, (MADE, ASK), anew=True),
    "points draw": Command(session, (*DRAW, "--json"), printed("rows"), (MADE, ALLOT)),
    "points allot": Command(session, ALLOT, nothing, (MADE,), then=BUDGET),
    "points give up": Command(session, ("sql", "DROP ALLOTMENT later ON small"), nothing,
                              (MADE, ALLOT), then=BUDGET),
    "table close": Command(session, ("table", "close", "small", "--arrival", "a",
                                     "--before", "2"), nothing, (MADE,), then=BUDGET),
    "points tick": Command(session, TICK, printed("rows"), (MADE,)),
    "census execute": Command(census, (*EXECUTE, "out"), released("out")),
    "census execute --fresh": Command(
        census, (*EXECUTE, "again", "--fresh"), names("again"), ((*EXECUTE, "out"),),
        renamed=("again", "third"), anew=True),
    "census execute, households": Command(
        homes, (*EXECUTE, "out"), released("out"), ((*FREELY, "persons"), totals)),
    "state init": Command(stream, ("state", "init"), nothing, then=INFO),
    "state backup": Command(stream, ("state", "backup", "--out", "b"),
                            names("b"), (RUN,), renamed=("b", "b2")),
    "state restore": Command(stream, ("state", "restore", "daily", "b", "--replace"),
                             nothing, (RUN, ("state", "backup", "--out", "b")), then=RUN),
    "state expire": Command(stream, ("state", "expire"), nothing, (RUN,), then=INFO),
    "state reshard": Command(stream, ("state", "reshard", "--shards", "2"),
                             nothing, (RUN,), then=INFO),
    "state releases": Command(stream, ("state", "releases", "--out", "rel"),
                              released("rel"), (RUN,)),
    "account create": Command(empty, CREATE, created, charged=None),
    "account recover": Command(catalog, RECOVER, nothing,
                               (SQL, keep_answer, (*SQL, "--fresh"), put_back)),
    "account limit": Command(stream, LIMIT, nothing),
    "report": Command(stream, ("report", "--out", "r.html"), nothing, (RUN,)),
    "folder close": Command(growing, ("folder", "close", "in", "--new"), lines("in/*.csv"),
                            charged=None),
}  # fmt: skip
#: Commands that write nothing: the world, what was done before, and the words.
READ_ONLY: Mapping[str, Command] = {
    "check": Command(stream, ("check", "--quiet"), nothing),
    "plan": Command(stream, ("plan",), nothing),
    "plan, of an account": Command(stream, ("plan",), nothing, (RUN,)),
    "secret check": Command(stream, ("secret", "check"), nothing, (RUN,)),
    "account show": Command(stream, ("account", "show", "account/ledger.db"), nothing, (RUN,)),
    "state info": Command(stream, INFO, nothing, (RUN,)),
    "workload answer --dry-run": Command(
        stream, (*ANSWER[:3], "--strategy", "identity", "--dry-run"), nothing),
    "choose --dry-run": Command(choosing, (*CHOOSE, "--dry-run"), nothing, (CHOOSE,)),
    "sql --explain": Command(catalog, (*SQL, "--explain"), nothing, (SQL,)),
    "points --explain": Command(session, (*ASK, "--explain"), nothing, (MADE, ASK)),
    "points, their budgets": Command(session, BUDGET, nothing, (MADE, ASK)),
    "census plan --faults": Command(census, ("census", "plan", "paid", "--faults"), nothing),
    "census plan": Command(census, ("census", "plan", "paid"), nothing),
    "folder find": Command(growing, ("folder", "find", "in", "0", "0"), nothing),
}  # fmt: skip
ALL: Mapping[str, Command] = {**COMMANDS, **READ_ONLY}
#: Commands without a question of anybody's data, which write what is made anew each time.
APART = {
    "demo": "public flights and a stream's own commands, minutes long",
    "account forecast": "one page that it can write again, from public figures",
    "due": "one file of metrics that it can write again, from public facts",
    "state final": "one table that it can write again, from releases; `run` writes it too",
    "doctor": "a folder that it removes, to see how long a sync takes",
}


def command_of(case: str) -> str:
    """The command of a case, whose name goes on with options or a comma; points are in SQL."""
    return "sql" if case.startswith("points") else re.split(" --|,", case)[0]


def every_command(option: str | None = None) -> set[str]:
    """The names of all commands of the command line, or of those with an option."""
    import click

    from dpstream.pipelines.cli.main import cli

    def names(group: click.Group, before: str = "") -> Iterator[str]:
        for name, command in group.commands.items():
            if isinstance(command, click.Group):
                yield from names(command, f"{before}{name} ")
            elif option is None or any(option in param.opts for param in command.params):
                yield f"{before}{name}"

    return set(names(cli))

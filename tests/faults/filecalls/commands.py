"""Commands that write, each with a small world of files, and what of it must not depend on faults.

A world is made by plain files and earlier commands.  After a fault the same command is typed again:
its released files and figures are those of an undisturbed run, and the account has one charge.
"""

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.faults.filecalls.server import Ended, Server

KEY = "3f7a91c4d2e85b60718293a4b5c6d7e8f90a1b2c3d4e5f60718293a4b5c6d7e8"
STREAM = f"""
[source]
kind = "csv"
path = "in.csv"
[schema]
unit = {{ column = "user", type = "int" }}
key = [{{ column = "page" }}]
event_time = {{ column = "time" }}
[[aggregate]]
name = "n"
kind = "count"
[time]
start = "2024-01-01T00:00:00Z"
end = "2024-01-03T00:00:00Z"
window = "1d"
trigger_every = "12h"
[privacy]
epsilon = 15.0
delta = 1e-3
contributions = 6
insecure_test_key = "{KEY}"
[state]
store = "sqlite:state/s.db"
shards = 1
[sink]
kind = "csv"
path = "out"
[ledger]
path = "account/ledger.db"
data_set = "d"
limit = {{ epsilon = 40.0, delta = 0.02, allow_large_delta = true }}
"""
CATALOG = """
[ledger]
path = "account/ledger.db"
data_set = "d"
limit = { epsilon = 40, delta = 1e-5 }
[unit]
name = "user"
type = "int"
[privacy]
key_file = "noise.key"
[[table]]
name = "visits"
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
[ledger]
path = "account/ledger.db"
data_set = "d"
[privacy]
insecure_test_key = "{KEY}"
[table]
name = "small"
folder = "small.table"
records = "small.csv"
id = "name"
[[dimension]]
name = "a"
type = "integer"
low = 0
high = 4
[[dimension]]
name = "epsilon"
type = "budget"
most = 2.0
step = 0.25
"""
WORKLOAD = {
    "domain": [{"name": "page", "values": [f"p{n}" for n in range(4)]}],
    "queries": [{"factors": {"page": "range"}}],
}


def stream(folder: Path) -> None:
    """60 users on 4 pages over two days, a job, and an empty folder for each database."""
    rows = ["user,page,time"]
    for user in range(60):
        for n, hour in enumerate((1, 7, 20, 30, 40)):
            day, clock = divmod(hour, 24)
            rows.append(f"{user},p{(user + n) % 4},2024-01-0{1 + day}T{clock:02d}:00:00Z")
    (folder / "in.csv").write_text("\n".join(rows) + "\n")
    (folder / "job.toml").write_text(STREAM)
    (folder / "asked.json").write_text(json.dumps(WORKLOAD))
    for name in ("state", "account"):
        (folder / name).mkdir()


def catalog(folder: Path) -> None:
    """The same records as a table of a catalog."""
    stream(folder)
    (folder / "shop.toml").write_text(CATALOG)
    (folder / "noise.key").write_text(KEY + "\n")
    (folder / "noise.key").chmod(0o600)


def session(folder: Path) -> None:
    """Thirty records with budgets of their own."""
    rows = [f"r{n},{n % 4},{2 if n % 3 else 1.5}" for n in range(30)]
    (folder / "small.csv").write_text("\n".join(["name,a,epsilon", *rows]) + "\n")
    (folder / "small.toml").write_text(SESSION)
    (folder / "account").mkdir()


def census(folder: Path) -> None:
    """A key and a folder for the account; `tabulate generate` writes the rest."""
    (folder / "noise.key").write_text(KEY + "\n")
    (folder / "noise.key").chmod(0o600)
    (folder / "account").mkdir()


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


@dataclass(frozen=True)
class Command:
    """A command, the world it runs in, and what it must leave in the end.

    Attributes:
        world: writes the files.
        before: commands that were run without a fault.
        words: the command under test.
        leaves: what must be the same after a fault, from the folder and how the command ended.
        charged: the account that lists one more charge, or none.
        repeats: whether the command may be typed again when it is done.
        done: what one says that was done before, if it then refuses.
        onward: what is typed instead of the same command once it is charged.
    """

    world: Callable[[Path], None]
    words: tuple[str, ...]
    leaves: Callable[[Path, Ended], Any]
    before: tuple[tuple[str, ...], ...] = ()
    charged: str | None = "account/ledger.db"
    repeats: bool = True
    done: str | None = None
    onward: tuple[str, ...] = ()

    def prepare(self, server: Server, folder: Path) -> None:
        """Make the world."""
        folder.mkdir()
        self.world(folder)
        for words in self.before:
            ended = server.run(words, folder)
            assert ended.code == 0, ended.stderr

    def next_words(self, server: Server, folder: Path) -> tuple[str, ...]:
        """What is typed after a fault, or a second time."""
        if not self.onward or self.charged is None:
            return self.words
        account = server.run(["ledger", "show", self.charged, "--json"], folder)
        entries = json.loads(account.stdout)["data_sets"][0]["entries"] if account.stdout else []
        return self.onward if len(entries) > len(self.before) else self.words

    def outcome(self, server: Server, folder: Path, ended: Ended) -> Any:
        """What is there in the end, and the account's entries."""
        if self.charged is None:
            return self.leaves(folder, ended), None
        account = server.run(["ledger", "show", self.charged, "--json"], folder)
        entries = re.sub(r'"at": [0-9]+', "", account.stdout)  # when a session was asked
        return self.leaves(folder, ended), (account.code, entries)


EXECUTE = ("--key-file", "noise.key", "--ledger", "account/ledger.db", "--data-set", "d",
           "--limit-epsilon", "60", "--limit-delta", "1e-5", "--json")  # fmt: skip
RUN = ("run", "job.toml", "--quiet")
COMMANDS: Mapping[str, Command] = {
    "run": Command(stream, RUN, released("out")),
    "run --fresh": Command(stream, (*RUN, "--fresh"), both_runs, (RUN,), onward=RUN),
    "answer": Command(stream, ("answer", "asked.json", "job.toml", "--out", "answers", "--cache",
                               "cache", "--quiet"), released("answers")),
    "answer --pure": Command(stream, ("answer", "asked.json", "job.toml", "--pure", "--out",
                                      "answers", "--cache", "cache"), released("answers")),
    "choose": Command(stream, ("choose", "job.toml", "--first", "1d", "--epsilon", "9", "--out",
                               "chosen.toml"), released("chosen.toml")),
    "sql": Command(catalog, ("sql", "shop.toml", STATEMENT, "--json"), printed("rows")),
    "session init": Command(session, ("session", "init", "small.toml"), lambda *_: None,
                            charged=None, repeats=False, done="holds a table already"),
    "session ask": Command(session, ("session", "ask", "small.toml", "count", "--where",
                                     "epsilon >= 1", "--epsilon", "0.5", "--json"),
                           printed("rows"), (("session", "init", "small.toml"),)),
    "tabulate execute": Command(
        census, ("tabulate", "execute", "parameters", "data", "out", *EXECUTE), released("out"),
        (("tabulate", "generate", "parameters", "data", "--persons", "60", "--tracts", "3"),)),
    "state backup": Command(stream, ("state", "backup", "job.toml", "--out", "b"),
                            lambda *_: None, (RUN,), repeats=False, done="exists"),
    "state reshard": Command(stream, ("state", "reshard", "job.toml", "--shards", "2"),
                             lambda *_: None, (RUN,), repeats=False,
                             done="is the store's number already"),
    "report": Command(stream, ("report", "job.toml", "--out", "r.html"), lambda *_: None, (RUN,)),
}  # fmt: skip

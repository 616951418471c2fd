"""A small job that is run again and again: on the same store, on copies, on other data."""

import shutil
from pathlib import Path
from typing import NamedTuple

from dpstream.pipelines.jobs.job import Job, load_job
from dpstream.pipelines.stream.run import run_job
from dpstream.state import open as stores
from dpstream.state.ledger.events import Charge
from dpstream.state.sqlite.database import sqlite3
from tests import accounts

PROJECT = """
version = 1
[data_set.visits]
unit = { name = "user", type = "int" }
insecure_test_secret = "1111111111111111111111111111111111111111111111111111111111111111"
ACCOUNT
[table.visits]
path = "in.csv"
unit_column = "user"
time_column = "time"
[job.pages]
table = "visits"
key = ["page"]
aggregate.n = { kind = "count" }
start = "2024-01-01T00:00:00Z"
end = "2024-01-03T00:00:00Z"
window = "1d"
release_every = "6h"
budget = { epsilon = 20.0, delta = 1e-2, covers = "lifetime" }
contributions = 9
store = "STORE/s.db"
shards = 3
sink = { kind = "parquet", path = "SINK" }
"""
ACCOUNT = 'account = { path = "book/ledger.db", limit = { epsilon = 40.0, delta = 0.05 } }'


def text_of(store: str = "state", sink: str = "out", account: bool = True) -> str:
    """The project file with a job's store and sink."""
    text = PROJECT.replace("STORE", store).replace("SINK", sink)
    return text.replace("ACCOUNT", ACCOUNT * account)


class Place(NamedTuple):
    """A folder with one input and one account, and jobs on them that differ in store and sink."""

    folder: Path

    def job(self, store: str = "state", sink: str = "out", ledger: bool = True) -> Job:
        path = self.folder / "dpstream.toml"
        accounts.write(path, text_of(store, sink, ledger))
        return load_job(path)

    def run(self, store: str = "state", sink: str = "out", ledger: bool = True) -> dict[str, bytes]:
        """Run it; the files of its sink."""
        run_job(self.job(store, sink, ledger))
        return self.files(sink)

    def files(self, sink: str = "out") -> dict[str, bytes]:
        root = self.folder / sink
        return {
            p.relative_to(root).as_posix(): p.read_bytes() for p in root.rglob("*") if p.is_file()
        }

    def entries(self) -> list[Charge]:
        ledger = accounts.opened(self.folder / "book" / "ledger.db", "visits")
        try:
            return ledger.entries()
        finally:
            ledger.close()

    def lose_head(self) -> None:
        """Lose the account's head file."""
        for head in self.folder.glob("dpstream-*.head"):
            head.unlink()

    def copy(self, old: str, new: str) -> None:
        """Copy a store or a sink, as `cp -r` does."""
        stores.close_all()
        shutil.copytree(self.folder / old, self.folder / new)

    def forget(self, store: str, window: int) -> None:
        """Take a store back to the time before it committed a window."""
        stores.close_all()
        with sqlite3.connect(self.folder / store / "s.db") as db:
            db.execute("DELETE FROM steps WHERE window >= ?", (window,))
        db.close()

    def sql(self, file: str, statement: str) -> None:
        stores.close_all()
        with sqlite3.connect(self.folder / file) as db:
            db.execute(statement)
        db.close()

    def rows(self) -> int:
        """Rows of the account's log."""
        with sqlite3.connect(self.folder / "book" / "ledger.db") as db:
            [(rows,)] = db.execute("SELECT max(number) FROM log")
        db.close()
        return int(rows)

    def shorten_ledger(self, rows: int) -> None:
        """Make the account what it was after its first rows, and lose its head file."""
        accounts.shorten(self.folder / "book" / "ledger.db", rows)
        self.lose_head()


def new_place(folder: Path, users: int = 60) -> Place:
    """60 users who visit one of three pages five times in two days."""
    folder.mkdir(parents=True, exist_ok=True)
    write_input(folder, users)
    return Place(folder)


def write_input(folder: Path, users: int) -> None:
    rows = ["user,page,time"]
    for user in range(users):
        for hour in (1, 7, 20, 30, 40):
            day, clock = divmod(hour, 24)
            rows.append(f"{user},p{user % 3},2024-01-0{1 + day}T{clock:02d}:00:00Z")
    (folder / "in.csv").write_text("\n".join(rows) + "\n")

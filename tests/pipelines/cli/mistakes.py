"""The folder that the mistakes of a first hour are made in, and how a fix is followed."""

import re
from collections.abc import Callable
from pathlib import Path

import duckdb
import numpy as np
import pyarrow as pa
import pyarrow.csv as pacsv
import pyarrow.parquet as pq

from tests.pipelines.cli.called import call

PROJECT = """
version = 1
[data_set.v]
unit = { name = "user" }
secret = "file:noise.secret"
[table.visits]
path = "visits.parquet"
unit_column = "user"
time_column = "at"
[job.daily]
table = "visits"
key = ["page"]
aggregate.visits = { kind = "count" }
aggregate.spent = { kind = "sum", column = "amount", bounds = [0, 10] }
start = "2024-01-01T00:00:00Z"
end = "2024-01-03T00:00:00Z"
window = "1d"
release_every = "1d"
budget = { epsilon = 6.0, delta = 1e-6, covers = "lifetime" }
contributions = 4
sink = { kind = "parquet", path = "releases" }
"""


def with_account(limit: float, text: str = PROJECT, delta: float = 1e-5) -> str:
    """The project file with an account of its data set."""
    given = f"limit = {{ epsilon = {limit!r}, delta = {delta!r} }}"
    unit = 'unit = { name = "user" }\n'
    return text.replace(unit, f'{unit}account = {{ path = "ledger.db", {given} }}\n')


_PACKED = {".gz": "gzip", ".bz2": "bz2", ".zst": "zstd"}
START = 1_704_067_200_000_000


def visits(begin: int = START, days: int = 2) -> pa.Table:
    """Three pages, 400 people, everybody's records within the days."""
    rng, rows = np.random.default_rng(3), 2_400
    at = begin + np.sort(rng.integers(0, days * 86_400_000_000, rows))
    return pa.table(
        {
            "user": [f"u{n}" for n in rng.integers(0, 400, rows)],
            "page": [f"page {n}" for n in rng.integers(0, 3, rows)],
            "at": pa.array(at).cast(pa.timestamp("us", "UTC")),
            "amount": rng.integers(0, 11, rows).astype(np.float64),
        }
    )


def lines_of(table: pa.Table) -> str:
    """A table as JSON Lines."""
    return str(
        table.to_pandas().to_json(orient="records", lines=True, date_format="iso", date_unit="us")
    )


class Hour:
    """A stranger's folder: data, project file, secret; and the last message that they got."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.message = folder, ""
        self.put("visits.parquet", visits())
        (folder / "dpstream.toml").write_text(PROJECT)
        assert call("secret", "new", folder / "noise.secret").exit_code == 0

    def put(self, name: str, table: pa.Table) -> None:
        """A file of the folder, of the kind its name says."""
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.suffix == ".parquet":
            pq.write_table(table, path)
        elif path.suffix in _PACKED:
            plain = path.with_suffix("")
            self.put(plain.name, table)
            with pa.CompressedOutputStream(str(path), _PACKED[path.suffix]) as packed:
                packed.write(plain.read_bytes())
            plain.unlink()
        elif path.suffix == ".jsonl":
            path.write_text(lines_of(table))
        else:
            pacsv.write_csv(table, path)

    def column(self, name: str, values: pa.Array | pa.ChunkedArray) -> None:
        """The data with another column in the place of one."""
        table = visits()
        at = table.column_names.index(name)
        self.put("visits.parquet", table.set_column(at, name, values))

    def edit(self, old: str, new: str) -> None:
        """Change the project file, which says ``old`` once."""
        text = (self.folder / "dpstream.toml").read_text()
        assert text.count(old) == 1, old
        (self.folder / "dpstream.toml").write_text(text.replace(old, new))

    def csv(self) -> None:
        """The data is a CSV file."""
        self.put("visits.csv", visits())
        self.edit("visits.parquet", "visits.csv")

    def run(self, *flags: str) -> int:
        """``dpstream run``; its exit code, what it said is the message."""
        result = call("run", "--project", self.folder, "--quiet", *flags)
        self.message = result.output
        assert "Traceback" not in self.message
        return result.exit_code

    @property
    def fix(self) -> str:
        """The fix that the last message names."""
        match = re.search(r"Fix: (.*)\.$", self.message, re.MULTILINE)
        assert match is not None, self.message
        return match[1]

    def fix_part(self, pattern: str) -> str:
        """The part of the fix that matches, to be copied as it stands."""
        match = re.search(pattern, self.fix)
        assert match is not None, self.fix
        return match[0]

    def duckdb(self, file: str = "") -> None:
        """Run the statement of the fix where the project file is; ``file`` is put for ``FILE``."""
        statement = self.fix_part(r"COPY \(.*\) TO '[^']*'").replace("FILE", file)
        where = self.folder.as_posix()
        for name in re.findall(r"'([\w.*/-]+\.(?:parquet|csv|json))'", statement):
            statement = statement.replace(f"'{name}'", f"'{where}/{name}'")
        duckdb.sql(statement)

    def anew(self) -> None:
        """Another store and another folder: a run that has begun goes on with what it was."""
        self.edit('path = "releases"', 'path = "again"')
        with open(self.folder / "dpstream.toml", "a") as file:
            file.write('store = "again.db"\n')


Step = Callable[[Hour], object]

"""A small job whose input carries canaries, and a search of everything that comes out of it."""

import base64
import bz2
import contextlib
import dataclasses
import io
import logging
import re
import traceback
import zlib
from collections.abc import Iterator
from pathlib import Path

from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.kdf.hkdf import HKDFExpand

from dpstream.dp_transforms.noise.prf import PURPOSES
from dpstream.pipelines.jobs.job import Job, load_job
from dpstream.state import private_log
from dpstream.state.sqlite.database import sqlite3
from tests import accounts

UNIT, KEY, VALUE = "unit-QZJ7741", "key-XWV3306", "7310.5529"
#: Also the value as Python, numpy and Arrow would write it.
CANARIES = (UNIT, KEY, VALUE, VALUE.replace(".", ""), "QZJ7741", "XWV3306", "55.73105529")

#: A line of the data set: a fixed secret, for tests.
INSECURE = f'insecure_test_secret = "{"11" * 32}"'

PROJECT = """
version = 1
[data_set.tests]
unit = {{ name = "user" }}
account = {{ path = "state/ledger.db", limit = {{ epsilon = 300, delta = 0.1 }} }}
{secret}
[table.rows]
path = "in/*.csv"
unit_column = "user"
time_column = "time"
[job.pages]
table = "rows"
key = ["page"]
aggregate.records = {{ kind = "count" }}
aggregate.level = {{ kind = "mean", column = "value", bounds = [0, 8000], grid = 1.0 }}
aggregate.people = {{ kind = "units" }}
start = "2024-01-01T00:00:00Z"
end = "2024-01-02T00:00:00Z"
window = "1d"
release_every = "6h"
budget = {{ epsilon = 60.0, delta = 1e-2, covers = "lifetime" }}
contributions = 2
mechanism.strategy = "blt"
shards = 2
store = "state/s.db"
{more}
sink = {{ kind = "parquet", path = "releases" }}
"""


def make_job(folder: Path, secret: str = INSECURE, more: str = "") -> Job:
    """The job below a folder, with its input: 60 users on the canary key, some on others.

    Args:
        secret: the line of the data set that says where its secret is; more: fields
            of the job.
    """
    (folder / "in").mkdir(parents=True)
    rows = ["user,page,time,value"]
    rows += [f"u{n},{KEY},2024-01-01T0{n % 8}:00:00Z,{n}" for n in range(60)]
    rows += [f"{UNIT},{KEY},2024-01-01T13:00:00Z,{VALUE}"]
    rows += [f"{UNIT},k{n},2024-01-01T19:00:00Z,{VALUE}" for n in range(5)]
    # Rows for the dead letter: no value, no time, no unit, a time outside the job.
    rows += [f"{UNIT},{KEY},2024-01-01T13:00:00Z,{VALUE}{KEY}", f"{UNIT},{KEY},{KEY},1"]
    rows += [f",{KEY},2024-01-01T13:00:00Z,{VALUE}", f"{UNIT},{KEY},2031-01-01T00:00:00Z,1"]
    (folder / "in" / "rows.csv").write_text("\n".join(rows) + "\n", encoding="utf-8")
    accounts.write(folder / "dpstream.toml", PROJECT.format(secret=secret, more=more))
    return load_job(folder)


@dataclasses.dataclass
class Logs:
    """All log records of the process, formatted with their tracebacks."""

    stream: io.StringIO = dataclasses.field(default_factory=io.StringIO)

    def __enter__(self) -> "Logs":
        self._handler = logging.StreamHandler(self.stream)
        self._handler.setFormatter(logging.Formatter("%(name)s %(message)s"))
        root = logging.getLogger()
        self._level = root.level
        root.setLevel(logging.INFO)
        root.addHandler(self._handler)
        return self

    def __exit__(self, *_: object) -> None:
        logging.getLogger().removeHandler(self._handler)
        logging.getLogger().setLevel(self._level)

    @property
    def text(self) -> str:
        return self.stream.getvalue()


def printed(error: BaseException) -> str:
    """Everything of an exception that Python, a logger or a runner would show."""
    parts = traceback.format_exception(error)
    seen: BaseException | None = error
    while seen is not None:
        parts += [str(seen), repr(seen), repr(seen.args), repr(getattr(seen, "__notes__", ""))]
        seen = seen.__cause__ or (None if seen.__suppress_context__ else seen.__context__)
    return "\n".join(parts)


def contents(error: BaseException) -> str:
    """Everything an exception object of the product still holds, shown or not."""
    parts, seen = [], [error]
    for one in seen:
        parts += [str(one), repr(one.args)]
        seen += [e for e in (one.__cause__, one.__context__) if e is not None and e not in seen]
    return "\n".join(parts)


def hits(text: str | bytes) -> list[str]:
    """Canaries in a text."""
    data = text.encode("utf-8", "surrogatepass") if isinstance(text, str) else text
    return [canary for canary in CANARIES if canary.encode() in data]


#: Beam packs the pickles of a graph: bzip2 or zlib, then base64.
_PACKED = re.compile(rb"(?:QlpoOT|eJ)[A-Za-z0-9+/\s]{30,}={0,2}")


def opened(graph: bytes) -> bytes:
    """A pipeline's graph followed by all pickles packed in it, which a plain search would miss."""
    parts = [graph]
    for part in parts:
        for packed in _PACKED.findall(part):
            for unpack in (bz2.decompress, zlib.decompress):
                with contextlib.suppress(ValueError, OSError, EOFError, zlib.error):
                    parts.append(unpack(base64.b64decode(packed)))
    return b"\n".join(parts)


def key_forms(secret: bytes) -> list[bytes]:
    """A key and its children as a text or a file might hold them: raw, hex, base64, as Python or
    JSON would write them."""
    children = [
        HKDFExpand(hashes.SHA256(), 32, b"dpstream/1/" + purpose.encode()).derive(secret)
        for purpose in PURPOSES
    ]
    forms = []
    for key in (secret, *children):
        text = key.hex().encode()
        forms += [key, text, text.upper(), repr(key)[2:-1].encode(), str(list(key)).encode()]
        forms += [key[:16], text[:32], text[32:]]
        for data in (key, text):
            for shift in range(3):  # wherever it stands in what was encoded
                code = base64.b64encode(b"\0" * shift + data)[4:-4]
                forms += [code, code.replace(b"+", b"-").replace(b"/", b"_")]
    return forms


def leaked_files(folder: Path) -> Iterator[str]:
    """Files below a folder that hold what they must not, or are named by it.

    The key may stand in releases and in the state tables, the unit nowhere, a value nowhere; the
    private log of tracebacks, which nobody but its owner can read, may hold anything.
    """
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if hits(name):
            yield f"the name of a file in {path.parent.name}"
        if not path.is_file() or name.startswith("in/"):
            continue
        if path.name == private_log.NAME and path.stat().st_mode & 0o077 == 0:
            continue  # tracebacks, for the operator alone
        matches = hits(path.read_bytes())
        allowed = name.startswith(("releases/window-", "releases/_final.", "state/s.db"))
        if matches and not (allowed and set(matches) <= {KEY, "XWV3306"}):
            yield name
    database = folder / "state" / "s.db"
    if database.exists():
        with sqlite3.connect(database) as db:
            if hits(repr(db.execute("SELECT * FROM meta").fetchall())):
                yield "the store's meta table"

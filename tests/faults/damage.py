"""Files of a job with one bit flipped, and what whoever uses them next makes of it.

An image is the folder of a job at rest: ``cut`` was killed in its midst (its commits stand in the
write-ahead log), ``resting`` is the same after the log was merged into the file, ``done`` is
finished and has a backup.  A use goes on with the job in this process, without Beam but with all
else that ``dpstream run`` does: store, ledger and sink are checked, every step is taken or read
back, every release is written or compared.
"""

import contextlib
import io
import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple
from unittest import mock

import pyarrow as pa

from dpstream.accounting.errors import DpstreamError
from dpstream.dp_transforms.flow import run_in_memory
from dpstream.pipelines.connectors.files.source import pieces, read_piece
from dpstream.pipelines.connectors.inputs import positioned
from dpstream.pipelines.connectors.registry import sink_of
from dpstream.pipelines.formats.rows import Rows
from dpstream.pipelines.jobs.job import Job, load_job
from dpstream.pipelines.operate import state_admin
from dpstream.pipelines.stream.begin import begin
from dpstream.state import open as stores
from dpstream.state.ledger import lineage as tokens
from dpstream.state.ledger.open import read_ledger
from dpstream.state.sqlite.store import SqliteStore
from tests import accounts

PROJECT = """
version = 1

[data_set.d]
unit = { name = "user", type = "int" }
account = { path = "book/ledger.db", limit = { epsilon = 22.0, delta = 0.02 } }
insecure_test_secret = "1111111111111111111111111111111111111111111111111111111111111111"

[table.visits]
path = "in.csv"
unit_column = "user"
time_column = "time"

[job.daily]
table = "visits"
key = ["page"]
aggregate.n = { kind = "count" }
start = "2024-01-01T00:00:00Z"
end = "2024-01-04T00:00:00Z"
window = "1d"
release_every = "6h"
budget = { epsilon = 22.0, delta = 1e-2, covers = "lifetime" }
contributions = 9
store = "state/s.db"
shards = 2
sink = { kind = "KIND", path = "out" }
"""
STORE, WAL, BACKUP, LEDGER = "state/s.db", "state/s.db-wal", "b", "book/ledger.db"


class Stopped(Exception):
    """Ends a run in its midst, as a kill would."""


def write_job(folder: Path, kind: str) -> None:
    """90 users of 40 pages, most of them read by few."""
    folder.mkdir(parents=True)
    rows = ["user,page,time"]
    for user in range(90):
        for n, hour in enumerate((1, 7, 20, 30, 40, 55, 60, 70)):
            day, clock = divmod(hour, 24)
            page = f"p{user % 3}" if n % 2 else f"page {(user * 7 + hour) % 40:03d}"
            rows.append(f"{user},{page},2024-01-0{1 + day}T{clock:02d}:00:00Z")
    (folder / "in.csv").write_text("\n".join(rows) + "\n")
    accounts.write(folder / "dpstream.toml", PROJECT.replace("KIND", kind))


def batches(job: Job) -> list[pa.RecordBatch]:
    """The job's records."""
    return [
        batch
        for piece in pieces(job)
        for part in read_piece(piece, tuple(job.columns))
        if isinstance(part, Rows)
        for batch in positioned(part, piece[1], 100)
    ]


def go_on(folder: Path) -> None:
    """Run the job to its end from where it stands."""
    job = load_job(folder / "dpstream.toml")
    run, _ = begin(job)
    with contextlib.closing(sink_of(job, run)) as sink:
        sink.write(run_in_memory(run, batches(job))[0])
    run.destroy_keys()
    with contextlib.closing(accounts.opened(folder / LEDGER, "d")) as ledger:
        tokens.leave(ledger, run.open())


def files(folder: Path) -> dict[str, bytes]:
    """The released files, the manifest apart."""
    out = folder / "out"
    return {str(p.relative_to(out)): p.read_bytes() for p in out.glob("window-*/*")}


class Images(NamedTuple):
    """Where the images are, and what each must come to."""

    folder: Path
    released: dict[str, bytes]
    charged: list[str]


def images(folder: Path, kind: str = "parquet") -> Images:
    """Make the three images."""
    job, cut = folder / "resting", folder / "cut"
    write_job(job, kind)
    real, left = SqliteStore._write_steps, [4]

    def write(store: SqliteStore, steps: object) -> None:
        left[0] -= 1
        if left[0] < 0:
            raise Stopped
        real(store, steps)  # type: ignore[arg-type]

    small = mock.patch("dpstream.dp_transforms.flow.COMMIT_STEPS", 3)
    writing = mock.patch.object(SqliteStore, "_write_steps", write)
    with small, writing, contextlib.suppress(Stopped):
        go_on(job)
    assert left[0] < 0
    shutil.copytree(job, cut)  # as a kill would leave it
    (cut / f"{STORE}-shm").unlink()
    stores.close_all()
    done = folder / "done"
    shutil.copytree(job, done)
    go_on(done)
    stores.close_all()
    state_admin.backup(load_job(done / "dpstream.toml"), done / BACKUP)
    contents = files(done)
    assert len(contents) == 12
    return Images(folder, contents, charges(done))


def charges(folder: Path) -> list[str]:
    """What a ledger says."""
    return [str(entry) for entry in read_ledger(folder / LEDGER)]


def flip(path: Path, bit: int) -> None:
    """Change one bit of a file."""
    with open(path, "r+b") as file:
        file.seek(bit // 8)
        (byte,) = file.read(1)
        file.seek(bit // 8)
        file.write(bytes([byte ^ 1 << bit % 8]))


class Outcome(NamedTuple):
    """``noticed`` with what was said, ``mended`` in the sink, ``harmless``, or ``wrong``."""

    what: str
    message: str = ""


def after_flip(made: Images, image: str, name: str, bit: int, scratch: Path) -> Outcome:
    """Flip a bit of a file of an image, and use it."""
    case = scratch / "case"
    shutil.rmtree(case, ignore_errors=True)
    shutil.copytree(made.folder / image, case)
    flip(case / name, bit)
    messages = io.StringIO()
    try:
        with contextlib.redirect_stderr(messages):
            if name == BACKUP:
                state_admin.restore(load_job(case / "dpstream.toml"), case / BACKUP, replace=True)
            go_on(case)
            _export(case)
            left = charges(case)
    except DpstreamError as error:
        stores.close_all()
        others = {k: v for k, v in files(case).items() if name != f"out/{k}"}
        right = all(made.released[k] == v for k, v in others.items())
        error_text = f"{error.field}: {error.rule}"
        return Outcome("noticed" if right else "wrong", error_text)
    except Exception as error:  # a person could not tell what it is about
        stores.close_all()
        return Outcome("wrong", f"uncoded {type(error).__name__}")
    finally:
        stores.close_all()
    again = case / "again"
    same = {str(p.relative_to(again)): p.read_bytes() for p in again.glob("window-*/*")}
    if files(case) != made.released or same != made.released or left != made.charged:
        return Outcome("wrong", "other bytes")
    return Outcome("mended" if "written again" in messages.getvalue() else "harmless")


def _export(case: Path) -> None:
    """``dpstream state releases``: the store's own releases."""
    from dpstream.pipelines.operate.state_admin import export

    job = load_job(case / "dpstream.toml")
    export(job, case / "again", job.sink.file_kind)


def places(made: Images, seed: int) -> Iterator[tuple[str, str, int]]:
    """(image, file, bit), for ever: files in turn, and where SQLite keeps its structure as often
    as anywhere else."""
    rng = random.Random(seed)
    out = made.folder / "done" / "out"
    releases = [
        f"out/{path.relative_to(out)}" for path in sorted(out.rglob("*.*")) if path.stat().st_size
    ]
    while True:
        for image, name in (
            ("resting", STORE),
            ("cut", WAL),
            ("done", STORE),
            ("done", BACKUP),
            ("done", LEDGER),
            ("done", rng.choice(releases)),
        ):
            size = (made.folder / image / name).stat().st_size
            byte = rng.randrange(size)
            if name in (STORE, BACKUP) and rng.random() < 0.5:
                page = rng.randrange(size // 8192) * 8192
                byte = page + rng.randrange(100)
            yield image, name, 8 * byte + rng.randrange(8)

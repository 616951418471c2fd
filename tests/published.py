"""A small job that publishes to any sink, killed and run again; for the tests of the sinks."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import tomlkit

from dpstream.dp_transforms.batches import release_schema
from dpstream.pipelines.connectors.run_manifest import resealed
from dpstream.pipelines.formats.encodings import read_releases
from dpstream.pipelines.jobs.job import Job, load_job
from dpstream.pipelines.operate.state_admin import store_run
from dpstream.pipelines.stream.run import run_job
from dpstream.state import open as stores
from tests import accounts
from tests.audit.replays import new_place, text_of
from tests.fixed_runs import RUN_ID, fix_run_id

#: Releases of the job: two windows of four triggers.
RUNS = 8


class Published:
    """One input; jobs on it differ in sink and store, not in noise (key and run id are fixed)."""

    def __init__(self, folder: Path, run_id: str = RUN_ID) -> None:
        self.place, self.run_id = new_place(folder), run_id

    def job(self, sink: str, store: str = "state", ledger: bool = False) -> Job:
        """The job with a sink of these fields, each on its line."""
        text, files = text_of(store, "out", ledger), '{ kind = "parquet", path = "out" }'
        assert files in text
        inline = tomlkit.inline_table()
        inline.update(tomlkit.parse(sink).unwrap())
        path = self.place.folder / "dpstream.toml"
        accounts.write(path, text.replace(f"sink = {files}", f"sink = {inline.as_string()}"))
        fix_run_id(path, self.run_id)
        return load_job(path)

    def run(self, sink: str, store: str = "state", ledger: bool = False) -> Job:
        """Run it to its end."""
        job = self.job(sink, store, ledger)
        run_job(job)
        stores.close_all()
        return job

    def files(self) -> tuple[Job, pa.Table]:
        """The same releases as files: what every other sink must hold."""
        job = self.run('kind = "parquet"\npath = "files"', "of-files")
        return job, read_releases(job.sink.path, release_schema(job.plan))

    def batches(self, store: str = "state") -> list[pa.RecordBatch]:
        """The releases of a store, sealed again."""
        run = store_run(self.job('kind = "parquet"\npath = "files"', store))
        try:
            names = [(window, trigger) for window in range(2) for trigger in range(1, 5)]
            return list(resealed(run, run.open(), iter(names)))
        finally:
            run.destroy_keys()
            stores.close_all()

    def killed(self, sink: str, sends: str, nth: int) -> None:
        """Run it in a process that kills itself before the nth call of a method."""
        self.job(sink)
        child = [sys.executable, "-m", "tests.published", str(self.place.folder), sends, str(nth)]
        ended = subprocess.run(child, capture_output=True, check=False, env=dict(os.environ))
        assert ended.returncode == -signal.SIGKILL, ended.stderr.decode()[-2000:]


def _die_before(sends: str, nth: int) -> None:
    """``module:class.method`` ends this process at its nth call."""
    module, _, name = sends.partition(":")
    owner_name, _, method = name.partition(".")
    owner = getattr(__import__(module, fromlist=[owner_name]), owner_name)
    real, left = getattr(owner, method), [nth]

    def call(*args: object, **options: object) -> object:
        left[0] -= 1
        if left[0] == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return real(*args, **options)

    setattr(owner, method, call)


if __name__ == "__main__":
    _die_before(sys.argv[2], int(sys.argv[3]))
    fix_run_id(Path(sys.argv[1]))
    run_job(load_job(Path(sys.argv[1])))

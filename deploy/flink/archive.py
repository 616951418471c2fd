"""Archive the classes of Flink's job server: ``python deploy/flink/archive.py JAR``.

A job of one record runs on the Flink inside the server, whose virtual machine lists the classes
that it loads.  A second virtual machine loads the listed classes and writes them, parsed, to an
archive beside the jar, from which later ones start faster.  A virtual machine ignores an archive of
other jars or of another version of Java: after an update of Java write it again.
"""

import subprocess
import sys
import tempfile
from pathlib import Path

from dpstream.pipelines.jobs.job import load_job
from dpstream.pipelines.runners.table import SHORT_LIVED
from dpstream.pipelines.stream.run import run_job

PROJECT = """\
version = 1
[data_set.users]
unit = {name = "user", type = "string"}
insecure_test_secret = "0f0f0f0f0f0f0f0f0f0f0f0f0f0f0f0f0f0f0f0f0f0f0f0f0f0f0f0f0f0f0f0f"
[table.records]
path = "records.csv"
unit_column = "user"
time_column = "time"
[job.counts]
table = "records"
key = ["key"]
aggregate = {n = {kind = "count"}}
budget = {epsilon = 1.0, delta = 1e-9, covers = "lifetime"}
contributions = 1
start = "2024-01-01T00:00:00Z"
end = "2024-01-02T00:00:00Z"
window = "1d"
release_every = "1h"
sink = {kind = "parquet", path = "releases"}
"""


def archive(jar: Path) -> Path:
    """Write the archive beside the jar; return its path."""
    target, draft = jar.with_suffix(".jsa"), jar.with_name(".job-server.jsa.draft")
    target.unlink(missing_ok=True)
    with tempfile.TemporaryDirectory(prefix="flink-") as name:
        folder, classes = Path(name), Path(name) / "classes"
        (folder / "dpstream.toml").write_text(PROJECT)
        (folder / "records.csv").write_text("user,time,key\na,2024-01-01T06:00:00Z,b\n")
        settings = (*SHORT_LIVED, f"-XX:DumpLoadedClassList={classes}")
        flags = [f"--job_server_jvm_property={setting}" for setting in settings]
        flags += [f"--flink_job_server_jar={jar}", "--parallelism=2"]
        run_job(load_job(folder), "FlinkRunner", flags)
        written = (f"-XX:SharedClassListFile={classes}", f"-XX:SharedArchiveFile={draft}")
        command = ["java", "-Xshare:dump", "-Xlog:disable", *SHORT_LIVED, *written, "-cp", str(jar)]
        subprocess.run(command, check=True)
    return draft.replace(target)


if __name__ == "__main__":
    print(archive(Path(sys.argv[1]).resolve()))

"""A PostgreSQL server for tests."""

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.kafka_broker import missing

_POSTGRES = Path("/usr/lib/postgresql/15/bin")


@contextlib.contextmanager
def postgresql_server() -> Iterator[str]:
    """Address of a server of its own, on a socket in a folder."""
    if not (_POSTGRES / "initdb").exists():
        missing("PostgreSQL's server is missing")
    folder = Path("/tmp") / f"dpstream-pg-{os.getpid()}"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    who: dict[str, Any] = {"user": "postgres"} if os.getuid() == 0 else {}
    if who:
        shutil.chown(folder, "postgres")

    def run(*words: object) -> None:
        quiet: dict[str, Any] = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        subprocess.run([str(w) for w in words], check=True, cwd="/", **quiet, **who)

    data = str(folder / "data")
    run(_POSTGRES / "initdb", "-D", data, "-U", "tester", "-A", "trust", "-N")
    options = f"-c listen_addresses='' -c fsync=off -k {folder}"
    run(_POSTGRES / "pg_ctl", "-D", data, "-o", options, "-l", f"{folder}/log", "-w", "start")
    try:
        yield f"postgresql:///postgres?host={folder}&user=tester"
    finally:
        run(_POSTGRES / "pg_ctl", "-D", data, "-m", "immediate", "stop")
        shutil.rmtree(folder, ignore_errors=True)

"""The files of `deploy/orchestrators`, run on nights with and without their files."""

import configparser
import re
import secrets
import shlex
import shutil
import socket
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from dpstream.accounting.errors import PolicyError, RunError, UsageError
from dpstream.pipelines.cli.due import OVERDUE
from dpstream.pipelines.jobs.job import load_job
from dpstream.pipelines.stream.run import run_job
from dpstream.state import open as stores
from tests import guarded
from tests.bench.environments import python_of
from tests.emulator import free_port
from tests.fixed_runs import fix_run_id
from tests.growing import JOB, released
from tests.pipelines.stream.test_completeness import write
from tests.runners.engines import ROOT

FILES = ROOT / "deploy" / "orchestrators"
DAILY = {
    "in/*.KIND": 'raw/date=*/*.csv.gz"\nexpect = "raw/date={day}/*.csv.gz',
    'release_every = "6h"': 'release_every = "1d"',
    "LATE": "0s",
}
DAYS = ["2024-01-01", "2024-01-02", "2024-01-03"]
NIGHTS = [*DAYS[1:], "2024-01-04"]
#: What the DAG says, at the speed of a test and with an end.
FASTER = {
    "retries=8": "retries=1", "minutes=15": "seconds=8", "minutes=10": "seconds=1",
    "hours=1)": "seconds=3)",
    "catchup=True,": "catchup=True, end_date=datetime(2024, 1, 5, tzinfo=UTC),",
}  # fmt: skip


def project(folder: Path, days: list[str]) -> Path:
    """The daily job with the files of some days, and the command `dpstream` beside it."""
    text = JOB
    for old, new in DAILY.items():
        assert old in text
        text = text.replace(old, new)
    folder.mkdir()
    (folder / "dpstream.toml").write_text(text)
    command = folder.parent / "bin" / "dpstream"
    command.parent.mkdir(exist_ok=True)
    command.write_text(
        f'#!/bin/sh\nPYTHONPATH={ROOT} exec {sys.executable} -m tests.fixed_runs "$@"\n'
    )
    command.chmod(0o755)
    for day in days:
        write(folder, day)
    return folder


def placed(text: str, folder: Path) -> str:
    """A file with the places of a test's folder."""
    places = {"/srv/dpstream": folder, "/opt/dpstream/bin": folder.parent / "bin",
              "/var/lib/node_exporter": folder.parent}  # fmt: skip
    for old, new in places.items():
        text = text.replace(old, str(new))
    return text


def as_of(line: str, day: str) -> str:
    """A command line as of a night: its clock is the day's, and it does not wait."""
    if "due daily" in line:
        return line.replace("due daily", f"due daily --as-of {day}")
    assert "--through now --wait 2h" in line
    return line.replace("--through now --wait 2h", f"--through {day} --wait 1s")


def called(command: list[str], **settings: Any) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(command, capture_output=True, text=True, check=False, **settings)


def cron(name: str, day: str, folder: Path) -> int:
    """Run a line of the crontab as cron does; gives the exit code that it mails, 0 for no mail."""
    text = placed((FILES / "crontab").read_text(), folder)
    settings = dict(re.findall(r"^(\w+)=(.*)$", text, re.M))
    (line,) = re.findall(rf"^(?:\S+ +){{5}} *(.*dpstream {name} .*)$", text, re.M)
    assert "%" not in line  # cron's line break
    ended = called(["/bin/sh", "-c", as_of(line, day)], env={"PATH": settings["PATH"]}, cwd="/")
    mail = ended.stdout + ended.stderr
    assert ended.returncode == 0 and (not mail or mail.startswith("exit code ")), mail
    return int(mail.split()[2].strip(":")) if mail else 0


def service(name: str, folder: Path) -> configparser.SectionProxy:
    """The section of a unit that says what it starts."""
    reader = configparser.ConfigParser(interpolation=None)
    reader.optionxform = str  # type: ignore[assignment,method-assign]
    reader.read_string(placed((FILES / f"dpstream-{name}.service").read_text(), folder))
    return reader["Service"]


def systemd(name: str, day: str, folder: Path) -> int:
    """Run a unit's command as systemd does, without a shell; gives its exit code."""
    unit = service(name, folder)
    words = shlex.split(as_of(unit["ExecStart"], day))
    return called(words, env={}, cwd=unit["WorkingDirectory"]).returncode


@pytest.fixture(scope="module")
def complete(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """The releases of one run on all days."""
    folder = project(tmp_path_factory.mktemp("complete") / "job", DAYS)
    fix_run_id(folder)
    run_job(load_job(folder), through=NIGHTS[-1])
    stores.close_all()
    releases = released(folder)
    assert len(releases) == len(DAYS)
    return releases


def through(releases: dict[str, bytes], days: int) -> dict[str, bytes]:
    """The releases of the first so many days."""
    return {name: data for name, data in releases.items() if int(name[7:13]) < days}


@pytest.mark.parametrize("start", [cron, systemd])
def test_a_night_whose_files_are_missing_is_made_up_by_the_next(
    start: Callable[[str, str, Path], int], complete: dict[str, bytes], tmp_path: Path
) -> None:
    folder = project(tmp_path / "job", DAYS[:1])

    def night(day: str) -> list[int]:
        """The exit codes of the run and of the look after it."""
        return [start(name, day, folder) for name in ("run", "due")]

    assert night(NIGHTS[0]) == [0, 0]
    assert night(NIGHTS[1]) == [RunError.exit_code, OVERDUE]
    assert released(folder) == through(complete, 1)
    for day in DAYS[1:]:
        write(folder, day)
    assert night(NIGHTS[2]) == [0, 0]
    assert released(folder) == complete
    assert (tmp_path / "daily.prom").exists()


def test_systemd_accepts_the_units_and_repeats_what_may_end_well(tmp_path: Path) -> None:
    folder = project(tmp_path / "job", [])
    unit = service("run", folder)
    stop = {int(code) for code in unit["RestartPreventExitStatus"].split()}
    assert unit["Restart"] == "on-failure"
    assert stop == {UsageError.exit_code, PolicyError.exit_code}
    program = shutil.which("systemd-analyze")
    if program is None:  # every unit was read above or runs in the test of nights
        return
    paths = []
    for file in sorted(FILES.glob("dpstream-*")):
        text = file.read_text()
        paths.append(tmp_path / file.name)
        paths[-1].write_text(placed(text, folder) if file.suffix == ".service" else text)
    ended = called([program, "verify", "--man=no", *map(str, paths)])
    assert len(paths) == 4 and (ended.returncode, ended.stdout + ended.stderr) == (0, "")


def accepts(port: int) -> bool:
    with closing(socket.socket()) as client:
        return client.connect_ex(("127.0.0.1", port)) == 0


class Airflow:
    """Airflow's scheduler and its server of tasks, with one DAG and a database of their own."""

    def __init__(self, folder: Path, project_folder: Path) -> None:
        self.folder = folder
        (folder / "dags").mkdir(parents=True)
        text = (FILES / "airflow_dag.py").read_text()
        for old, new in FASTER.items():
            assert text.count(old) == 1
            text = text.replace(old, new)
        (folder / "dags" / "daily.py").write_text(text)
        port = free_port()
        address = f"http://127.0.0.1:{port}"
        self._environment = {
            "PATH": f"{project_folder.parent / 'bin'}:/usr/bin:/bin",
            "HOME": str(folder),
            "AIRFLOW_HOME": str(folder),
            "AIRFLOW_VAR_DPSTREAM_PROJECT": str(project_folder),
            "AIRFLOW__CORE__DAGS_FOLDER": str(folder / "dags"),
            "AIRFLOW__CORE__LOAD_EXAMPLES": "false",
            "AIRFLOW__CORE__DAGS_ARE_PAUSED_AT_CREATION": "false",
            "AIRFLOW__CORE__PARALLELISM": "1",
            "AIRFLOW__CORE__EXECUTION_API_SERVER_URL": f"{address}/execution/",
            "AIRFLOW__API__BASE_URL": address,
            "AIRFLOW__API_AUTH__JWT_SECRET": secrets.token_hex(64),
        }
        self._command = [str(python_of("airflow")), "-m", "airflow"]
        self.call("db", "migrate")
        self.call("dags", "reserialize")
        self._processes = list[subprocess.Popen[bytes]]()
        self._start("api-server", "--host=127.0.0.1", f"--port={port}", "--workers=1")
        self.wait(lambda: accepts(port))  # a task that finds no server fails, which costs a try
        self._start("scheduler", "--skip-serve-logs")

    def call(self, *words: str) -> None:
        """A command that ends."""
        ended = called([*self._command, *words], cwd=self.folder, env=self._environment)
        assert ended.returncode == 0, ended.stdout[-3_000:] + ended.stderr[-3_000:]

    def _start(self, *words: str) -> None:
        with (self.folder / "processes.log").open("ab") as log:
            process = guarded.start([*self._command, *words], cwd=self.folder, stdout=log,
                                    stderr=log, env=self._environment)  # fmt: skip
        self._processes.append(process)

    def select(self, query: str) -> list[tuple[Any, ...]]:
        """Rows of Airflow's database."""
        with closing(sqlite3.connect(self.folder / "airflow.db", timeout=60)) as database:
            return database.execute(query).fetchall()

    def runs(self) -> dict[str, str]:
        """The state of each night's run."""
        rows = self.select("select substr(logical_date, 1, 10), state from dag_run order by 1")
        return {night: state for night, state in rows}

    def task(self, night: str, name: str) -> tuple[Any, ...]:
        """State and tries of a night's task, and how often its sensor looked in vain."""
        (row,) = self.select(
            "select t.state, t.try_number, (select count(*) from task_reschedule r where "
            "r.ti_id = t.id) from task_instance t join dag_run d using (run_id) "
            f"where t.task_id = '{name}' and substr(d.logical_date, 1, 10) = '{night}'"
        )
        return row

    def wait(self, until: Callable[[], bool]) -> None:
        end = time.monotonic() + 300
        while not until():
            text = (self.folder / "processes.log").read_text()
            assert time.monotonic() < end, text[-3_000:]
            time.sleep(0.5)

    def close(self) -> None:
        for process in self._processes:
            guarded.kill(process)


@pytest.fixture
def airflow(tmp_path: Path) -> Iterator[Airflow]:
    service = Airflow(tmp_path / "airflow", project(tmp_path / "job", DAYS[:1]))
    try:
        yield service
    finally:
        service.close()


@pytest.mark.slow
def test_airflow_catches_up_three_nights_and_backfills_the_one_that_failed(
    airflow: Airflow, complete: dict[str, bytes], tmp_path: Path
) -> None:
    """The second day's file comes before the retry, the third day's after the last one."""
    folder = tmp_path / "job"
    first, second, third = NIGHTS
    airflow.wait(lambda: airflow.runs().get(second) == "running")
    airflow.wait(lambda: airflow.task(second, "release")[0] in ("up_for_retry", "success"))
    assert released(folder) == through(complete, 1)
    write(folder, DAYS[1])
    airflow.wait(lambda: airflow.runs().get(third) == "failed")
    assert airflow.runs() == {first: "success", second: "success", third: "failed"}
    assert airflow.task(first, "release") == ("success", 1, 0)
    assert airflow.task(second, "release") == ("success", 2, 0)
    assert airflow.task(third, "release") == ("failed", 2, 0)
    state, _, looks = airflow.task(third, "out")
    assert state == "failed" and looks > 0
    assert released(folder) == through(complete, 2)
    write(folder, DAYS[2])
    airflow.call("backfill", "create", "--dag-id=dpstream_daily", f"--from-date={first}",
                 "--to-date=2024-01-05", "--reprocess-behavior=failed")  # fmt: skip
    airflow.wait(lambda: set(airflow.runs().values()) == {"success"})
    assert airflow.task(first, "release")[1] == 1
    assert released(folder) == complete

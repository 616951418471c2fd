"""The command line: exit codes, one clear line for every error, and never a value of data."""

import json
import logging
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import click
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner, Result

from dpstream.accounting.errors import PolicyError, RunError, UsageError
from dpstream.pipelines.cli import main as module
from dpstream.pipelines.cli.main import cli
from dpstream.pipelines.connectors.write import dead_letter_folder
from dpstream.pipelines.formats.encodings import read_releases
from dpstream.pipelines.jobs.job import Job
from tests.golden.pinned import check, of_cases
from tests.pipelines.cli.called import printed
from tests.pipelines.cli.mistakes import visits
from tests.written import read_dead_letters

MakeJob = Callable[..., Job]
GOLDEN = Path(__file__).parents[2] / "golden"
CANARY = "CANARY7741"


@pytest.fixture(autouse=True)
def keep_logging() -> Iterator[None]:
    """`dpstream run` silences the process's logs; other tests need theirs."""
    yield
    logging.disable(logging.NOTSET)


def call(*args: str | Path) -> Result:
    return CliRunner().invoke(cli, [str(a) for a in args])


def edit(job: Job, old: str, new: str) -> Path:
    text = job.path.read_text()
    assert old in text
    job.path.write_text(text.replace(old, new, 1))
    return job.path


MISTAKES = [
    ("epsilon = 6.0", "epsilonn = 6.0"),
    ("epsilon = 6.0", "epsilon = 0"),
    ("delta = 1e-9", "delta = 2"),
    ("contributions = 4", "contributions = 2.5"),
    ("contributions = 4\n", ""),
    ('format = "csv"', 'format = "excel"'),
    ('format = "csv"', 'format = "csv"\nservers = "b:9092"'),
    ("bounds = [0, 10]", "bounds = [10, 0]"),
    (", bounds = [0, 10]", ""),
    ('end = "2024-01-02T00:00:00Z"\n', ""),
    ('start = "2024-01-01T00:00:00Z"', 'start = "yesterday"'),
    ('window = "1d"', 'window = "one day"'),
    ('release_every = "6h"', 'release_every = "7h"'),
    ('release_every = "6h"', 'release_every = "6h"\ntrigger_count = 100'),
    ('window = "1d"', 'session_gap = "10m"'),
    ('window = "1d"', 'window = "1d"\nwatermark_delay = "10m"'),
    ("contributions = 4", 'contributions = 4\nmechanism.mode = "sticky"'),
    ("[job.daily]", "[job.daily"),
    ("[job.daily]", "[jbo.daily]"),
    ("[job.daily]", '[job."each day"]'),
    ("sink =", "snik ="),
    ("sink =", 'store = "mysql://x"\nsink ='),
    ("sink =", 'public_keys = "none.csv"\nsink ='),
]


def test_errors_of_project_files(make_job: MakeJob) -> None:
    blocks = []
    for old, new in MISTAKES:
        result = call("plan", "--project", edit(make_job(), old, new))
        assert result.exit_code in (2, 3)
        assert result.stdout == "" and result.stderr.count("\n") == 1
        blocks.append(f"{old.strip()!r} -> {new!r}: exit {result.exit_code}\n  {result.stderr}")
    check(GOLDEN / "job_errors.txt", "\n".join(blocks))


def test_errors_for_machines(make_job: MakeJob) -> None:
    result = call("plan", "--project", edit(make_job(), "delta = 1e-9", "delta = 2"), "--json")
    assert result.exit_code == 2
    error = printed(result.stderr)
    assert error["field"] == "job.daily.budget.delta" and error["exit_code"] == 2
    assert set(error) == {"error", "exit_code", "field", "rule", "fix"}


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (UsageError("a", "b", "c"), 2),
        (PolicyError("a", "b", "c"), 3),
        (RunError("a", "b", "c"), 4),
        (KeyError(CANARY), 4),
        (ValueError(f"could not convert {CANARY}"), 4),
        (AssertionError(CANARY), 4),
        (MemoryError(CANARY), 4),
        (RecursionError(CANARY), 4),
        (UnicodeDecodeError("utf-8", CANARY.encode(), 0, 1, CANARY), 4),
        (KeyboardInterrupt(CANARY), 4),
    ],
)
@pytest.mark.parametrize("flags", [(), ("--json",)])
def test_exit_codes_andsilence(
    monkeypatch: pytest.MonkeyPatch,
    make_job: MakeJob,
    error: BaseException,
    code: int,
    flags: tuple[str, ...],
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr("dpstream.pipelines.stream.run.run_job", fail)
    monkeypatch.setattr(module, "silence", lambda: None)
    result = call("run", "--project", make_job().path, *flags)
    assert result.exit_code == code
    assert CANARY not in result.output
    assert "MemoryError" not in result.output
    assert "Traceback" not in result.output
    *before, _ = result.stderr.strip().splitlines()
    assert [line.split()[0] for line in before if line] == ["Project", "Account"][: not flags and 2]


def test_help_is_as_recorded() -> None:
    """No description of a command is cut off, and its first example begins with its name."""
    texts = {}
    waiting: list[tuple[tuple[str, ...], click.Command]] = [((), cli)]
    while waiting:
        words, command = waiting.pop(0)
        options = {"terminal_width": 80, "prog_name": "dpstream"}
        result = CliRunner().invoke(cli, [*words, "--help"], **options)  # type: ignore[arg-type]
        assert result.exit_code == 0
        name = " ".join(("dpstream", *words))
        texts[name] = result.stdout
        if isinstance(command, click.Group):
            assert "..." not in result.stdout.partition("Commands:")[2]
            waiting += [((*words, each), command.commands[each]) for each in command.commands]
            continue
        lines = [line.strip() for line in result.stdout.partition("Examples:")[2].splitlines()]
        examples = [line for line in lines if line.startswith("dpstream ")]
        assert f"{examples[0]} ".startswith(f"{name} "), name
    check(GOLDEN / "help.txt", of_cases(texts))


def test_unknown_commands_and_flags_exit_2(make_job: MakeJob) -> None:
    assert call("fly").exit_code == 2
    assert call("plan", "--project", make_job().path, "--fast").exit_code == 2
    assert call("plan", "none", "--project", make_job().path).exit_code == 2
    assert call("plan", "--project", "none.toml").exit_code == 2


def test_plan_reads_no_data(make_job: MakeJob) -> None:
    job = make_job()
    (job.path.parent / "in" / "a.csv").write_text("user,key,time,value\nno, record\n")
    text = call("plan", "--project", job.path)
    assert text.exit_code == 0, text.output
    assert text.stdout.startswith("Can run") and "(6, 1e-09)" in text.stdout
    figures = printed(call("plan", "--project", job.path, "--json").stdout)
    assert figures["plan_hash"] == job.plan.hash


def test_key_new(tmp_path: Path) -> None:
    path = tmp_path / "noise.secret"
    result = call("secret", "new", path)
    assert result.exit_code == 0
    secret = path.read_text().strip()
    assert len(bytes.fromhex(secret)) == 32
    assert path.stat().st_mode & 0o777 == 0o600
    assert secret not in result.output
    again = call("secret", "new", path)
    assert again.exit_code == 2
    assert path.read_text().strip() == secret and secret not in again.output
    assert printed(call("secret", "new", tmp_path / "b.key", "--json").stdout) == {
        "created": "b.key"
    }


def _init(*flags: str) -> Result:
    days = ("--start", "2024-01-01", "--end", "2024-01-03", "--window", "day")
    columns = ("--unit", "user", "--key", "page", "--time", "at")
    return call("init", "visits.parquet", *columns, *days, "--epsilon", "1", *flags)


def _damage(name: str) -> None:
    data = Path(name).read_bytes()
    Path(name).write_bytes(data[:4096] + bytes(len(data) - 4096))


def _replace(old: str, new: str) -> None:
    path = Path("dpstream.toml")
    assert old in path.read_text()
    path.write_text(path.read_text().replace(old, new))


def _workload(text: str) -> None:
    Path("ages.json").write_text(text)


_AGES = ("workload", "plan", "ages.json")
#: What is wrong, the command that meets it, and the exit code.
CAUSES: list[tuple[str, Callable[[], object], tuple[str, ...], int]] = [
    ("no command", lambda: None, ("rnu",), 2),
    ("no option", lambda: None, ("run", "--fersh"), 2),
    ("no job", lambda: None, ("run", "dayly"), 2),
    ("no data", lambda: Path("visits.parquet").unlink(), ("run",), 2),
    ("a field's name", lambda: _replace("window =", "widnow ="), ("run",), 2),
    ("no secret", lambda: Path("visits.secret").unlink(), ("run",), 2),
    ("an open secret", lambda: Path("visits.secret").chmod(0o644), ("run",), 2),
    ("no secret's text", lambda: Path("visits.secret").write_text("none"), ("run",), 2),
    ("no account", lambda: Path("visits.account.db").unlink(), ("run",), 2),
    ("a workload's name", lambda: _workload('{"domian": []}'), _AGES, 2),
    ("a workload's value", lambda: _workload('{"domain": 1, "queries": []}'), _AGES, 2),
    ("a job's name is taken", lambda: None, ("init", "visits.parquet"), 2),
    ("a secret's name is taken", lambda: None, ("secret", "new", "visits.secret"), 2),
    ("an account's name is taken", lambda: None,
     ("account", "create", "visits.account.db", "--unit", "user", "--epsilon", "1", "--delta",
      "1e-9"), 2),
    ("a damaged account", lambda: _damage("visits.account.db"), ("run",), 3),
    ("the limit", lambda: _replace("epsilon = 1.0", "epsilon = 4.0"),
     ("run", "--fresh"), 3),
    ("a damaged store", lambda: _damage("visits.store.db"), ("run",), 3),
    ("another plan's store", lambda: _replace("= 10\n", "= 9\n"), ("run",), 3),
]  # fmt: skip


@pytest.mark.parametrize(("mistake", "command", "code"), [c[1:] for c in CAUSES],
                         ids=[c[0] for c in CAUSES])  # fmt: skip
def test_like_causes_have_one_exit_code(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    mistake: Callable[[], object],
    command: tuple[str, ...],
    code: int,
) -> None:
    monkeypatch.chdir(tmp_path)
    pq.write_table(visits(), "visits.parquet")
    assert _init().exit_code == 0
    if code == 3:  # there is something that the state can forbid
        assert call("run").exit_code == 0
    mistake()
    result = call(*command)
    assert (result.exit_code, "Traceback" in result.output) == (code, False), result.output


def test_doctor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    result = call("doctor", "--json")
    report = printed(result.stdout)
    assert result.exit_code == 0 and report["ready"]
    assert report["packages"]["apache-beam"] == "2.77.0"
    assert report["extras"]["gcp-secrets"]["missing"] == []
    assert report["runners"]["FnApiRunner"] and report["disk"]["fsync"]
    missing = [name for name, extra in report["extras"].items() if extra["missing"]]
    assert len(report["verdict"]) == 2 + len(missing)
    program = tmp_path / "prism"
    program.write_bytes(b"mod\tgithub.com/apache/beam/sdks/v2\tv2.77.0\th1:x\n")
    with monkeypatch.context() as patched:
        patched.setattr("dpstream.pipelines.runners.parts.prism", lambda: program)
        opened = printed(call("doctor", "--json").stdout)
    program.unlink()
    assert opened["runners"]["Prism"] == "2.77.0" and opened["ready"]
    assert (
        "Prism is refused, it lets other machines in: dpstream doctor --fix." in opened["verdict"]
    )
    assert str(tmp_path) not in result.stdout and list(tmp_path.iterdir()) == []
    assert "Ready for local runs." in call("doctor").stdout

    def refuse(*_: object) -> None:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr("dpstream.pipelines.operate.doctor.put_once", refuse)
    broken = call("doctor")
    assert broken.exit_code == 4
    assert "Not ready: the disk" in broken.stdout


def test_run_end_to_end(make_job: MakeJob, tmp_path: Path) -> None:
    job = make_job("csv", sink="csv")
    lines = [
        f"{CANARY}u{i},k{i % 2},2024-01-01T{i % 24:02d}:00:00Z,{i % 5}" for i in range(600)
    ] + [f"{CANARY}u1,k1,{CANARY},1", f"{CANARY}broken"]
    (tmp_path / "in" / "a.csv").write_text("user,key,time,value\n" + "\n".join(lines) + "\n")
    result = call("run", "--project", job.path, "--quiet", "--job_name=test")
    assert result.exit_code == 0, result.output
    assert CANARY not in result.output
    assert "INSECURE" in result.stderr
    table = read_releases(job.sink.path)
    assert set(table.column("key").to_pylist()) == {"k0", "k1"}
    assert read_dead_letters(dead_letter_folder(job)).column("offset").to_pylist() == [600, 601]
    before = {p: p.read_bytes() for p in Path(job.sink.path).rglob("window-*/*.csv")}
    assert len(before) == job.plan.timeline.triggers
    again = call("run", "--project", job.path, "--json")
    assert printed(again.stdout)["resumed"]
    assert {p: p.read_bytes() for p in Path(job.sink.path).rglob("window-*/*.csv")} == before


def test_run_refusals(make_job: MakeJob, tmp_path: Path) -> None:
    job = make_job("csv")
    assert call("run", "--project", job.path, "--quiet").exit_code == 2
    (tmp_path / "in" / "a.csv").write_text(f"user,{CANARY},time,value\n")
    missing = call("run", "--project", job.path, "--quiet")
    assert missing.exit_code == 2 and "column 'key'" in missing.stderr
    assert CANARY not in missing.output
    (tmp_path / "in" / "a.csv").write_text("user,key,time,value\n")
    assert call("run", "--project", job.path, "--quiet", "--runner=Teleport").exit_code == 2
    assert call("run", "--project", job.path, "--quiet").exit_code == 0
    first = min(Path(job.sink.path).rglob("window-*/*.parquet"))
    content = first.read_bytes()
    first.write_bytes(CANARY.encode())
    damaged = call("run", "--project", job.path, "--quiet")
    assert CANARY not in damaged.output and "Traceback" not in damaged.output
    assert damaged.exit_code == 0 and first.read_bytes() == content, damaged.output
    row = pa.Table.from_pylist([{"key": CANARY}], schema=pa.schema({"key": pa.string()}))
    pq.write_table(row, first)
    changed = call("run", "--project", job.path, "--quiet")
    assert CANARY not in changed.output and "Traceback" not in changed.output
    assert changed.exit_code == 3, changed.output


@pytest.mark.parametrize("command", ["doctor", "doctor --json", "account --help"])
def test_a_reader_that_closes_its_end_gets_no_message(command: str) -> None:
    """As `dpstream doctor | head -1`."""
    words = [sys.executable, "-m", "dpstream", *command.split()]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stderr is not None
    process.stdout.close()
    assert process.wait(60) in (0, 1) and process.stderr.read() == ""
    process.stderr.close()


def test_without_stdin_nobody_is_asked(tmp_path: Path) -> None:
    """A service's stdin may be closed, not empty."""
    (tmp_path / "v.csv").write_text("user,page,at\n")
    words = [sys.executable, "-m", "dpstream", "init", str(tmp_path / "v.csv")]
    closed = ["sh", "-c", '"$@" <&-', "sh", *words]
    done = subprocess.run(closed, capture_output=True, text=True, check=False)
    assert done.returncode == 2 and "--unit" in done.stderr


def test_a_pipe_that_breaks_elsewhere_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """A socket of a client, say: only the command's own output may end without a message."""

    def breaks(*args: Any, **more: Any) -> None:
        raise BrokenPipeError(32, "secret")

    monkeypatch.setattr("dpstream.pipelines.operate.doctor.examine", breaks)
    done = call("doctor")
    assert done.exit_code == 4 and "BrokenPipeError" in done.stderr and "secret" not in done.stderr


@pytest.mark.parametrize(
    ("words", "field"),
    [
        (("account", "limit", "shop", "--epsilon", "3"), "--delta"),
        (("sql", "--nosuch"), "--nosuch"),
        (("plan", "--units", "x"), "--units"),
        (("nosuch",), "command"),
    ],
)
def test_options_that_are_refused_are_an_object_with_json(
    words: tuple[str, ...], field: str
) -> None:
    refused = call(*words, "--json")
    error = json.loads(refused.stderr)
    assert (refused.exit_code, error["exit_code"], error["field"]) == (2, 2, field)
    as_text = call(*words)
    assert as_text.exit_code == 2 and "--help" in as_text.stderr and "{" not in as_text.stderr

"""The wheel: one importable name, beside whatever packages its user has, and without extras."""

import email
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import tomlkit
from packaging.requirements import Requirement

from dpstream.accounting.extras import EXTRAS, installing
from tests.docs.pages import README, blocks, lines
from tests.runners.engines import need

ROOT = Path(__file__).parents[2]
ROOMS = ("accounting", "state", "dp_transforms", "pipelines")
PROGRAM = """
import state
import dpstream
from dpstream.state.store import Store
from dpstream import Plan, UsageError, load_job

assert state.MINE and Store.__module__ == "dpstream.state.store"
assert not [name for name in dpstream.__all__ if getattr(dpstream, name) is None]
try:
    load_job("none.toml")
except UsageError as error:
    print(error.field.split()[0], dpstream.__file__)
for name in ("accounting", "dp_transforms", "pipelines"):
    try:
        __import__(name)
    except ImportError:
        continue
    raise SystemExit(f"{name} is importable")
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What `pip wheel` makes of the files that git knows, built as the Dockerfile does."""
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheels")
    files = ("pyproject.toml", "setup.py", "README.md", "LICENSE")
    listed = subprocess.run(
        ["git", "ls-files", "-z", "dpstream", *ROOMS, *files],
        cwd=ROOT, capture_output=True, check=True, text=True,
    )  # fmt: skip
    for name in filter(None, listed.stdout.split("\0")):
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        if (ROOT / name).is_symlink():
            (source / name).symlink_to((ROOT / name).readlink())
        else:
            (source / name).write_bytes((ROOT / name).read_bytes())
    build = ["-m", "pip", "wheel", "--quiet", "--no-index", "--no-deps", "--no-build-isolation"]
    subprocess.run([sys.executable, *build, "--wheel-dir", out, source], check=True)
    [built] = out.glob("*.whl")
    return built


def test_only_one_name_is_installed(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    assert {name.split("/")[0] for name in names} == {"dpstream", "dpstream-0.1.0.dist-info"}
    modules = {
        f"dpstream/{path.relative_to(ROOT)}"
        for room in ROOMS
        for path in (ROOT / room).rglob("*.py")
    }
    assert {name for name in names if name.endswith(".py")} == {
        *modules, "dpstream/__init__.py", "dpstream/__main__.py"
    }  # fmt: skip
    assert {"dpstream/py.typed", "dpstream/pipelines/examples/flights.toml"} <= names


def test_it_has_every_extra_that_a_fix_installs(wheel: Path) -> None:
    """`pip install 'dpstream[NAME]'` adds packages, of the names that the fixes print."""
    [metadata] = (n for n in zipfile.ZipFile(wheel).namelist() if n.endswith("/METADATA"))
    message = email.message_from_bytes(zipfile.ZipFile(wheel).read(metadata))
    needs = [Requirement(line) for line in message.get_all("Requires-Dist", [])]
    assert set(EXTRAS) <= set(message.get_all("Provides-Extra", []))
    for name in EXTRAS:
        assert f"[{name}]" in shlex.split(installing(name))[-1]
        added = [n for n in needs if n.marker and n.marker.evaluate({"extra": name})
                 and not n.marker.evaluate({"extra": ""})]  # fmt: skip
        assert added, name


def test_it_stands_beside_a_users_own_packages(wheel: Path, tmp_path: Path) -> None:
    """Without this environment's own install: only the wheel and what it depends on."""
    installed = tmp_path / "installed"
    zipfile.ZipFile(wheel).extractall(installed)
    (tmp_path / "mine" / "state").mkdir(parents=True)
    (tmp_path / "mine" / "state" / "__init__.py").write_text("MINE = True\n")
    path = os.pathsep.join([str(installed), *(p for p in sys.path if p.endswith("site-packages"))])
    ran = subprocess.run(
        [sys.executable, "-S", "-W", "ignore", "-c", PROGRAM], cwd=tmp_path / "mine",
        env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.split() == ["none.toml", str(installed / "dpstream" / "__init__.py")]


#: Every command's help, without a process each; prints the commands whose help failed.
HELP = """
import click, json
from click.testing import CliRunner
from dpstream.pipelines.cli.main import cli

def walk(command, path):
    yield path
    for name, sub in (command.commands.items() if isinstance(command, click.Group) else ()):
        yield from walk(sub, (*path, name))

paths = list(walk(cli, ()))
codes = {" ".join(path): CliRunner().invoke(cli, [*path, "--help"]).exit_code for path in paths}
print(json.dumps(codes))
"""
#: Commands without a process each; prints what each answered.
CALLS = """
import json, shlex, sys
from click.testing import CliRunner
from dpstream.pipelines.cli.main import cli

done = {line: CliRunner().invoke(cli, shlex.split(line)[1:]) for line in sys.argv[1:]}
print(json.dumps({line: [result.exit_code, result.stderr] for line, result in done.items()}))
"""
KAFKA = {"servers": "localhost:1", "topic": "t"}
SPANNER = "spanner://p/i/d"
#: Changes of the README's project: fields by their dotted names, and their values as TOML.
PROJECTS: dict[str, dict[str, Any]] = {
    "from-kafka": {"table.visits.topic": "t", "table.visits.servers": "localhost:1"},
    "from-pubsub": {"table.visits.subscription": "projects/p/subscriptions/s"},
    "from-query": {"job.daily.query": "pages.sql"},
    "to-kafka": {"job.daily.sink": {"kind": "kafka", **KAFKA}},
    "to-pubsub": {"job.daily.sink": {"kind": "pubsub", "topic": "projects/p/topics/t"}},
    "to-bigquery": {"job.daily.sink": {"kind": "bigquery", "table": "p.d.t"}},
    "in-spanner": {"job.daily.store": SPANNER},
    "with-gcp": {"data_set.visits.secret": "gcp:projects/p/secrets/s/versions/1"},
    "charged-in-spanner": {"data_set.visits.account": {"path": SPANNER, "id": "0acc0acc0acc0acc"}},
}
#: A command, and the extra that it needs.  Each is refused before anything is charged.
NEEDS = (
    ("dpstream demo", "demo"),
    ("dpstream sql --project none.toml 'SELECT 1'", "sql"),
    ("dpstream sql --project none.toml", "sql"),
    ("dpstream sql --check --project none.toml", "sql"),
    ("dpstream sql --stream daily 'SELECT 1'", "sql"),
    ("dpstream plan --project from-query.toml", "sql"),
    ("dpstream run --project from-query.toml", "sql"),
    ("dpstream run --project from-kafka.toml", "kafka"),
    ("dpstream state init --project from-kafka.toml", "kafka"),
    ("dpstream check --project from-query.toml", "sql"),
    ("dpstream run --project to-kafka.toml", "kafka"),
    ("dpstream report --project from-query.toml --out r.html", "sql"),
    ("dpstream run --project from-pubsub.toml", "pubsub"),
    ("dpstream run --project to-pubsub.toml", "pubsub"),
    ("dpstream run --project to-bigquery.toml", "bigquery"),
    ("dpstream run --project in-spanner.toml", "spanner"),
    ("dpstream state info --project in-spanner.toml", "spanner"),
    ("dpstream run --project charged-in-spanner.toml", "spanner"),
    (f"dpstream account show {SPANNER}", "spanner"),
    (f"dpstream account create {SPANNER} --data-set d --unit u --epsilon 1 --delta 1e-6",
     "spanner"),
    ("dpstream secret check --project with-gcp.toml", "gcp-secrets"),
    ("dpstream run --project with-gcp.toml", "gcp-secrets"),
    ("dpstream run daily --runner=DataflowRunner --gcp-project=p --region=r "
     "--temp_location=gs://b/f --sdk_container_image=i", "dataflow"),
    ("python -c 'import dpstream; dpstream.connect'", "sql"),
    ("python answer.py", "pandas"),
)  # fmt: skip
ANSWER = """
import dpstream
import pyarrow.parquet as pq

table = pq.read_table("visits.parquet")
answer = dpstream.count(table, unit="user", epsilon=1.0)
print(answer)
answer.to_pandas()
"""
SESSION = ("init", "change", "close")


def test_the_description_shows_nothing_broken(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as content:
        [name] = [one for one in content.namelist() if one.endswith(".dist-info/METADATA")]
        text = content.read(name).decode()
    assert "## What is promised" in text and "dpstream.histogram(" in text
    assert [link for link in re.findall(r"\]\(([^)]*)\)", text) if "://" not in link] == []


class Plain:
    """A fresh environment with the wheel and what it depends on, and nothing else."""

    def __init__(self, wheel: Path, folder: Path, python: str) -> None:
        uv = str(Path(sys.executable).parent / "uv")
        self.bin, self.folder = folder / "env" / "bin", folder / "work"
        self.folder.mkdir()
        clean = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")
        self.env = {name: value for name, value in os.environ.items() if name not in clean}
        self.env["PATH"] = os.pathsep.join([str(self.bin), "/usr/bin", "/bin"])
        make = ["venv", "--quiet", "--python", python, str(folder / "env")]
        subprocess.run([uv, *make], check=True, env=self.env)
        fill = ["pip", "install", "--quiet", "--python", str(self.bin / "python")]
        pins = ["--constraint", str(ROOT / "requirements.lock")]
        subprocess.run([uv, *fill, *pins, str(wheel)], check=True, env=self.env)

    def run(self, *words: str) -> subprocess.CompletedProcess[str]:
        """A command as its user types it, in the work folder."""
        return subprocess.run(
            words, cwd=self.folder, env=self.env, capture_output=True, text=True, check=False,
            stdin=subprocess.DEVNULL,
        )  # fmt: skip

    def follow_readme(self) -> None:
        """The README's four commands and its job, on the data of the first job's page."""
        [data, *_] = (b.text for b in blocks(FIRST_JOB.read_text()) if b.language == "python")
        assert self.run("python", "-c", data).returncode == 0
        shell = [b for b in blocks(README.read_text()) if b.mark == "run" and b.language == "sh"]
        typed = [words for block in shell for words in lines(block.text)]
        assert [words[1] for words in typed[:4]] == ["init", "plan", "run", "report"]
        for words in typed:
            done = self.run(*words)
            assert done.returncode == 0, (words, done.stderr)
        assert (
            list(self.folder.glob("**/trigger-*.parquet")) and (self.folder / "daily.html").exists()
        )


FIRST_JOB = ROOT / "docs" / "start" / "first-job.md"


def assert_names(extra: str, line: str) -> None:
    """An error's line has the extra's name and pip's command for it."""
    assert f"`{extra}`" in line and re.search(rf"pip install '.*\[{extra}\]", line), line


def python_of(version: str) -> str | None:
    """A Python of a version: on the path, or one of pyenv's."""
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    places = [shutil.which(f"python{version}"), *sorted(pyenv.glob(f"{version}.*/bin/python"))]
    for place in (place for place in places if place is not None):
        shows = subprocess.run([place, "--version"], capture_output=True, text=True, check=False)
        if shows.stdout.startswith(f"Python {version}."):
            return str(place)
    return None


@pytest.mark.slow
@pytest.mark.parametrize("version", ["3.12", "3.13"])
def test_other_versions_of_python(wheel: Path, tmp_path: Path, version: str) -> None:
    """The pins of the lock install there, and the README's commands run."""
    place = python_of(version)
    need(place, f"Python {version} is missing")
    assert place is not None
    plain = Plain(wheel, tmp_path, place)
    assert plain.run("python", "--version").stdout.startswith(f"Python {version}.")
    codes = json.loads(plain.run("python", "-W", "ignore", "-c", HELP).stdout)
    assert set(codes.values()) == {0}, codes
    assert json.loads(plain.run("dpstream", "doctor", "--json").stdout)["ready"]
    plain.follow_readme()


def changed(text: str, changes: Mapping[str, object]) -> str:
    """A project file's text with other values; a table that gets another place loses its own."""
    sections = tomllib.loads(text)
    for field, value in changes.items():
        kind, name, last = field.split(".")
        if kind == "table":
            sections[kind][name].pop("path", None)
            sections["job"]["daily"]["max_skew"] = "1s"
        sections[kind][name][last] = value
    return tomlkit.dumps(sections)


def test_a_plain_install(wheel: Path, tmp_path: Path) -> None:
    """Without extras: all help, doctor, the README's commands, and what is missing by name."""
    plain = Plain(wheel, tmp_path, sys.executable)
    codes = json.loads(plain.run("python", "-c", HELP).stdout)
    assert len(codes) > 36 and set(codes.values()) == {0}, codes
    doctor = plain.run("dpstream", "doctor", "--json")
    report = json.loads(doctor.stdout)
    assert doctor.returncode == 0 and report["ready"], report["verdict"]
    for extra, entry in report["extras"].items():
        assert entry["missing"] == list(EXTRAS[extra].modules), extra
        assert any(f"[{extra}]" in line for line in report["verdict"])
    plain.follow_readme()
    (plain.folder / "answer.py").write_text(ANSWER)
    (plain.folder / "pages.sql").write_text("SELECT page, seconds FROM visits")
    text = (plain.folder / "dpstream.toml").read_text()
    for name, changes in PROJECTS.items():
        own = {
            "job.daily.store": f"{name}.store.db",
            "job.daily.sink": {"kind": "parquet", "path": f"releases/{name}"},
        }
        (plain.folder / f"{name}.toml").write_text(changed(text, own | changes))
    subcommands = {name for name in codes if name.startswith("table ")}
    assert subcommands == {f"table {name}" for name in SESSION}
    needs = {**dict(NEEDS), **{f"dpstream {name} none.toml": "sql" for name in subcommands}}
    assert set(needs.values()) == set(EXTRAS) - {"yaml"}, "Beam YAML is Beam's own command"
    before = (plain.folder / "visits.account.db").read_bytes()
    called = json.loads(plain.run("python", "-c", CALLS, *(n for n in needs if n[0] == "d")).stdout)
    for command, (code, error) in called.items():
        assert code == 2 and "Traceback" not in error, (command, code, error)
        assert_names(needs[command], error.splitlines()[-1])
    for command in set(needs) - set(called):
        assert_names(needs[command], plain.run(*shlex.split(command)).stderr.splitlines()[-1])
    assert plain.run("dpstream", "sql", "none.toml").returncode == 2, "as a process, too"
    assert (plain.folder / "visits.account.db").read_bytes() == before, "nothing was charged"

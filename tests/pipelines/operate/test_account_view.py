"""``dpstream account show``: entries, what they spend together, what is left."""

import contextlib
import importlib.metadata
import json
import math
import re
import shutil
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner, Result

from dpstream.accounting.errors import PolicyError
from dpstream.accounting.figures import down
from dpstream.accounting.gaussian import epsilon_of, mu_of
from dpstream.dp_transforms.skipping import exhausted
from dpstream.pipelines.cli.main import cli
from dpstream.pipelines.operate import doctor
from dpstream.pipelines.operate.doctor import examine, installed
from dpstream.pipelines.runners import parts, prism_build
from dpstream.pipelines.stream.run import run_job
from dpstream.state import open as stores
from dpstream.state.ledger.contract import AnswerLog, Decision
from dpstream.state.ledger.events import Charge
from dpstream.state.ledger.open import history_of, read_ledger
from dpstream.state.sqlite.store import SqliteStore
from tests import accounts
from tests.audit.replays import new_place, text_of
from tests.fixed import fixed_date
from tests.golden.refusals import Refused
from tests.kafka_broker import missing
from tests.pipelines.operate.test_state_admin import (
    DAYS,
    TEXT,
    done,
    files,
    job,
    run,
    stop_after,
    write_input,
)

__all__ = ["job"]

MU = mu_of(1.0, 0.6e-3)


def stream(run: int, epoch: int = 0) -> Charge:
    return Charge(f"{run:032x}", "plan", accounts.USER, 1.0, 1e-3, MU, 0.4e-3, "stream", epoch)


TABLE = Charge("5e" * 16, "q", accounts.USER, 0.5, 0.0, None, 0.0, "table")
CHARGES = (stream(1), stream(1, 1), TABLE)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """An account of three charges."""
    place = tmp_path / "book" / "ledger.db"
    ledger = accounts.opened(place, "visits", limit=(4.0, 0.004))
    for charge in CHARGES:
        ledger.charge(charge)
    ledger.close()
    return place


def call(*args: object) -> Result:
    return CliRunner().invoke(cli, ["account", "show", *(str(a) for a in args)])


def view_of(*args: object) -> dict[str, Any]:
    result = call(*args, "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def test_a_charge_has_the_date_of_its_entry(tmp_path: Path) -> None:
    """Of a run and of an answer; a charge that an older build wrote has none."""
    place = tmp_path / "book" / "ledger.db"
    ledger = accounts.opened(place, "visits", limit=(4.0, 0.004))
    with fixed_date():
        ledger.charge(stream(1))
        answered = AnswerLog(ledger, "table").begin("q", lambda _, __: Decision(TABLE))
    with ledger.transaction():
        ledger.append(stream(2))
    assert answered.charge == ledger.entries()[1]
    ledger.close()
    dates = [entry["at"] for entry in view_of(place)["entries"][1:]]
    assert dates == ["2024-01-05T00:00:00Z", "2024-01-05T00:00:00Z", None]
    assert call(place).stdout.count("  2024-01-05T00:00:00Z  (") == 2


def test_a_charge_is_named_after_what_was_run(tmp_path: Path) -> None:
    """A job, tables or an analyst: in a column of its own, which an account without names lacks."""
    place = tmp_path / "ledger.db"
    ledger = accounts.opened(place, "visits", limit=(4.0, 0.004))
    ledger.charge(TABLE)
    assert not view_of(place)["entries"][1]["label"]
    without = call(place).stdout
    ledger.charge(msgspec.structs.replace(stream(1), label="daily"))
    ledger.close()
    assert [entry["label"] for entry in view_of(place)["entries"][1:]] == ["", "daily"]
    lines = {line.split()[1]: line for line in call(place).stdout.splitlines() if " (" in line}
    assert lines["stream"].index(f"{1:032x}") == lines["table"].index(TABLE.run_id)
    assert f"stream   daily  {1:032x}" in lines["stream"] and f"table    {TABLE.run_id}" in without


def test_what_an_account_holds(path: Path) -> None:
    account = view_of(path)
    assert (account["id"], account["data_set"]) == (accounts.ID, "visits")
    assert account["unit"] == {
        "name": "user",
        "type": "string",
        "text": "user (string), all records",
    }
    assert account["head"]["seq"] == 4 and account["charges"] == 3
    first, *rest = account["entries"]
    assert first["event"] == "created" and first["limit"] == [4.0, 0.004]
    assert [(e["event"], e["kind"], e["epoch"], e["mu"]) for e in rest] == [
        ("charge", "stream", 0, MU), ("charge", "stream", 1, MU), ("charge", "table", 0, None),
    ]  # fmt: skip
    # The plain epsilon comes on top of the Gaussians'.
    together = 0.5 + epsilon_of(math.sqrt(2) * MU, 4e-3 - 0.8e-3)
    assert account["spent"] == {"epsilon": pytest.approx(together), "delta": 4e-3}


def test_what_is_left_fits_and_no_more(path: Path) -> None:
    account = view_of(path)
    left = account["left"]
    for part, more in (("epsilon", 1e-6), ("mu", 1e-4)):
        for factor, fits in ((1 - more, True), (1 + more, False)):
            figures: tuple[float, float, float | None] = (left["epsilon"] * factor, 0.0, None)
            if part == "mu":
                figures = (99.0, 0.5, left["mu"] * factor)
            one = Charge("aa" * 16, "p", accounts.USER, *figures, 0.0)
            with contextlib.closing(accounts.opened(path)) as ledger:
                if fits:
                    assert ledger.history().check([one])
                else:
                    with pytest.raises(PolicyError, match=r"account\.limit"):
                        ledger.history().check([one])
    text = call(path).stdout
    assert f"epsilon {down(left['epsilon'])}" in text and "epsilon 4" in text
    assert "epoch 1" in text and accounts.ID in text
    accounts.set_limit(path, (1.0, 0.0005))
    used_up = call(path).stdout
    assert "more than any epsilon" in used_up and "epsilon 0," in used_up
    assert "guarantees nothing" in used_up
    assert view_of(path)["entries"][-1]["event"] == "limit"


def test_zcdp_is_shown_and_never_rounded_down(tmp_path: Path) -> None:
    place = tmp_path / "ledger.db"
    ledger = accounts.opened(place, "cells", limit=(9.0, 1e-6))
    rho = 0.123456789
    ledger.charge(Charge("7a" * 16, "t", accounts.USER, 9.0, 1e-9, None, 0.0, "table", rho=rho))
    ledger.charge(TABLE)
    ledger.close()
    account = view_of(place)
    entry, left = account["entries"][1], account["left"]["rho"]
    assert entry["kind"] == "table" and entry["rho"] == rho and entry["mu"] is None
    one = Charge("7b" * 16, "t", accounts.USER, 9.0, 1e-9, None, 0.0, rho=left)
    assert history_of(read_ledger(place)).check([one])
    text = call(place).stdout
    (figure,) = re.findall(r"rho (\S+)\n.*table", text)
    assert float(figure) >= rho and float(figure) == pytest.approx(rho, rel=1e-3)
    (figure,) = re.findall(r"zCDP of rho (\S+);", text)
    assert 0 < float(figure) <= left


def test_the_account_of_a_data_set(path: Path, tmp_path: Path) -> None:
    project = tmp_path / "dpstream.toml"
    accounts.write(project, text_of())
    for named in ((), ("visits",)):
        account = view_of(*named, "--project", project)
        assert account["limit"] == {"epsilon": 40.0, "delta": 0.05}
        assert account["data_set"] == "visits"
        assert account["charges"] == 3 and account["left"]["epsilon"] > 20
    text, before = project.read_text(), path.read_bytes()
    for old, new, field in (
        (accounts.ID, "f" * 16, "account.id"), ("[data_set.visits]", "[data_set.clicks]", "data_"),
        ("book/", "none/", "account.path"), (", id = ", ", di = ", "data_set.visits.account"),
    ):  # fmt: skip
        project.write_text(text.replace(old, new))
        result = call("--project", project)
        assert result.exit_code in (2, 3) and field in result.stderr, result.output
    assert path.read_bytes() == before and not (tmp_path / "none").exists()


def test_refusals(tmp_path: Path) -> None:
    accounts.write(tmp_path / "dpstream.toml", text_of(account=False))
    without = call("--project", tmp_path)
    assert without.exit_code == 2 and "account" in without.stderr
    result = call(tmp_path / "missing.db")
    assert result.exit_code == 2 and ": FILE: " in result.stderr, result.output


# What is given up with ``--abandon``: its units have nothing left, and what is left goes on.


@pytest.mark.parametrize(("skip", "count"), [("false", 9), ("true", exhausted(9))])
def test_abandoned_units_are_exhausted(job: Path, tmp_path: Path, skip: str, count: int) -> None:
    """Where the run skips, its counter of weights is used up like C."""
    text = TEXT.replace("shards = 2", f"shards = 2\nmechanism.skip = {skip}")
    accounts.write(job, text)
    stop_after(job, 1)
    done("backup", job, "--out", tmp_path / "b")
    accounts.write(job, text.replace("epsilon = 22.0", "epsilon = 300.0"))
    done(
        "restore",
        "pages",
        job,
        tmp_path / "b",
        "--replace",
        "--abandon",
        "--now",
        "2024-01-01T00:00:00Z",
    )
    store = SqliteStore(tmp_path / "state" / "s.db", pa.schema([pa.field("page", pa.string())]), 1)
    for shard in (0, 1):
        units = store.unit_shard(shard)
        assert units.table.size > 10
        assert set(units.counts[: units.table.size].tolist()) == {count}
        # BOUND had decided the whole input (up to a test, where it waits), so all that is given up.
        assert units.decided == units.forgotten
        assert (units.decided == 4 * DAYS) is (skip == "false")
    store.close()


@pytest.mark.parametrize("commits", [2, 5, 9])
def test_what_skips_goes_on_when_a_window_is_given_up_in_its_midst(
    job: Path, tmp_path: Path, commits: int
) -> None:
    """At any test of a window: what is left has one value, and a restart repeats it."""
    skip = "mechanism = { skip = true, tests = [1, 3, 4], weights = { offset = 1, power = 2 } }"
    accounts.write(
        job,
        TEXT.replace("shards = 2", f"shards = 2\n{skip}").replace(
            "epsilon = 22.0", "epsilon = 300.0"
        ),
    )
    late = (f"{user},p{user % 3},2024-01-0{day}T05:00:00Z" for user in range(90, 160)
            for day in (3, 4))  # fmt: skip
    write_input(tmp_path, "\n".join(late) + "\n")
    stop_after(job, commits)
    out = tmp_path / "out"
    before = files(out) if out.exists() else {}
    done("backup", job, "--out", tmp_path / "b")
    now = "2024-01-02T09:00:00Z"
    done("restore", "pages", job, tmp_path / "b", "--replace", "--abandon", "--now", now)
    run(job)
    stores.close_all()
    after = files(out)
    assert {name: after[name] for name in before} == before
    new = {Path(name).parent.name for name in set(after) - set(before)}
    assert new == {"window-000002", "window-000003"} and len(set(after) - set(before)) == 8
    # New users are counted, with weights of their own: keys are selected in the new epoch.
    last = pq.read_table(out / "window-000003", partitioning=None)
    assert set(last.column("page").to_pylist()) == {"p0", "p1", "p2"}
    # What was committed before the loss and had not come to the sink is published now.
    assert run(job).resumed
    stores.close_all()
    all_files = files(out)
    assert {name: all_files[name] for name in after} == after
    done("releases", job, "--out", tmp_path / "again")
    assert files(tmp_path / "again") == all_files


# What a machine can run: versions by name, faults in words, no path.


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

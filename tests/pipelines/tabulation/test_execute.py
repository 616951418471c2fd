"""Charge, draw, commit, publish: once, whole, and the same bytes again, on every runner."""

import json
import os
import shutil
import stat
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from dpstream.accounting.errors import PolicyError, RunError
from dpstream.dp_transforms.noise.secret_source import SecretSource
from dpstream.pipelines.ask.draft import MANIFEST, decoded
from dpstream.pipelines.ask.folder import Archive
from dpstream.pipelines.runners.bounded import Runner
from dpstream.pipelines.tabulation import execute as module
from dpstream.pipelines.tabulation import private
from dpstream.pipelines.tabulation.config import Choice
from dpstream.pipelines.tabulation.execute import Execution, execute
from dpstream.pipelines.tabulation.inputs import prepared
from dpstream.pipelines.tabulation.private import pieces
from tests.fixed import fixed_run_ids
from tests.golden.pinned import check, of_refusals
from tests.golden.refusals import Refused
from tests.pipelines.cli.called import call
from tests.pipelines.cli.test_plans_and_charges import acceptance, census, same_refusal
from tests.pipelines.tabulation.office import (
    Office,
    charges,
    content,
    executed,
    ledger_of,
    left_over,
    order,
)
from tests.runners.engines import need_flink


def test_an_execution_is_charged_once_and_answered_from_what_stands(
    made: Office, tmp_path: Path
) -> None:
    place, out = ledger_of(tmp_path), tmp_path / "out"
    first = executed(made, out, ledger=place)
    assert first.charged and first.drawn and left_over(tmp_path) == []
    [charge] = charges(tmp_path)
    plan = prepared(order(made, out).inputs).plan
    assert charge.kind == "table" and charge.plan_hash == plan.hash == first.manifest.plan_hash
    assert charge.run_id == first.manifest.run_id and charge.rho == plan.cost().rho is not None
    assert first.manifest.insecure and decoded((out / MANIFEST).read_bytes()) == first.manifest
    files = content(out)
    assert {name for name in files if name != MANIFEST} == set(first.manifest.files)
    assert stat.S_IMODE(os.stat(out).st_mode) & 0o500 == 0o500
    again = executed(made, out, ledger=place)
    assert not again.charged and not again.drawn and again.manifest == first.manifest
    # Gone, or wanted elsewhere: the same bytes, at no charge.
    shutil.rmtree(out)
    for where in (out, tmp_path / "further" / "out"):
        redone = executed(made, where, ledger=place)
        assert not redone.drawn and not redone.charged and content(where) == files
    assert charges(tmp_path) == [charge]


def test_how_the_parameters_are_written_is_no_part_of_the_question(
    spoilt: Office, tmp_path: Path
) -> None:
    """Space, the order of fields, other spellings of a number, and levels that are off."""
    place, path = ledger_of(tmp_path), spoilt.path("config.json")
    first = executed(spoilt, tmp_path / "out", ledger=place)
    config = json.loads(path.read_text())
    fields = dict(reversed(config.items()))
    fields |= {name: repr(value) for name, value in fields.items() if type(value) is float
               and name != "zero_suppression_chance"}  # fmt: skip
    fields["state_filter_us"] = fields["state_filter_us"][::-1]
    path.write_text(json.dumps(fields, indent=7))
    again = executed(spoilt, tmp_path / "out", ledger=place)
    assert not again.charged and again.manifest == first.manifest
    path.write_text(json.dumps(fields | {"allow_negative_counts": False}))
    assert executed(spoilt, tmp_path / "other", ledger=place).charged
    assert len(charges(tmp_path)) == 2


def test_fresh_is_other_noise_and_another_charge(made: Office, tmp_path: Path) -> None:
    place = ledger_of(tmp_path)
    executed(made, tmp_path / "a", ledger=place)
    fresh = executed(made, tmp_path / "b", ledger=place, fresh=True)
    assert fresh.charged and len(charges(tmp_path)) == 2
    a, b = content(tmp_path / "a"), content(tmp_path / "b")
    assert a.keys() == b.keys() and a["t1/tract-2-000.csv"] != b["t1/tract-2-000.csv"]


def test_without_a_ledger_the_output_is_what_is_kept(made: Office, tmp_path: Path) -> None:
    first = executed(made, tmp_path / "out")
    assert first.drawn and not first.charged and not executed(made, tmp_path / "out").drawn
    other = executed(made, tmp_path / "other")  # nobody knows of the first one
    assert other.manifest.run_id != first.manifest.run_id


def test_what_is_refused_is_not_charged(made: Office, spoilt: Office, tmp_path: Path) -> None:
    """Nothing is charged, drawn or left, and what stands in OUT is as it was."""
    place, poor = ledger_of(tmp_path), ledger_of(tmp_path / "poor", epsilon=0.5)
    out, alone, damaged, gone = (tmp_path / name for name in ("out", "alone", "damaged", "gone"))
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "file").write_text("dear to me")
    executed(made, out, ledger=place)
    for folder in (alone, damaged):
        executed(made, folder)
    path = damaged / "t1" / "usa-1-000.csv"
    was = path.read_bytes()
    path.write_bytes(was.replace(b"|", b"|9", 1))
    executed(made, gone / "out", ledger=ledger_of(gone))
    shutil.rmtree(gone / "out")
    shutil.rmtree(gone / "ledger.db.answers")
    spoilt.configure(max_race_codes=9)
    other = order(made, out, ledger=place)._replace(secret=SecretSource(None, "1f" * 32))
    new, before = tmp_path / "new", {p: p.read_bytes() for p in tmp_path.rglob("*.csv")}
    calls: dict[str, Callable[[], object]] = {
        "fresh where tables are": lambda: executed(made, out, ledger=place, fresh=True),
        "fresh without an account": lambda: executed(made, alone, fresh=True),
        "too much": lambda: executed(made, new, ledger=poor),
        "something else": lambda: executed(made, tmp_path / "mine", ledger=place),
        "another key": lambda: execute(other),
        "a fault": lambda: executed(spoilt, new, ledger=place),
        "a damaged output without an account": lambda: executed(made, damaged),
        "no archive": lambda: executed(made, gone / "out", ledger=ledger_of(gone)),
        "letters in OUT": lambda: executed(made, new, ledger=place, dead_letter=new),
        "letters below OUT": lambda: executed(made, new, ledger=place, dead_letter=new / "refused"),
        **{name: partial(executed, made, new, ledger=place, runner=Runner(name))
           for name in ("DataflowRunner", "NoRunner")},
    }  # fmt: skip
    check(Path(__file__).with_name("refusals_execute.txt"), of_refusals(calls))
    assert [len(charges(folder)) for folder in (tmp_path, tmp_path / "poor", gone)] == [1, 0, 1]
    assert {p: p.read_bytes() for p in tmp_path.rglob("*.csv")} == before
    assert not new.exists() and left_over(tmp_path) == []
    path.write_bytes(was)
    assert not executed(made, damaged).drawn
    assert executed(made, gone / "out", ledger=ledger_of(gone), fresh=True).charged


def test_nothing_is_parsed_before_the_charge(
    made: Office, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refused: Refused
) -> None:
    place, out = ledger_of(tmp_path), tmp_path / "out"
    read = private.read_records

    def fails(*_: Any) -> Any:
        assert len(charges(tmp_path)) == 1
        raise RunError("disk", "is full", "make room")

    monkeypatch.setattr(module, "read_records", fails)
    refused(executed, made, out, ledger=place)
    [charge] = charges(tmp_path)
    assert not out.exists()
    monkeypatch.setattr(module, "read_records", read)
    execution = executed(made, out, ledger=place)
    assert execution.manifest.run_id == charge.run_id and not execution.charged


def test_what_was_cut_off_continues_on_the_records_there_are(
    spoilt: Office, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing was shown, so that no record is held to those of the cut-off attempt."""
    place, out = ledger_of(tmp_path), tmp_path / "out"
    read = private.read_records

    def cut_off(*_: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(module, "read_records", cut_off)
    with pytest.raises(KeyboardInterrupt):
        executed(spoilt, out, ledger=place)
    monkeypatch.setattr(module, "read_records", read)
    assert not out.exists() and left_over(tmp_path) == []
    spoilt.spoil("person-records.txt", lambda lines: lines[:-1])
    first = executed(spoilt, out, ledger=place)
    assert first.drawn and not first.charged and len(charges(tmp_path)) == 1
    files = content(out)
    spoilt.spoil("person-records.txt", lambda lines: lines[:-1])
    again = executed(spoilt, out, ledger=place)
    assert not again.drawn and not again.charged and content(out) == files


def test_a_file_that_changes_during_the_run_is_noticed(
    spoilt: Office, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refused: Refused
) -> None:
    real = Archive.seal

    def late(self: Any, draft: Path, names: Any) -> Any:
        path = spoilt.path("person-records.txt")
        path.write_text(path.read_text() + "\n")
        return real(self, draft, names)

    monkeypatch.setattr(Archive, "seal", late)
    caught = refused(lambda: executed(spoilt, tmp_path / "out", ledger=ledger_of(tmp_path)))
    assert caught.field == "input" and not (tmp_path / "out").exists()


def test_records_with_a_fault_are_set_aside_or_refuse_the_file(
    spoilt: Office, tmp_path: Path
) -> None:
    def age(lines: list[str]) -> None:
        lines[3] = "|".join(["200", *lines[3].split("|")[1:]])

    spoilt.spoil("person-records.txt", age)
    place = ledger_of(tmp_path)
    with pytest.raises(PolicyError) as refused:
        executed(spoilt, tmp_path / "out", ledger=place, strict=True)
    assert "200" not in str(refused.value)
    assert not (tmp_path / "out").exists() and not (tmp_path / "dead_letter").exists()
    execution = executed(spoilt, tmp_path / "out", ledger=place)
    assert not execution.charged  # the refusal was what the charge bought so far
    [letter] = (tmp_path / "dead_letter" / "out").iterdir()
    assert stat.S_IMODE(os.stat(letter).st_mode) == 0o600
    assert not any("dead" in name for name in content(tmp_path / "out"))


def test_households_take_the_published_totals_of_persons(
    made: Office, tmp_path: Path, refused: Refused
) -> None:
    own = Office(made.parameters, tmp_path / "data")
    shutil.copytree(made.data, own.data)
    executed(made, tmp_path / "persons")
    shutil.copytree(tmp_path / "persons" / "t1", own.data / "pop-group-totals.txt")
    execution = executed(
        own, tmp_path / "homes", Choice("h"), ledger=ledger_of(tmp_path, unit="household")
    )
    [charge] = charges(tmp_path)
    assert "household" in charge.identity and charge.run_id == execution.manifest.run_id
    folders = {name.rpartition("/")[0] for name in execution.manifest.files}
    tables = {*(f"t3/T0300{d}" for d in (1, 2, 3, 4)), "t4/T04001", "t4/T04002"}
    assert folders == tables | {f"margins/{table}" for table in tables}
    # a unit of another kind: another account
    refused(lambda: executed(made, tmp_path / "more", ledger=ledger_of(tmp_path)))


def test_two_outputs_do_not_tell_whether_their_records_are_the_same(
    spoilt: Office, tmp_path: Path
) -> None:
    """What is equal in both manifests is public: it is the same of other records."""
    place = ledger_of(tmp_path)
    one, two = (
        executed(spoilt, tmp_path / name, ledger=place, fresh=True).manifest for name in "ab"
    )
    spoilt.spoil("person-records.txt", lambda lines: lines[:-1])
    other = executed(spoilt, tmp_path / "c", ledger=place, fresh=True).manifest
    names = [name for name in one.__struct_fields__ if name not in ("files", "answered")]
    alike = [[n for n in names if getattr(one, n) == getattr(m, n)] for m in (two, other)]
    assert alike[0] == alike[1] and "plan_hash" in alike[0]


def test_a_damaged_output_is_restored_from_the_account(made: Office, tmp_path: Path) -> None:
    place, out = ledger_of(tmp_path), tmp_path / "out"
    executed(made, out, ledger=place)
    path, gone = out / "t1" / "usa-1-000.csv", out / "t1" / "usa-2-000.csv"
    was = content(out)
    path.write_bytes(path.read_bytes().replace(b"|", b"|9", 1))
    gone.unlink(missing_ok=True)
    assert not executed(made, out, ledger=place).drawn and content(out) == was


def test_a_place_is_looked_at_as_it_is_made(tmp_path: Path) -> None:
    """OUT of an execution that is there already, and of another one's draft."""
    of = census(tmp_path)
    out = tmp_path / "a"
    plan = (*of.plan, "--out", out)
    assert acceptance(plan)[1]["charged"] and not out.exists()
    assert call(*of.ask).exit_code == 0
    code, report = acceptance(plan)
    assert code == 0 and report["charged"] is None and report["run_id"]
    same_refusal((*of.ask, "--fresh"), (*plan, "--fresh"), tmp_path)


DIRECT = Runner("DirectRunner")


def same(runner: Runner, made: Office, folder: Path) -> None:
    """An execution here, and one of the same run id on a runner."""
    here, there = (
        drawn(made, folder / name, folder / f"{name} account", runner=where)
        for name, where in (("here", None), ("there", runner))
    )
    assert here.manifest == there.manifest
    assert content(folder / "here") == content(folder / "there")
    assert left_over(folder) == []


def drawn(made: Office, out: Path, account: Path, **more: Any) -> Execution:
    """An execution in an account of its own, under the first of the fixed run ids."""
    with fixed_run_ids():
        done = executed(made, out, ledger=ledger_of(account), **more)
    assert done.drawn and done.charged and len(charges(account)) == 1
    return done


def test_the_direct_runner_gives_the_same_bytes(
    made: Office, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def many(path: Path) -> Any:
        return pieces(path, 3_000)

    monkeypatch.setattr(module, "pieces", many)
    assert len(many(made.path("person-records.txt"))) > 5
    same(DIRECT, made, tmp_path)


@pytest.mark.slow
def test_prism_gives_the_same_bytes(made: Office, tmp_path: Path) -> None:
    same(Runner("PrismRunner"), made, tmp_path)


@pytest.mark.slow
def test_flink_gives_the_same_bytes(made: Office, tmp_path: Path) -> None:
    need_flink()
    same(Runner("FlinkRunner", parallelism=2), made, tmp_path)


def test_workers_set_records_aside_or_refuse_the_file(
    spoilt: Office, tmp_path: Path, refused: Refused
) -> None:
    def sex(lines: list[str]) -> None:
        lines[5] = lines[5].replace("|1|", "|3|", 1).replace("|2|", "|3|", 1)
        lines[6] += "|"

    spoilt.spoil("person-records.txt", sex)
    place = ledger_of(tmp_path)
    refused(executed, spoilt, tmp_path / "out", ledger=place, runner=DIRECT, strict=True)
    assert not (tmp_path / "out").exists() and not (tmp_path / "dead_letter").exists()
    drawn(spoilt, tmp_path / "out", tmp_path / "one", runner=DIRECT)
    drawn(spoilt, tmp_path / "again", tmp_path / "two")
    letters = [
        [path.read_bytes() for path in sorted((tmp_path / "dead_letter" / name).iterdir())]
        for name in ("out", "again")
    ]
    assert letters[0] == letters[1] and len(letters[0]) == 1
    assert content(tmp_path / "out") == content(tmp_path / "again")


# kill -9 at every commit point: one charge, and the bytes of an undisturbed execution.


_CHILD = """
import os, pathlib, signal, sys
from dpstream.pipelines.ask import folder as folders
from dpstream.pipelines.tabulation import execute as home
from dpstream.state.ledger.contract import AnswerLog
from tests.pipelines.tabulation.office import executed, ledger_of
from tests.pipelines.tabulation.office import Office
parameters, data, folder, point, kept = sys.argv[1:]
folder = pathlib.Path(folder)

def stop():
    os.kill(os.getpid(), signal.SIGKILL)

def instead(home, name, when="after", skip=0):
    real, left = getattr(home, name), [skip]
    def call(*args, **more):
        left[0] -= 1
        if when == "before" and left[0] < 0:
            stop()
        out = real(*args, **more)
        if left[0] < 0:
            stop()
        return out
    setattr(home, name, call)

if point == "before the charge":
    instead(home, "check_dead_letters")
elif point == "after the charge":
    instead(AnswerLog, "begin") if kept == "yes" else instead(home, "read_records", "before")
elif point == "half of the files":
    instead(home, "write_file", skip=9)
elif point == "after the draw":
    instead(folders.Archive, "seal")
elif point == "before the receipt":
    instead(folders.Archive, "keep")
elif point == "after the receipt":
    instead(AnswerLog, "commit") if kept == "yes" else instead(folders.Output, "publish", "before")
elif point == "before the rename":
    instead(folders, "publish_folder", "before")
elif point == "after the rename":
    instead(folders, "publish_folder")
place = ledger_of(folder) if kept == "yes" else None
executed(Office(pathlib.Path(parameters), pathlib.Path(data)), folder / "out", ledger=place)
"""

POINTS = (
    "before the charge",
    "after the charge",
    "half of the files",
    "after the draw",
    "before the receipt",
    "after the receipt",
    "before the rename",
    "after the rename",
)


@pytest.mark.parametrize("point", POINTS)
@pytest.mark.parametrize("remaining", ["yes", "no"])
def test_whoever_is_killed_is_charged_once_and_publishes_once(
    point: str, remaining: str, made: Office, tmp_path: Path
) -> None:
    place, out = ledger_of(tmp_path) if remaining == "yes" else None, tmp_path / "out"
    killed = subprocess.run(
        [sys.executable, "-c", _CHILD, made.parameters, made.data, tmp_path, point, remaining],
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert killed.returncode == -9, killed.stderr
    assert out.exists() == (point == "after the rename")
    charged = charges(tmp_path)
    assert len(charged) == (remaining == "yes" and point != "before the charge")
    execution = executed(made, out, ledger=place)
    committed = POINTS.index(point) >= POINTS.index("after the receipt")
    assert execution.drawn != (committed if remaining == "yes" else point == "after the rename")
    assert left_over(tmp_path) == []
    if remaining == "yes":
        [charge] = charges(tmp_path)
        assert charged in ([], [charge]) and charge.run_id == execution.manifest.run_id
        elsewhere = executed(made, tmp_path / "again", ledger=place)
        assert not elsewhere.drawn and content(tmp_path / "again") == content(out)
        assert charges(tmp_path) == [charge]
    assert not executed(made, out, ledger=place).drawn


@pytest.mark.slow
def test_killed_again_and_again_it_comes_to_its_end(made: Office, tmp_path: Path) -> None:
    """Each attempt is killed a little later; none is charged again."""
    for point in POINTS[1:]:
        subprocess.run(
            [sys.executable, "-c", _CHILD, made.parameters, made.data, tmp_path, point, "yes"],
            capture_output=True, timeout=300, check=False,
        )  # fmt: skip
        assert len(charges(tmp_path)) == 1
    execution = executed(made, tmp_path / "out", ledger=ledger_of(tmp_path))
    assert [charge.run_id for charge in charges(tmp_path)] == [execution.manifest.run_id]
    again = executed(made, tmp_path / "again", ledger=ledger_of(tmp_path))
    assert not again.drawn and content(tmp_path / "again") == content(tmp_path / "out")

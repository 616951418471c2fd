"""What plans say of the ledger: the same decision as whoever charges, and its exit code."""

import contextlib
import errno
import functools
import json
import os
import re
import shlex
import stat
import subprocess
from collections.abc import Iterable
from pathlib import Path

import msgspec
import pytest

from dpstream.accounting.composition import Cost
from dpstream.accounting.errors import PolicyError, RunError
from dpstream.accounting.plan.unit import UnitIdentity
from dpstream.pipelines.ask.acceptance import Request, job_acceptance, requests_acceptance, room_of
from dpstream.pipelines.ask.draft import (
    MANIFEST,
    File,
    Manifest,
    decoded,
    get,
    put,
    write_file,
)
from dpstream.pipelines.ask.folder import Archive, Output, Written, archive_of, is_written
from dpstream.pipelines.formats.receipt import encoded
from dpstream.pipelines.jobs.secret import new_secret
from dpstream.state.ledger.events import Charge
from dpstream.state.ledger.history import History
from dpstream.state.ledger.open import AccountPlace, read_history
from tests import accounts
from tests.golden.pinned import refusal
from tests.golden.refusals import Refused
from tests.pipelines.cli.called import call, printed
from tests.pipelines.jobs.test_charging import job, ran
from tests.state.ledger.conformance import charge


def test_an_account_in_figures(tmp_path: Path) -> None:
    one = job(tmp_path)
    acceptance = job_acceptance(one)
    assert acceptance.exit_code == 0 and acceptance.cost == (6.0, 1e-6)
    account = acceptance.account
    assert account is not None
    assert (account["used"], account["charges"], account["limit"]["epsilon"]) == (0.0, 0, 8.0)
    run_id = ran(one)
    after = job_acceptance(one)
    assert (after.run_id, after.cost) == (run_id, None) and after.account is not None
    assert after.account["used"] == pytest.approx(account["with_this"])
    again = job_acceptance(one, fresh=True)
    assert again.exit_code == PolicyError.exit_code and again.refusal is not None
    assert again.refusal.field == "account.limit"
    assert json.loads(json.dumps(again.as_dict()))["refusal"]["exit_code"] == 3


def test_a_plan_says_what_a_run_would_be_told(tmp_path: Path) -> None:
    path = ("--project", job(tmp_path).path)
    first = call("plan", *path, "--json")
    assert first.exit_code == 0 and json.loads(first.stdout)["acceptance"]["accepted"]
    ran(job(tmp_path))
    # Changed: refused until it is begun afresh.
    path = ("--project", job(tmp_path, contributions=5).path)
    planned, refused = call("plan", *path, "--json"), call("run", *path, "--quiet", "--json")
    assert planned.exit_code == refused.exit_code == 3
    refusal = json.loads(planned.stdout)["acceptance"]["refusal"]
    assert refusal == printed(refused.stderr.splitlines()[-1])
    # What it says to type is typed: refused by the limit, as the plan of it says.
    assert call("plan", *path, "--fresh").exit_code == call("run", *path, "--fresh").exit_code == 3
    wide = ("--project", job(tmp_path, 40.0, contributions=5).path)
    assert call("plan", *wide, "--fresh").exit_code == 0
    done = call("run", *wide, "--fresh", "--quiet")
    assert done.exit_code == 0, done.output


def test_without_a_ledger_nothing_is_spent(tmp_path: Path) -> None:
    one = job(tmp_path)
    text, removed = re.subn(r"(?m)^account = .*\n", "", one.path.read_text())
    assert removed == 1
    one.path.write_text(text)
    acceptance = json.loads(call("plan", "--project", one.path, "--json").stdout)["acceptance"]
    assert acceptance["accepted"] and acceptance["account"] is None
    assert acceptance["charged"] == {"epsilon": 6.0, "delta": 1e-6}  # of each run, added up nowhere


def test_a_command_that_charges_names_project_and_account_first(tmp_path: Path) -> None:
    """Also if it is refused then; with --json stderr has the object of the refusal alone."""
    path = ("--project", job(tmp_path, limit=1.0).path)
    refused = call("run", *path, "--quiet")
    project, account, *_ = refused.stderr.splitlines()
    assert project.split()[0] == "Project" and project.endswith("dpstream.toml")
    assert account.split()[0] == "Account" and "ledger.db" in account
    assert refused.exit_code == 3 and "Charged" not in refused.stderr
    assert call("run", *path, "--quiet", "--json").stderr.count("\n") == 1
    done = call("run", *("--project", job(tmp_path, limit=8.0).path), "--quiet")
    assert done.exit_code == 0 and "Costs (6, 1e-06)" in done.stderr.splitlines()[-1]


def test_a_plan_is_refused_without_its_secret_as_the_run_is(tmp_path: Path) -> None:
    one = job(tmp_path)
    path = ("--project", one.path)
    assert call("plan", *path).exit_code == 0
    (tmp_path / "noise.secret").rename(tmp_path / "elsewhere")
    planned, refused = call("plan", *path, "--json"), call("run", *path, "--quiet", "--json")
    assert planned.exit_code == refused.exit_code == 2
    refusal = json.loads(planned.stdout)["acceptance"]["refusal"]
    assert refusal == printed(refused.stderr.splitlines()[-1]) and refusal["field"] == "secret"
    assert json.loads(planned.stdout)["acceptance"]["charged"] is None
    assert json.loads(planned.stdout)["guarantee"]["epsilon"] == 6.0


def test_a_plan_knows_another_secret_than_that_of_the_run(tmp_path: Path) -> None:
    path = ("--project", job(tmp_path).path)
    ran(job(tmp_path))
    (tmp_path / "noise.secret").unlink()
    new_secret(tmp_path / "noise.secret")
    planned, refused = call("plan", *path, "--json"), call("run", *path, "--quiet", "--json")
    assert planned.exit_code == refused.exit_code == 3
    acceptance = json.loads(planned.stdout)["acceptance"]
    assert acceptance["refusal"] == printed(refused.stderr.splitlines()[-1])
    assert (acceptance["charged"], acceptance["run_id"]) == (None, None)
    # A new run may have a new secret; the limit has no room for it.
    assert (
        "limit"
        in json.loads(call("plan", *path, "--fresh", "--json").stdout)["acceptance"]["refusal"][
            "field"
        ]
    )


@pytest.mark.parametrize(
    ("old", "new", "flags"),
    [('key = ["', 'key = ["no', ()), ("", "", ("--runner", "PrismRunner", "--no_such_flag=1"))],
)
def test_a_fresh_run_that_is_refused_moves_nothing(
    tmp_path: Path, old: str, new: str, flags: tuple[str, ...]
) -> None:
    """A column that no file has, and flags of the runner."""
    ran(job(tmp_path, limit=40.0))
    one = job(tmp_path, limit=40.0)
    text = one.path.read_text()
    assert old in text
    one.path.write_text(text.replace(old, new, 1))
    before = sorted(path.name for path in tmp_path.iterdir())
    refused = call("run", "--project", one.path, "--fresh", "--quiet", *flags)
    assert refused.exit_code == 2, refused.output
    assert sorted(path.name for path in tmp_path.iterdir()) == before
    one.path.write_text(text)
    assert call("run", "--project", one.path, "--quiet").exit_code == 0


@pytest.mark.parametrize(
    ("name", "field"),
    [("noise.secret", "secret"), ("ledger.db", "account.path"), ("daily.store.db", "store")],
)
def test_a_private_file_in_git_is_refused_until_the_fix_is_typed(
    tmp_path: Path, name: str, field: str
) -> None:
    """By the plan as by the run, before a charge."""
    path = ("--project", job(tmp_path).path)
    ran(job(tmp_path))
    spent = call("account", "show", *path).stdout
    for words in (["init", "--quiet"], ["add", "--force", name]):
        subprocess.run(["git", *words], cwd=tmp_path, check=True)
    planned, run = call("plan", *path, "--json"), call("run", *path, "--quiet", "--json")
    assert planned.exit_code == run.exit_code == 3
    refusal = json.loads(planned.stdout)["acceptance"]["refusal"]
    assert refusal == printed(run.stderr.splitlines()[-1]) and refusal["field"] == field
    fix = re.search("`(git rm .*?)`", refusal["fix"])
    assert fix is not None
    subprocess.run(shlex.split(fix[1]), cwd=tmp_path, check=True, capture_output=True)
    assert call("plan", *path).exit_code == 0
    assert call("account", "show", *path).stdout == spent


def test_several_charges_together(tmp_path: Path) -> None:
    place = AccountPlace(str(tmp_path / "ledger.db"), "flights", accounts.ID)
    absent = requests_acceptance(place, [Request(charge(1))])
    assert absent.exit_code == 2 and absent.refusal is not None and absent.account is None
    assert absent.refusal.field == "account.path" and not (tmp_path / "ledger.db").exists()
    accounts.create(place.path, "flights")
    assert requests_acceptance(place, [Request(charge(1))]).exit_code == 0
    assert accounts.charges(place.path) == []
    with contextlib.closing(accounts.opened(place.path)) as ledger:
        ledger.charge(charge(1))
    assert requests_acceptance(place, [Request(charge(2))]).exit_code == 0
    other_hashes = (msgspec.structs.replace(charge(n), plan_hash=f"{n}") for n in range(2, 80))
    much = [Request(each) for each in other_hashes]
    assert requests_acceptance(place, much, fresh=True).exit_code == 3
    twice = requests_acceptance(place, [Request(charge(2))] * 2, fresh=True)
    assert twice.cost == (charge(2).epsilon, charge(2).delta)
    unit = UnitIdentity("other", "string").text
    other = requests_acceptance(place, [Request(charge(2, unit=unit))])
    assert other.exit_code == 3 and other.account is not None
    assert other.account["with_this"] is None  # their costs do not add up


def frame_charge(name: str, mu: float | None, epsilon: float = 1.0) -> Charge:
    return Charge(32 * name, "p", accounts.USER, epsilon, 1e-9, mu, 0.0, kind="frame")


def test_the_limit_and_all_charges(tmp_path: Path) -> None:
    path, spent = tmp_path / "ledger.db", [frame_charge("a", 0.5), frame_charge("b", None)]
    place = accounts.create(path, "visits", (8.0, 1e-5))
    with contextlib.closing(accounts.opened(path)) as ledger:
        for one in spent:
            ledger.transact(functools.partial(ledger.append, one))
    unit = UnitIdentity.read(accounts.USER)
    room = room_of(read_history(place), unit)
    assert room is not None and room.limit[:2] == (8.0, 1e-5)
    [piece] = room.spent.pieces
    assert piece.total.spends == 2 and piece.total.plain == 1 and piece.total.gauss == 0.25
    more = room_of(read_history(place), unit, [frame_charge("c", None, 2.5)])
    assert more is not None and more.spent.pieces[0].total.plain == 3.5
    plain = Cost(1.0, 0.0, None, 0.0)
    assert room.further_charges(plain) - more.further_charges(plain) in (2, 3)
    assert room_of(read_history(place), UnitIdentity("other", "string")) is None


def test_without_a_limit_there_is_none() -> None:
    assert room_of(History(), UnitIdentity.read(accounts.USER)) is None


# Folders of an answer's files, and the draft and manifest of a census execution.


NAMES = ["a.csv", "deep/er/b.csv"]
RECEIPT = b"receipt"


def archived(archive: Archive, receipt: bytes = RECEIPT) -> dict[str, Written]:
    """Two files, archived."""
    with archive.draft() as draft:
        assert stat.S_IMODE(os.stat(draft).st_mode) == 0o700
        (draft / "deep" / "er").mkdir(parents=True)
        for name in NAMES:
            (draft / name).write_text(name)
        (draft / "left.tmp").write_text("of a worker that was cut off")
        files = archive.seal(draft, NAMES)
        archive.keep(draft, receipt)
    return files


def published(archive: Archive, out: Path, files: dict[str, Written]) -> list[str]:
    def fill(into: Path, names: Iterable[str]) -> None:
        archive.take(RECEIPT, files, names, into)

    return Output(out, "manifest").publish(RECEIPT, files, fill)


def content(folder: Path) -> dict[str, bytes]:
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}


def hidden(folder: Path) -> list[Path]:
    return list(folder.glob(".*"))


def test_what_is_kept_is_private_and_published_whole(tmp_path: Path) -> None:
    archive, out = Archive(tmp_path / "answers"), tmp_path / "deep" / "out"
    files = archived(archive)
    assert sorted(files) == sorted(NAMES)
    [place] = (tmp_path / "answers").iterdir()
    assert stat.S_IMODE(place.stat().st_mode) == stat.S_IMODE(place.parent.stat().st_mode) == 0o700
    assert {stat.S_IMODE((place / name).stat().st_mode) for name in NAMES} == {0o600}
    assert published(archive, out, files) == []
    assert content(out) == {"manifest": RECEIPT} | {name: name.encode() for name in NAMES}
    assert stat.S_IMODE((out / NAMES[0]).stat().st_mode) & 0o444
    assert hidden(out.parent) == hidden(tmp_path) == hidden(tmp_path / "answers") == []
    assert published(archive, out, files) == []


def test_a_draft_that_cannot_be_written_is_a_coded_failure(tmp_path: Path) -> None:
    archive = Archive(tmp_path / "answers")
    with pytest.raises(RunError, match="disk is full"), archive.draft():
        raise OSError(errno.ENOSPC, "of a library that writes")
    assert list((tmp_path / "answers").iterdir()) == []


@pytest.mark.parametrize("damage", ["changed", "missing"])
def test_a_damaged_file_is_written_again(tmp_path: Path, damage: str) -> None:
    archive, out = Archive(tmp_path / "answers"), tmp_path / "out"
    files = archived(archive)
    published(archive, out, files)
    was, path = content(out), out / NAMES[1]
    path.write_text("x") if damage == "changed" else path.unlink()
    assert published(archive, out, files) == [NAMES[1]] and content(out) == was


def test_what_else_stands_there_is_not_touched(tmp_path: Path) -> None:
    archive, out = Archive(tmp_path / "answers"), tmp_path / "out"
    files = archived(archive)
    out.mkdir()
    (out / "mine").write_text("mine")
    assert refusal(published, archive, out, files) == "UsageError OUT"
    assert refusal(Output(out, "manifest").check, None) == "UsageError OUT"
    (out / "manifest").write_bytes(b"another receipt")
    assert refusal(published, archive, out, files) == "UsageError OUT"
    assert (out / "mine").read_text() == "mine" and hidden(tmp_path) == []


def test_the_output_of_another_run_is_refused(tmp_path: Path) -> None:
    """Before the charge: an answer may only replace its own output."""
    mine, other = b"1" * 32, b"2" * 32
    output = Output(tmp_path, "manifest")
    (tmp_path / "manifest").write_bytes(b'{"run_id": "%s"}' % mine)
    output.check(mine.decode())
    for run_id in (other.decode(), "", None):
        assert refusal(output.check, run_id) == "UsageError OUT"


def test_a_place_where_no_folder_can_be_made_is_refused_before_the_charge(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert (
        refusal(Output(tmp_path / "file" / "below" / "out", "manifest").check, None)
        == "RunError OUT"
    )
    Output(tmp_path / "below" / "out", "manifest").check(None)
    assert hidden(tmp_path) == [] and len(list(tmp_path.iterdir())) == 1


@pytest.mark.parametrize("damage", ["gone", "changed"])
def test_an_archive_that_is_lost_is_refused(tmp_path: Path, damage: str, refused: Refused) -> None:
    archive, out = Archive(tmp_path / "answers"), tmp_path / "out"
    files = archived(archive)
    [place] = (tmp_path / "answers").iterdir()
    if damage == "gone":
        (place / NAMES[0]).unlink()
    else:
        (place / NAMES[0]).write_text("other")
    caught = refused(published, archive, out, files)
    assert "--fresh" in caught.fix and not out.exists() and hidden(tmp_path) == []


def test_a_draft_that_is_not_kept_goes(tmp_path: Path) -> None:
    archive = Archive(tmp_path / "answers")
    with archive.draft() as draft:
        (draft / NAMES[0]).write_text("x")
        assert refusal(archive.seal, draft, NAMES) == "RunError runner"
    assert list((tmp_path / "answers").iterdir()) == []
    archived(archive)
    files = archived(archive)  # the same receipt again, of somebody who was cut off
    assert len(list((tmp_path / "answers").iterdir())) == 1
    assert published(archive, tmp_path / "out", files) == []


def test_the_archive_lies_beside_the_account(tmp_path: Path) -> None:
    assert archive_of(tmp_path / "l.db", tmp_path / "x") == tmp_path / "l.db.answers"
    assert archive_of("spanner://p/i/d", tmp_path).parent == tmp_path
    assert not is_written(tmp_path / "none", Written(1, ""))


def manifest(**changed: object) -> Manifest:
    made = Manifest(
        run_id="5a" * 16, plan_hash="hash", program="p", epsilon=1.0,
        delta=1e-10, mu=None, rho=0.5, insecure=False, files={},
    )  # fmt: skip
    return msgspec.structs.replace(made, **changed)


def test_what_cannot_be_written_says_why(tmp_path: Path) -> None:
    (tmp_path / "t1").write_text("no folder")
    assert refusal(write_file, tmp_path, File("t1/a.csv", b"one\n")) == "RunError OUT"


def test_what_stands_is_an_output_or_refused(tmp_path: Path) -> None:
    out = Output(tmp_path / "out", MANIFEST)
    assert out.existing_manifest() is None
    (tmp_path / "out").symlink_to(tmp_path / "nowhere")
    assert refusal(out.existing_manifest) == "UsageError OUT"
    assert refusal(decoded, b'{"program": "p", "more": 1}') == "PolicyError manifest.json"
    assert decoded(encoded(manifest())) == manifest()


def test_objects_are_put_and_got(tmp_path: Path) -> None:
    file = File("t3/T03001/a.csv", b"one\n")
    put(str(tmp_path / "a"), file)
    put((tmp_path / "b").as_uri(), file)
    for folder in ("a", "b"):
        assert (tmp_path / folder / file.name).read_bytes() == b"one\n"
    assert get((tmp_path / "b").as_uri(), file.name) == b"one\n"
    assert get((tmp_path / "b").as_uri(), "t1/none.csv") is None
    (tmp_path / "c").write_text("no folder")
    assert refusal(put, (tmp_path / "c").as_uri(), file) == "RunError out_folder"

"""What plans say of the ledger: the same decision as whoever charges, and its exit code."""

import contextlib
import functools
import json
import re
import shlex
import subprocess
from pathlib import Path

import msgspec
import pytest

from dpstream.accounting.errors import PolicyError
from dpstream.accounting.plan.unit import UnitIdentity
from dpstream.accounting.query.calibration import Cost
from dpstream.pipelines.ask.acceptance import Request, job_acceptance, requests_acceptance, room_of
from dpstream.pipelines.jobs.secret import new_secret
from dpstream.state.ledger.events import Charge
from dpstream.state.ledger.history import History
from dpstream.state.ledger.open import AccountPlace, read_history
from tests import accounts
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

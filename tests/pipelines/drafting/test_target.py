"""Which sections a first job adds to a project file, with which account and secret.

A first job meets nothing that is there, and its private files are kept out of git.

Which account a first job names: those that are there are listed, and one is chosen.
"""

import subprocess
from pathlib import Path

import pytest
from click.testing import CliRunner

from dpstream.accounting.budget.allocation import allocate
from dpstream.accounting.fields import Field
from dpstream.accounting.plan.unit import identity_of
from dpstream.pipelines.drafting.ask import Given, Person, answers
from dpstream.pipelines.drafting.draft import Answers, Target, checked, project_text
from dpstream.pipelines.drafting.target import (
    PRIVATE_FILES,
    Choice,
    Wanted,
    accounts_near,
    check_job,
    chosen_account,
    chosen_data_set,
    keep_out_of_git,
    made,
    make_secret,
    name_of,
    new_account,
    own_accounts,
    project_at,
    taken_account,
    target_of,
)
from dpstream.pipelines.jobs.charging import spend_of
from dpstream.pipelines.project.project import load_project
from tests import accounts
from tests.golden.refusals import Refused
from tests.pipelines.cli.called import call
from tests.pipelines.jobs.test_charging import job
from tests.projects import write_project


@pytest.mark.parametrize("there", ["daily.store.db", "releases/daily", "section"])
def test_what_is_there_is_met_with_a_free_name(
    there: str, tmp_path: Path, refused: Refused
) -> None:
    path, _, project = project_at(tmp_path / "dpstream.toml")
    check_job(path, project, "daily")
    (tmp_path / "releases").mkdir()
    (tmp_path / "daily2.store.db").touch()
    if there == "section":
        write_project(tmp_path)
        path, _, project = project_at(tmp_path)
    else:
        (tmp_path / there).touch()
    refused(check_job, path, project, "daily")
    check_job(path, project, "daily3")


def test_places_for_no_job(tmp_path: Path, refused: Refused) -> None:
    for name, path in (("a b", "dpstream.toml"), ("a", "no/dpstream.toml")):
        refused(lambda path=path, name=name: check_job(*project_at(tmp_path / path)[::2], name))


def test_a_section_is_named_after_the_file_or_its_folder() -> None:
    assert name_of("a/visits-2024.csv.gz") == "visits-2024"
    assert name_of("page views.parquet") == "page_views"
    assert name_of("visits/*.parquet") == "visits" and name_of("visits/2024*.csv") == "visits"


def test_a_secret_is_made_once(tmp_path: Path, refused: Refused) -> None:
    secret = tmp_path / "a.secret"
    assert make_secret(secret) and secret.stat().st_mode & 0o777 == 0o600
    before = secret.read_bytes()
    assert not make_secret(secret) and secret.read_bytes() == before
    for path in (tmp_path / "no" / "a.secret", tmp_path):
        refused(make_secret, path)


def test_private_files_are_named_to_git_once_and_only_in_a_repository(tmp_path: Path) -> None:
    """The names match what git is asked about; what was there stays."""
    folder, ignored = tmp_path / "jobs", tmp_path / "jobs" / ".gitignore"
    folder.mkdir()
    keep_out_of_git(folder, folder / "noise.secret")
    assert not ignored.exists()
    subprocess.run(["git", "init", "-q", tmp_path], check=True)
    ignored.write_text("releases/")  # without an end of the line
    for _ in range(2):
        keep_out_of_git(folder, folder / "noise.secret")
        keep_out_of_git(
            folder, tmp_path / "other.secret", "ledger.db*", "../other.db*", "spanner://a/b"
        )
    lines = ["releases/", "noise.secret", *PRIVATE_FILES, "ledger.db*"]
    assert ignored.read_text().splitlines() == lines
    names = ["noise.secret", "dpstream-0acc0acc0acc0acc.head", "ledger.db-journal", "job.toml"]
    command = ["git", "-C", str(folder), "check-ignore", *names]
    assert (
        subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()
        == names[:3]
    )


def test_what_a_first_job_leaves_is_ignored(tmp_path: Path) -> None:
    """Account, key, store, dead letters and a table's records, with what SQLite has beside them."""
    subprocess.run(["git", "init", "-q", tmp_path], check=True)
    (tmp_path / "visits.csv").write_text("user,page,time\n")
    done = call(
        "init", tmp_path / "visits.csv", "--unit", "user", "--key", "page", "--time", "time",
        "--start", "2024-01-01", "--end", "2024-01-02", "--window", "day", "--covers", "window",
        "--epsilon", "1", "--delta", "1e-6", "--project", tmp_path,
    )  # fmt: skip
    assert done.exit_code == 0, done.output
    names = [
        "visits.account.db", "visits.account.db-journal", "visits.secret", "visits.store.db",
        "visits.store-0acc0acc0acc.db-wal",
        "dead_letter/releases/part.parquet",
    ]  # fmt: skip
    command = ["git", "-C", str(tmp_path), "check-ignore", *names, "dpstream.toml", "visits.csv"]
    ignored = subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()
    assert ignored == names


USER, NOBODY = Field("user"), Person(False)
WANTED: Wanted = ("visits", "user", "string", (2.0, 1e-6))


def test_accounts_up_to_the_repositorys_root_are_listed(tmp_path: Path) -> None:
    root, jobs = tmp_path / "root", tmp_path / "root" / "a" / "jobs"
    jobs.mkdir(parents=True)
    accounts.create(tmp_path / "above.db", "above")
    accounts.create(root / "shop.db", "shop")
    accounts.create(jobs / "own.db", "own")
    (jobs / "other.db").write_bytes(b"SQLite format 3\0 and no more")
    (jobs / "text.db").write_text("none")
    assert [Path(each.path).name for each in accounts_near(jobs)] == ["own.db"]
    (root / ".git").mkdir()
    assert [each.created.data_set for each in accounts_near(jobs)] == ["own", "shop"]


def test_nobody_to_ask(tmp_path: Path, refused: Refused) -> None:
    """Without accounts a new one is made; with some a flag decides, and the error names both."""
    assert chosen_account(tmp_path, NOBODY, None, False, WANTED) is None
    accounts.create(tmp_path / "ledger.db", "visits")
    refused(chosen_account, tmp_path, NOBODY, None, False, WANTED)
    assert chosen_account(tmp_path, NOBODY, "ledger.db", False, WANTED) == "ledger.db"
    assert chosen_account(tmp_path, NOBODY, None, True, WANTED) is None
    refused(chosen_account, tmp_path, NOBODY, "ledger.db", True, WANTED)
    # What a command that was cut off has made for this very job is taken up, unless it was used.
    accounts.create(tmp_path / "own.db", "visits", (2.0, 1e-6))
    assert chosen_account(tmp_path, NOBODY, None, False, WANTED) == str(tmp_path / "own.db")
    accounts.set_limit(tmp_path / "own.db", (3.0, 1e-6))
    # Those that the project file names already are another data set's.
    own = {str(tmp_path / name) for name in ("ledger.db", "own.db")}
    assert chosen_account(tmp_path, NOBODY, None, False, WANTED, own) is None


def test_which_data_set(tmp_path: Path, refused: Refused) -> None:
    """Of a file with data sets one is named, or a new one; the type of the unit must fit."""
    assert chosen_data_set(None, None, NOBODY, USER, "visits") == ("visits", False)
    write_project(tmp_path)
    project = load_project(tmp_path)
    refused(chosen_data_set, project, None, NOBODY, USER, "visits")
    assert chosen_data_set(project, "shop", NOBODY, USER, "visits") == ("shop", True)
    assert chosen_data_set(project, "other", NOBODY, USER, "visits") == ("other", False)
    for name, unit in (("shop", Field("user", "int")), ("a b", USER)):
        refused(chosen_data_set, project, name, NOBODY, unit, "visits")
    with CliRunner().isolation("\n") as (out, err, *_):
        assert chosen_data_set(project, None, Person(True), USER, "shop") == ("shop2", False)
        assert b"shop, unit customer" in out.getvalue() + err.getvalue()


@pytest.mark.parametrize(("typed", "chosen"), [("b.db", "b.db"), ("new", None), ("7 a.db", "a.db")])
def test_somebody_is_asked(
    tmp_path: Path, typed: str, chosen: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in "ab":
        accounts.create(tmp_path / f"{name}.db", name)
    monkeypatch.chdir(tmp_path)
    with CliRunner().isolation("\n".join(typed.split()) + "\n") as (out, err, *_):
        account = chosen_account(tmp_path, Person(True), None, False, WANTED)
        printed = (out.getvalue() + err.getvalue()).decode()
    assert account == (None if chosen is None else str(tmp_path / chosen))
    assert "  a.db" in printed and "  b.db" in printed
    assert ("is none of them" in printed) == (len(typed.split()) > 1)


def test_accounts_that_the_project_names_need_not_be_made(tmp_path: Path) -> None:
    """`dpstream session init` writes the id of an account of records."""
    more = '[data_set.rides]\naccount = { path = "rides.db" }\n'
    project = load_project(write_project(tmp_path, more=more))
    assert own_accounts(project) == {str(tmp_path / "rides.db")}


def test_a_new_account_takes_no_others_place(tmp_path: Path) -> None:
    limit = (2.0, 1e-6)
    first = job(tmp_path)
    made = [new_account(tmp_path, "visits", first, limit) for _ in range(3)]
    assert len({path for path, _ in made}) == len({created.id for _, created in made}) == 3
    assert accounts.opened(tmp_path / made[0][0]).history().limit == limit


def test_one_that_is_there_is_named_from_the_projects_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refused: Refused
) -> None:
    (tmp_path / "jobs").mkdir()
    monkeypatch.chdir(tmp_path)
    accounts.create(tmp_path / "shop.db", "shop", unit="customer")
    path, created = taken_account(tmp_path / "jobs", "shop.db", USER)
    assert (path, created.data_set, created.id) == ("../shop.db", "shop", accounts.ID)
    accounts.of_records("rides.db", "rides").close()
    for named, field in (("shop.db", Field("user", "int")), ("rides.db", USER)):
        refused(taken_account, tmp_path / "jobs", named, field)


NEW = Choice("daily", "visits", None, None, False, None)


@pytest.fixture
def replies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Answers:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "visits.csv").write_text("user,page,time\nu,p,2024-01-01T00:00:00Z\n")
    return answers(
        Given("visits.csv", "user", ("page",), "time", (), (), "2024-01-01", "2024-01-02", "day",
              None, 1.0, 1e-6, 4, False), NOBODY,
    )  # fmt: skip


def fresh(folder: Path, replies: Answers, choice: Choice = NEW) -> Target:
    """Of a folder without a project file."""
    return target_of(folder / "dpstream.toml", "", None, replies, choice, NOBODY)


def extended(folder: Path, replies: Answers, choice: Choice, *changes: tuple[str, str]) -> Target:
    """Of a folder whose project file has the data set ``shop``."""
    path = write_project(folder, *changes)
    return target_of(path, path.read_text(), load_project(path), replies, choice, NOBODY)


def test_nothing_is_made_before_all_is_decided(tmp_path: Path, replies: Answers) -> None:
    before = sorted(tmp_path.iterdir())
    target = fresh(tmp_path, replies)
    assert target.sections == ("data_set.visits", "table.visits", "job.daily")
    assert sorted(tmp_path.iterdir()) == before
    drafted = checked(project_text(replies, target), target)
    done, secret_made = made(target, drafted)
    new = done.new_data_set
    assert secret_made and new is not None and (tmp_path / new.secret).stat().st_mode & 0o77 == 0
    account = accounts.opened(tmp_path / new.account).history()
    assert account.limit == (2.0, 2e-6)
    # Whom the limit protects is what the job's budget covers, and the job leaves room.
    assert account.created.unit == identity_of(drafted.plan)
    [charge] = account.check([spend_of(drafted, allocate(drafted.plan), f"{1:032x}")])
    assert not charge.takes
    assert not made(target._replace(new_data_set=new), drafted)[1]  # the secret is used again


def test_a_data_set_of_the_file_takes_no_account_or_secret(
    tmp_path: Path, replies: Answers, refused: Refused
) -> None:
    shop = NEW._replace(data_set="shop")
    target = extended(tmp_path, replies, shop)
    assert target.new_data_set is None
    assert target.sections == ("table.visits2", "job.daily")
    assert made(target, job(tmp_path)) == (target, False)
    for choice in (
        shop._replace(account="a.db"),
        shop._replace(new_account=True),
        shop._replace(secret=tmp_path / "s"),
    ):
        refused(extended, tmp_path, replies, choice)


def test_a_table_that_is_there_is_used(tmp_path: Path, replies: Answers) -> None:
    shop = NEW._replace(data_set="shop")
    same = extended(tmp_path, replies, shop, ('"visits/*.parquet"', '"visits.csv"'))
    assert (same.table, same.new_table) == ("visits", False)
    assert same.sections == ("job.daily",)


def test_an_account_decides_the_data_set(
    tmp_path: Path, replies: Answers, refused: Refused
) -> None:
    accounts.create(tmp_path / "theirs.db", "theirs", unit="user")
    taken = NEW._replace(account="theirs.db")
    target = fresh(tmp_path, replies, taken)
    assert target.data_set == "theirs" and target.new_data_set is not None
    assert target.new_data_set.id == accounts.ID and target.new_data_set.limit is None
    refused(lambda: fresh(tmp_path, replies, taken._replace(data_set="others")))
    accounts.create(tmp_path / "shop.db", "shop", unit="user")
    refused(lambda: extended(tmp_path, replies, NEW._replace(account="shop.db", data_set="shop2")))
    refused(lambda: extended(tmp_path, replies, NEW._replace(account="shop.db")))


def test_the_unit_of_an_account_must_fit(
    tmp_path: Path, replies: Answers, refused: Refused
) -> None:
    accounts.create(tmp_path / "numbers.db", "numbers", unit="user", type_="int")
    refused(
        lambda: fresh(
            tmp_path, replies._replace(unit=Field("user")), NEW._replace(account="numbers.db")
        )
    )

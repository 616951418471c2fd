"""Which account a first job names: those that are there are listed, and one is chosen."""

from pathlib import Path

import pytest

from dpstream.accounting.errors import UsageError
from dpstream.accounting.fields import Field
from dpstream.pipelines.drafting.account import (
    Wanted,
    accounts_near,
    chosen_account,
    chosen_data_set,
    new_account,
    own_accounts,
    taken_account,
)
from dpstream.pipelines.drafting.ask import Person
from dpstream.pipelines.project.project import load_project
from tests import accounts
from tests.projects import write_project

USER, NOBODY = Field("user"), Person(None, lambda _: None)
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


def test_nobody_to_ask(tmp_path: Path) -> None:
    """Without accounts a new one is made; with some a flag decides, and the error names both."""
    assert chosen_account(tmp_path, NOBODY, None, False, WANTED) is None
    accounts.create(tmp_path / "ledger.db", "visits")
    with pytest.raises(UsageError) as caught:
        chosen_account(tmp_path, NOBODY, None, False, WANTED)
    assert caught.value.field == "--account" and accounts.ID in caught.value.rule
    assert "--account PATH" in caught.value.fix and "--new-account" in caught.value.fix
    assert chosen_account(tmp_path, NOBODY, "ledger.db", False, WANTED) == "ledger.db"
    assert chosen_account(tmp_path, NOBODY, None, True, WANTED) is None
    with pytest.raises(UsageError):
        chosen_account(tmp_path, NOBODY, "ledger.db", True, WANTED)
    # What a command that was cut off has made for this very job is taken up, unless it was used.
    accounts.create(tmp_path / "own.db", "visits", (2.0, 1e-6))
    assert chosen_account(tmp_path, NOBODY, None, False, WANTED) == str(tmp_path / "own.db")
    accounts.set_limit(tmp_path / "own.db", (3.0, 1e-6))
    # Those that the project file names already are another data set's.
    own = {str(tmp_path / name) for name in ("ledger.db", "own.db")}
    assert chosen_account(tmp_path, NOBODY, None, False, WANTED, own) is None


def test_which_data_set(tmp_path: Path) -> None:
    """Of a file with data sets one is named, or a new one; the type of the unit must fit."""
    assert chosen_data_set(None, None, NOBODY, USER, "visits") == ("visits", False)
    write_project(tmp_path)
    project = load_project(tmp_path)
    with pytest.raises(UsageError, match="shop, unit customer"):
        chosen_data_set(project, None, NOBODY, USER, "visits")
    assert chosen_data_set(project, "shop", NOBODY, USER, "visits") == ("shop", True)
    assert chosen_data_set(project, "other", NOBODY, USER, "visits") == ("other", False)
    for name, unit in (("shop", Field("user", "int")), ("a b", USER)):
        with pytest.raises(UsageError) as caught:
            chosen_data_set(project, name, NOBODY, unit, "visits")
        assert caught.value.field == "--data-set"
    messages = list[str]()
    person = Person(lambda _, proposal: proposal or "", messages.append)
    assert chosen_data_set(project, None, person, USER, "shop") == ("shop2", False)
    assert "shop, unit customer" in messages[0]


@pytest.mark.parametrize(("typed", "chosen"), [("2", "b.db"), ("new", None), ("7 1", "a.db")])
def test_somebody_is_asked(tmp_path: Path, typed: str, chosen: str | None) -> None:
    for name in "ab":
        accounts.create(tmp_path / f"{name}.db", name)
    words, lines = iter(typed.split()), list[str]()
    person = Person(lambda *_: next(words), lines.append)
    account = chosen_account(tmp_path, person, None, False, WANTED)
    assert account == (None if chosen is None else str(tmp_path / chosen))
    assert "a.db" in lines[0] and "b.db" in lines[0] and len(lines) == 1 + len(typed.split()) - 1


def test_accounts_that_the_project_names_need_not_be_made(tmp_path: Path) -> None:
    """`dpstream session init` writes the id of an account of records."""
    more = '[data_set.rides]\naccount = { path = "rides.db" }\n'
    project = load_project(write_project(tmp_path, more=more))
    assert own_accounts(project) == {str(tmp_path / "rides.db")}


def test_a_new_account_takes_no_others_place(tmp_path: Path) -> None:
    limit = (2.0, 1e-6)
    made = [new_account(tmp_path, "visits", USER, limit) for _ in range(3)]
    assert len({path for path, _ in made}) == len({created.id for _, created in made}) == 3
    assert accounts.opened(tmp_path / made[0][0]).history().limit == limit


def test_one_that_is_there_is_named_from_the_projects_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "jobs").mkdir()
    monkeypatch.chdir(tmp_path)
    accounts.create(tmp_path / "shop.db", "shop", unit="customer")
    path, created = taken_account(tmp_path / "jobs", "shop.db", USER)
    assert (path, created.data_set, created.id) == ("../shop.db", "shop", accounts.ID)
    accounts.of_records("rides.db", "rides").close()
    for named, field in (("shop.db", Field("user", "int")), ("rides.db", USER)):
        with pytest.raises(UsageError) as caught:
            taken_account(tmp_path / "jobs", named, field)
        assert caught.value.field == "--account"

"""Which sections a first job adds to a project file, with which account and secret."""

from pathlib import Path

import pytest

from dpstream.accounting.errors import UsageError
from dpstream.accounting.fields import Field
from dpstream.pipelines.drafting.ask import Given, Person, answers
from dpstream.pipelines.drafting.draft import Answers, Target
from dpstream.pipelines.drafting.target import Choice, made, target_of
from dpstream.pipelines.project.project import load_project
from tests import accounts
from tests.projects import write_project

NOBODY = Person(None, lambda _: None)
NEW = Choice("daily", "visits", None, None, False, None)


@pytest.fixture
def replies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Answers:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "visits.csv").write_text("user,page,time\nu,p,2024-01-01T00:00:00Z\n")
    return answers(
        Given("visits.csv", "user", ("page",), "time", (), (), "2024-01-01", "2024-01-02", "day",
              None, 1.0, 1e-6, 4, False, False), NOBODY,
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
    done, secret_made = made(target, replies)
    new = done.new_data_set
    assert secret_made and new is not None and (tmp_path / new.secret).stat().st_mode & 0o77 == 0
    assert accounts.opened(tmp_path / new.account).history().limit == (2.0, 2e-6)
    assert not made(target._replace(new_data_set=new), replies)[1]  # the secret is used again


def test_a_data_set_of_the_file_takes_no_account_or_secret(
    tmp_path: Path, replies: Answers
) -> None:
    shop = NEW._replace(data_set="shop")
    target = extended(tmp_path, replies, shop)
    assert target.new_data_set is None
    assert target.sections == ("table.visits2", "job.daily")
    assert made(target, replies) == (target, False)
    for choice in (
        shop._replace(account="a.db"),
        shop._replace(new_account=True),
        shop._replace(secret=tmp_path / "s"),
    ):
        with pytest.raises(UsageError, match="project file"):
            extended(tmp_path, replies, choice)


def test_a_table_that_is_there_is_used(tmp_path: Path, replies: Answers) -> None:
    shop = NEW._replace(data_set="shop")
    same = extended(tmp_path, replies, shop, ('"visits/*.parquet"', '"visits.csv"'))
    assert (same.table, same.new_table) == ("visits", False)
    assert same.sections == ("job.daily",)


def test_an_account_decides_the_data_set(tmp_path: Path, replies: Answers) -> None:
    accounts.create(tmp_path / "theirs.db", "theirs", unit="user")
    taken = NEW._replace(account="theirs.db")
    target = fresh(tmp_path, replies, taken)
    assert target.data_set == "theirs" and target.new_data_set is not None
    assert target.new_data_set.id == accounts.ID and target.new_data_set.limit is None
    with pytest.raises(UsageError) as caught:
        fresh(tmp_path, replies, taken._replace(data_set="others"))
    assert caught.value.field == "--data-set"
    accounts.create(tmp_path / "shop.db", "shop", unit="user")
    with pytest.raises(UsageError) as caught:
        extended(tmp_path, replies, NEW._replace(account="shop.db", data_set="shop2"))
    assert caught.value.field == "--data-set"
    with pytest.raises(UsageError) as caught:
        extended(tmp_path, replies, NEW._replace(account="shop.db"))
    assert caught.value.field in ("--account", "--data-set")


def test_the_unit_of_an_account_must_fit(tmp_path: Path, replies: Answers) -> None:
    accounts.create(tmp_path / "numbers.db", "numbers", unit="user", type_="int")
    with pytest.raises(UsageError):
        fresh(tmp_path, replies._replace(unit=Field("user")), NEW._replace(account="numbers.db"))

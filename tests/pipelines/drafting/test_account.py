"""Which account a first job names: those that are there are listed, and one is chosen."""

import json
from pathlib import Path

import pytest

from dpstream.accounting.errors import UsageError
from dpstream.accounting.plan.fields import Field
from dpstream.pipelines.drafting.account import account_of, accounts_near, chosen_account, named_by
from dpstream.pipelines.drafting.ask import Person
from tests import accounts

USER, NOBODY = Field("user"), Person(None, lambda _: None)
WANTED = ("visits", "user", "string", (2.0, 1e-6))


def test_accounts_up_to_the_repositorys_root_are_listed(tmp_path: Path) -> None:
    root, jobs = tmp_path / "root", tmp_path / "root" / "a" / "jobs"
    jobs.mkdir(parents=True)
    accounts.create(tmp_path / "above.db", "above")
    accounts.create(root / "shop.db", "shop")
    accounts.create(jobs / "own.db", "own")
    (jobs / "other.db").write_bytes(b"SQLite format 3\0 and no more")
    (jobs / "text.db").write_text("none")
    assert [each.path.name for each in accounts_near(jobs)] == ["own.db"]
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
    # A job that is replaced goes on with its account.
    table = {"path": "ledger.db", "data_set": "visits", "id": accounts.ID}
    rows = "\n".join(f"{name} = {json.dumps(text)}" for name, text in table.items())
    out = tmp_path / "job.toml"
    assert named_by(out) is None
    out.write_text(f"[ledger]\n{rows}\n")
    own = named_by(out)
    assert own == str(tmp_path / "ledger.db")
    assert chosen_account(tmp_path, NOBODY, None, False, WANTED, own) == own


@pytest.mark.parametrize(("typed", "chosen"), [("2", "b.db"), ("new", None), ("7 1", "a.db")])
def test_somebody_is_asked(tmp_path: Path, typed: str, chosen: str | None) -> None:
    for name in "ab":
        accounts.create(tmp_path / f"{name}.db", name)
    words, lines = iter(typed.split()), list[str]()
    person = Person(lambda *_: next(words), lines.append)
    account = chosen_account(tmp_path, person, None, False, WANTED)
    assert account == (None if chosen is None else str(tmp_path / chosen))
    assert "a.db" in lines[0] and "b.db" in lines[0] and len(lines) == 1 + len(typed.split()) - 1


def test_a_new_account_takes_no_others_place(tmp_path: Path) -> None:
    limit = (2.0, 1e-6)
    first, _ = account_of(None, tmp_path, USER, "visits", limit)
    second, _ = account_of(None, tmp_path, USER, "visits", limit)
    third, _ = account_of(None, tmp_path, USER, "visits", limit)
    assert len({first.path, second.path, third.path}) == len({first.id, second.id, third.id}) == 3
    assert accounts.opened(tmp_path / first.path).book().limit == limit


def test_one_that_is_there_is_named_from_the_jobs_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "jobs").mkdir()
    monkeypatch.chdir(tmp_path)
    accounts.create(tmp_path / "shop.db", "shop", unit="customer")
    place, _ = account_of("shop.db", tmp_path / "jobs", USER, "visits", (1.0, 1e-6))
    assert (place.path, place.data_set, place.id) == ("../shop.db", "shop", accounts.ID)
    assert place.unit == "customer"  # the column has another name than the account's unit
    accounts.of_records("rides.db", "rides").close()
    for path, field in (("shop.db", Field("user", "int")), ("rides.db", USER)):
        with pytest.raises(UsageError) as caught:
            account_of(path, tmp_path, field, "visits", (1.0, 1e-6))
        assert caught.value.field == "--account"

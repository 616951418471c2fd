"""The account of a session table: made once, and named in the project file."""

from pathlib import Path

import pytest

from dpstream.accounting.errors import DpstreamError, UsageError
from dpstream.pipelines.project.project import load_project
from dpstream.pipelines.session.account import with_account
from dpstream.pipelines.session.config import Config, load_config
from dpstream.state.ledger.open import PROJECT_FILE, read_history
from tests import accounts
from tests.pipelines.session.small import PROJECT
from tests.state.ledger.conformance import charge

TEXT = PROJECT.format(key="22" * 32, more="")
LINE = 'account = { path = "ledger.db" }'
assert LINE in TEXT


def project(folder: Path, line: str = LINE, text: str = TEXT) -> Path:
    """A project file whose data set has this line of its account."""
    path = folder / PROJECT_FILE
    path.write_text(text.replace(LINE, line))
    return path


def named(path: Path, *settings: str) -> tuple[Config, bool]:
    return with_account(load_project(path, settings=settings), None)


def test_the_id_is_written_into_the_file(tmp_path: Path) -> None:
    path = project(tmp_path, f"{LINE}   # mine")
    with pytest.raises(UsageError, match="`dpstream session init small`") as caught:
        load_config(path)
    assert caught.value.field == "data_set.small.account.id"
    config, made = named(path)
    assert made and read_history(config.account).created.unit.name == "record"
    line = f'account = {{ path = "ledger.db", id = "{config.account.id}" }}'
    assert path.read_text() == TEXT.replace(LINE, f"{line}   # mine")
    again, made = named(path)
    assert not made and again == config == load_config(path)


@pytest.mark.parametrize("newline", ["\n", "\r\n"])
def test_a_data_set_without_the_line_gets_it(newline: str, tmp_path: Path) -> None:
    path = project(tmp_path, "# no account yet")
    path.write_bytes(path.read_text().replace("\n", newline).encode())
    with pytest.raises(UsageError, match="`dpstream session init small`") as caught:
        load_config(path)
    assert caught.value.field == "data_set.small.account"
    config, _ = named(path)
    line = f'account = {{ path = "small.account.db", id = "{config.account.id}" }}'
    text = TEXT.replace(LINE, f"# no account yet\n{line}").replace("\n", newline)
    assert path.read_bytes() == text.encode()
    assert Path(config.account.path) == tmp_path / "small.account.db"
    assert load_config(path) == config


@pytest.mark.parametrize(
    ("line", "new"),
    [
        ('account.path = "ledger.db"  # here', 'account.path = "ledger.db"  # here\naccount.id = '),
        ('[data_set.small.account]\npath = "ledger.db"', 'path = "ledger.db"\nid = '),
        ('account = {path = "ledger.db"}', 'account = { path = "ledger.db", id = '),
    ],
)
def test_every_form_of_the_line(line: str, new: str, tmp_path: Path) -> None:
    path = project(tmp_path, line)
    config, made = named(path)
    assert made and f'{new}"{config.account.id}"' in path.read_text()
    assert load_config(path) == config and named(path) == (config, False)


def test_a_file_that_takes_no_line_says_what_to_add(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = project(tmp_path)
    monkeypatch.setattr("dpstream.pipelines.session.account._with_line", lambda *_: TEXT)
    with pytest.raises(UsageError) as caught:
        named(path)
    id_ = accounts.events(tmp_path / "ledger.db")[0].id  # type: ignore[union-attr]
    assert caught.value.field == "data_set.small.account" and path.read_text() == TEXT
    assert f'account = {{ path = "ledger.db", id = "{id_}" }}' in caught.value.fix


def test_an_account_of_these_records_is_used(tmp_path: Path) -> None:
    """One that a stopped process left, and one with charges: the path says which."""
    path = project(tmp_path)
    ledger = accounts.of_records(tmp_path / "ledger.db", "small")
    for charges in (0, 1):
        if charges:
            ledger.charge(charge(1, kind="session"))
        config, made = named(project(tmp_path))
        assert made and config.account.id == accounts.ID == load_config(path).account.id
    ledger.close()


def test_the_account_of_others_is_refused(tmp_path: Path) -> None:
    accounts.create(tmp_path / "shop.db", "small")
    accounts.of_records(tmp_path / "rides.db", "rides").close()
    path = project(tmp_path)
    for name, rule in (("shop.db", "unit user"), ("rides.db", "'rides'")):
        with pytest.raises(UsageError, match=rule) as caught:
            named(path, f"data_set.small.account.path={name}")
        assert caught.value.field == "data_set.small.account.path"
    assert path.read_text() == TEXT and not (tmp_path / "ledger.db").exists()


def test_an_account_in_another_place(tmp_path: Path) -> None:
    """The id goes into the file, the path stays that of the option."""
    path = project(tmp_path)
    config, _ = named(path, "data_set.small.account.path=other.db")
    assert Path(config.account.path) == tmp_path / "other.db"
    assert f'account = {{ path = "ledger.db", id = "{config.account.id}" }}' in path.read_text()


def test_no_account_is_made_for_a_table_that_has_one(tmp_path: Path) -> None:
    path = project(tmp_path)
    (tmp_path / "small.table").mkdir()
    (tmp_path / "small.table" / "manifest.json").write_text("{}")
    with pytest.raises(DpstreamError, match="holds a table already"):
        named(path)
    assert path.read_text() == TEXT and not (tmp_path / "ledger.db").exists()

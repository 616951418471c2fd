"""Declared keys are checked by the owner, before anybody asks, and again when files changed."""

import contextlib
import json
import stat
import threading
from pathlib import Path

import pytest

from dpstream.accounting.errors import PolicyError
from dpstream.pipelines.sql.ask import ask
from dpstream.pipelines.sql.load import load_catalog
from dpstream.pipelines.tables import registration
from dpstream.pipelines.tables.catalog import Catalog
from dpstream.pipelines.tables.registration import Registered, register
from tests import accounts
from tests.pipelines.sql.asking import FRESH, KEY, charges, data_set, dp, visits

_ORDERS = """
[table.people]
path = "people.csv"
unit_column = "uid"
columns = { uid = "INT64", code = "STRING" }
[table.orders]
path = "orders.csv"
columns = { person = "STRING", item = "STRING" }
unit_via = { table = "people", on = [["person", "code"]] }
"""
_TEXT = dp("item, COUNT(*, contribution_bounds_per_group => (0, 5)) AS n",
           "FROM orders GROUP BY item")  # fmt: skip


def shop(folder: Path) -> Path:
    path = data_set(folder, visits(200))
    accounts.write(path, path.read_text() + _ORDERS)
    people(folder)
    lines = "".join(f"c{i % 300},{'ab'[i % 2]}\n" for i in range(900))
    (folder / "orders.csv").write_text("person,item\n" + lines)
    return path


def people(folder: Path, more: str = "") -> None:
    lines = "".join(f"{i},c{i}\n" for i in range(300))
    (folder / "people.csv").write_text(f"uid,code\n{lines}{more}")


def catalog(folder: Path) -> Catalog:
    return load_catalog(folder)


def test_a_key_is_checked_before_anybody_asks(tmp_path: Path) -> None:
    shop(tmp_path)
    ask(catalog(tmp_path), dp("COUNT(*) AS n", "FROM visits"))  # has no declared key
    with pytest.raises(PolicyError, match="dpstream sql --check"):
        ask(catalog(tmp_path), _TEXT)
    assert len(charges(tmp_path)) == 1
    registered = register(catalog(tmp_path))
    assert registered == Registered(
        [{"table": "visits", "kind": "parquet", "rows_of": {"unit_column": "uid"}},
         {"table": "pages", "kind": "csv", "rows_of": "public"},
         {"table": "people", "kind": "csv", "rows_of": {"unit_column": "uid"}},
         {"table": "orders", "kind": "csv",
          "rows_of": {"unit_via": "people", "on": [["person", "code"]]}}],
        [("people", ("code",))],
    )  # fmt: skip
    assert ask(catalog(tmp_path), _TEXT).table.num_rows == 2
    with open(tmp_path / "orders.csv", "a") as file:  # its rows are nobody's key
        file.write("c1,b\n")
    assert ask(catalog(tmp_path), _TEXT, FRESH).charged


def test_a_changed_file_is_checked_anew_and_a_double_key_refused(tmp_path: Path) -> None:
    shop(tmp_path)
    register(catalog(tmp_path))
    first = ask(catalog(tmp_path), _TEXT)
    people(tmp_path, "77123,c77\n")
    assert ask(catalog(tmp_path), _TEXT).receipt == first.receipt  # reads no file
    for _ in range(2):  # the check that fails leaves no note
        with pytest.raises(PolicyError, match="was not checked") as refused:
            ask(catalog(tmp_path), _TEXT, FRESH)
        assert "77" not in str(refused.value)
        with pytest.raises(PolicyError, match="share a key") as error:
            register(catalog(tmp_path))
        assert "77" not in str(error.value) and error.value.field == "table people"
    people(tmp_path)
    assert ask(catalog(tmp_path), _TEXT, FRESH).charged  # these were checked
    assert len(charges(tmp_path)) == 2


def test_the_values_that_statements_see_are_checked(tmp_path: Path) -> None:
    """Two spellings that the catalog's type makes one number are one key."""
    path = shop(tmp_path)
    text = path.read_text().replace('code = "STRING"', 'code = "INT64"')
    accounts.write(path, text.replace('person = "STRING"', 'person = "INT64"'))
    (tmp_path / "people.csv").write_text("uid,code\n1,7\n2,07\n3,x\n4,y\n")
    with pytest.raises(PolicyError, match="share a key"):
        register(catalog(tmp_path))
    (tmp_path / "people.csv").write_text("uid,code\n1,7\n2,8\n3,x\n4,y\n")
    register(catalog(tmp_path))  # what is no number is no key


def test_a_note_is_of_these_keys_only_and_cannot_be_made_up(tmp_path: Path) -> None:
    path = shop(tmp_path)
    register(catalog(tmp_path))
    notes = tmp_path / "ledger.db.keys"
    [note] = json.loads(notes.read_text())
    assert len(note) == 32 and stat.S_IMODE(notes.stat().st_mode) == 0o600
    register(catalog(tmp_path))
    assert json.loads(notes.read_text()) == [note]
    before = path.read_text()
    wider = before.replace('[["person", "code"]]', '[["person", "code"], ["item", "kind"]]')
    accounts.write(path, wider.replace('code = "STRING"', 'code = "STRING", kind = "STRING"'))
    with pytest.raises(PolicyError, match="was not checked"):
        ask(catalog(tmp_path), _TEXT)  # another key of the same file
    accounts.write(path, before)
    (tmp_path / "noise.secret").write_text(KEY[::-1])
    with pytest.raises(PolicyError, match="was not checked"):
        ask(catalog(tmp_path), _TEXT)  # another secret
    for broken in ("", "{}", "[1, null]", '["' + "0" * 32 + '"]'):
        notes.write_text(broken)
        with pytest.raises(PolicyError, match="was not checked"):
            ask(catalog(tmp_path), _TEXT)
    assert charges(tmp_path) == []


def test_of_two_checks_at_once_neither_loses_the_other_s_note(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both have read the notes before either writes, unless one waits for the other."""
    both, real = threading.Barrier(2), registration._read

    def read(path: Path) -> list[str]:
        note_lines = real(path)
        with contextlib.suppress(threading.BrokenBarrierError):
            both.wait(timeout=0.3)
        return note_lines

    monkeypatch.setattr(registration, "_read", read)
    notes = tmp_path / "ledger.db.keys"
    checks = [
        threading.Thread(target=registration._noted, args=(notes, set(), [letter * 32]))
        for letter in "ab"
    ]
    for check in checks:
        check.start()
    for check in checks:
        check.join()
    assert sorted(real(notes)) == ["a" * 32, "b" * 32]

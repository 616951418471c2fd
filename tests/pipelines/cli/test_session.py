"""``dpstream session``: records come and go, ranges are closed, and only the operator is told."""

import json
import re
import shlex
import shutil
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from dpstream.accounting.errors import PolicyError
from dpstream.pipelines.cli.main import cli
from dpstream.pipelines.session.session import Session
from dpstream.state.ledger.events import Created, TableNamed
from tests import accounts
from tests.pipelines.cli.sessions import called, loaded, prepared, refused, told
from tests.pipelines.session.small import RECORDS


def told_refusal(*words: str) -> dict[str, Any]:
    """What a command that is refused says to machines."""
    result = called(*words, "--json")
    assert result.exit_code in (2, 3), result.output
    refusal: dict[str, Any] = json.loads(result.stderr.splitlines()[-1])
    return refusal


def test_records_come_and_go(tmp_path: Path) -> None:
    table = prepared(tmp_path)
    first = told("init", table)
    assert first == {"version": 1, "tidied": True, "warnings": []}
    assert "holds a table already" in refused(3, "init", table)
    more = tmp_path / "more.csv"
    more.write_text("name,a,b,epsilon,rho\nr0,0,1,1.0,0.5\nr9,0,1,1.0,0.5\n")
    added = called("add", table, str(more), "--operator")
    assert "Version 2" in added.stdout and "records" not in added.stdout
    assert "8 records, 7 usable; 1 taken" in added.stderr and "1 refused" in added.stderr
    assert told("replace", table, str(more), "--operator")["operator_only"]["taken"] == 2
    gone = tmp_path / "gone.csv"
    gone.write_text("name\nr9\n")
    assert told("delete", table, str(gone), "--operator")["operator_only"]["records"] == 7


def test_a_range_is_closed_for_ever(tmp_path: Path) -> None:
    table = loaded(tmp_path)
    assert called("close", table, "--arrival", "b", "--before", "3").output == "Closed.\n"
    assert told("close", table, "--arrival", "b", "--before", "3") == {"closed": False}
    refusal = refused(3, "ask", table, "--where", "b = 2 AND epsilon = 2", "--epsilon", "0.001")
    assert "0 left where a" in refusal or "0 left where" in refusal
    assert "closed  where b < 3" in called("budget", table).output
    assert refused(2, "close", table, "--arrival", "epsilon", "--before", "1").startswith("usage")


def test_nothing_private_is_said(tmp_path: Path) -> None:
    """Canaries: ids, values outside of the domain, and values inside that no question was about."""
    table = prepared(tmp_path)
    rows = "name,a,b,epsilon,rho\n" + "".join(
        f"canary-{n},{n % 4},{'canary' if n % 3 else 7},{'nan' if n == 5 else 1.75},0.5\n"
        for n in range(40)
    )
    (tmp_path / "small.csv").write_text(rows)
    outcomes = [called("init", table), called("add", table, str(tmp_path / "small.csv"))]
    page = str(tmp_path / "page.html")
    for words in (
        ["ask", table, "--where", "epsilon >= 1.5", "--epsilon", "0.5", "--by", "a"],
        ["ask", table, "--where", "b = 'canary'", "--epsilon", "0.5"],
        ["ask", table, "median(b)", "--where", "epsilon >= 1.5", "--rho", "0.5", "--drop"],
        ["plan", table, "--epsilon", "0.5"], ["budget", table], ["transcript", table, "--json"],
        ["select", table, "rich", "--with-epsilon", "0.5"], ["picture", table, "--out", page],
        ["delete", table, str(tmp_path / "small.csv")], ["budget", table],
    ):  # fmt: skip
        outcomes.append(called(*words))
    outputs = "".join(result.output for result in outcomes)
    public = [Path(page), tmp_path / "ledger.db", tmp_path / "small.names.json"]
    held = b"".join(path.read_bytes() for path in public) + outputs.encode()
    assert len(outputs) > 1_000 and b"canary-" not in held
    assert held.count(b"canary") == 0


ASK = ("count", "--where", "epsilon >= 0.5", "--epsilon", "0.5")


def test_five_data_sets_in_turn_over_one_folder(tmp_path: Path) -> None:
    """A table has one account: in another one its records would have their budgets again."""
    table = loaded(tmp_path)
    assert called("ask", table, *ASK).exit_code == 0
    text = Path(table).read_text().replace(f'id = "{accounts.ID}"\n', "")
    for number in range(5):
        name = f"other{number}"
        copy = tmp_path / f"{name}.toml"
        copy.write_text(text.replace("ledger.db", f"{name}.db").replace('"small"', f'"{name}"', 1))
        assert told_refusal("init", str(copy), "--new-account")["field"] == "table.folder"
        assert not (tmp_path / f"{name}.db").exists()  # and no account was made for it
        # An account that somebody made in another place, with a file that names it.
        accounts.write(copy, copy.read_text(), f"{number:016x}")
        for words in (("ask", str(copy), *ASK), ("plan", str(copy), *ASK), ("budget", str(copy)),
                      ("allot", str(copy), "all", *ASK[1:]),
                      ("add", str(copy), str(tmp_path / "small.csv"))):  # fmt: skip
            assert told_refusal(*words)["field"] == "table.folder"
        assert accounts.charges(tmp_path / f"{name}.db") == []
    assert called("ask", table, *ASK).exit_code == 0


def test_a_table_that_is_exchanged_while_a_session_is_open(tmp_path: Path) -> None:
    """Nothing is charged: the folder is looked at before each charge."""
    with Session(loaded(tmp_path)) as session:
        points = session.where("epsilon >= 0.5")
        assert points.count(0.25).value is not None
        other = tmp_path / "other"
        other.mkdir()
        loaded(other)
        shutil.rmtree(tmp_path / "small.table")
        (other / "small.table").rename(tmp_path / "small.table")
        with pytest.raises(PolicyError) as caught:
            points.count(0.5)
    assert caught.value.field == "table.folder"
    assert len(accounts.charges(tmp_path / "ledger.db")) == 1


def test_an_account_is_chosen_or_made(tmp_path: Path) -> None:
    """Without a terminal a flag says which; the fix of each refusal is typed."""
    table = prepared(tmp_path)
    text = Path(table).read_text().replace(f'id = "{accounts.ID}"\n', "")
    Path(table).write_text(text)
    accounts.create(tmp_path / "shop.db", "shop")
    (tmp_path / "ledger.db").unlink()
    refusal = told_refusal("init", table)
    assert refusal["field"] == "--account" and "shop.db" in refusal["rule"]
    assert (
        told_refusal("init", table, "--account", str(tmp_path / "shop.db"))["field"] == "--account"
    )
    assert called("init", table, "--new-account").exit_code == 0
    own = accounts.events(tmp_path / "ledger.db")
    assert [type(event) for event in own] == [Created, TableNamed]
    # A second table of the same records in the same account: their budgets are shared.
    assert called("ask", table, *ASK).exit_code == 0
    second = tmp_path / "second.toml"
    second.write_text(text.replace("small.table", "second.table"))
    assert told_refusal("init", str(second))["field"] == "--account"
    assert called("init", str(second), "--account", str(tmp_path / "ledger.db")).exit_code == 0
    assert len(accounts.charges(tmp_path / "ledger.db")) == 1
    assert told_refusal("ask", str(second), *ASK[:4], "1.75")["field"] == "budget"


WIDER = """
[[dimension]]
name = "c"
type = "category"
values = ["x", "y"]
missing = "point"
"""


def wider(folder: Path, name: str = "wide", id_: bool = True) -> str:
    """A copy of the table's file with wider ranges and one dimension more, in another folder."""
    text = (folder / "small.toml").read_text().replace("small.table", f"{name}.table")
    text = text.replace("high = 4\n", "high = 6\n").replace("high = 10\n", "high = 12\n") + WIDER
    text = text.replace('"small.csv"', '"wide.csv"')
    (folder / f"{name}.toml").write_text(
        text if id_ else text.replace(f'id = "{accounts.ID}"\n', "")
    )
    rows = "".join(f"{row},x\n" for row in RECORDS.splitlines()[1:])
    (folder / "wide.csv").write_text("name,a,b,epsilon,rho,c\n" + rows)
    return str(folder / f"{name}.toml")


def test_wider_dimensions_do_not_make_budgets_whole_again(tmp_path: Path) -> None:
    """The fix of the refusal is typed, and points have spent what they had spent."""
    old = loaded(tmp_path)
    question = ("ask", "{}", "count", "--where", "a < 2 AND epsilon >= 1.5", "--epsilon")

    def asks(table: str, amount: str) -> Any:
        return called(*(word.format(table) for word in question), amount)

    assert asks(old, "1.25").exit_code == 0
    new, charges = wider(tmp_path), accounts.charges(tmp_path / "ledger.db")
    refusal = told_refusal("init", new)
    assert refusal["field"] == "data_set"
    typed = re.findall("`dpstream session ([^`]*)`", refusal["fix"])[0]
    words = [{"OLD": old, "NEW": new}.get(word, word) for word in typed.split()]
    done = told(*words)
    assert (done["account"], done["embedded"]) == (accounts.ID, 1)
    assert told(*words)["embedded"] is None
    following = shlex.split(done["next"])
    assert called(*following[2:]).exit_code == 0 and accounts.charges(tmp_path / "ledger.db")
    assert told_refusal(*(word.format(new) for word in question), "0.5")["field"] == "budget"
    assert asks(new, "0.25").exit_code == 0
    elsewhere = ("--where", "a >= 4 AND epsilon >= 1.5", "--epsilon", "1.5")
    assert called("ask", new, "count", *elsewhere).exit_code == 0
    # The old table is refused, and its question's old answer is not taken for one of now.
    for words in (["plan", old, *ASK], ["budget", old], ["add", old, str(tmp_path / "small.csv")],
                  [word.format(old) for word in question] + ["1.25"]):  # fmt: skip
        assert told_refusal(*words)["field"] == "data_set"
    assert len(accounts.charges(tmp_path / "ledger.db")) == len(charges) + 2
    assert "1.5" in called("transcript", new).output
    for words in ((new,), (new, "--json")):  # every event has its line
        view = CliRunner().invoke(cli, ["account", "show", *words])
        assert view.exit_code == 0 and "widened" in view.output


def test_what_cannot_be_migrated_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    old = loaded(tmp_path)
    assert called("ask", old, *ASK).exit_code == 0
    before = accounts.events(tmp_path / "ledger.db")
    changes = {
        "another account": ('path = "ledger.db"', 'path = "other.db"', "ledger"),
        "a narrower range": ("high = 6", "high = 3", "dimension a"),
        "another column": ('name = "b"\n', 'name = "b"\ncolumn = "a"\n', "dimension b"),
        "a value for all": ('kind = "rho"\n', 'kind = "rho"\nvalue = 1.0\n', "dimension rho"),
        "another name": ('name = "small"', 'name = "large"', "table.name"),
        "the old folder": ("wide.table", "small.table", "table.folder"),
    }
    for line, new, field in changes.values():
        path = Path(wider(tmp_path))
        assert line in path.read_text()
        path.write_text(path.read_text().replace(line, new))
        assert told_refusal("migrate", old, str(path))["field"] == field
    assert told_refusal("migrate", old, old)["field"] == "dimension"
    assert accounts.events(tmp_path / "ledger.db") == before
    # A file that names no account yet names the old one's from then on.
    path = Path(wider(tmp_path, id_=False))
    assert told("migrate", old, str(path))["embedded"] == 1
    assert f'id = "{accounts.ID}"' in path.read_text() and called("init", str(path)).exit_code == 0


def test_help_has_examples() -> None:
    for name in ("init", "migrate", "add", "replace", "delete", "close", "ask", "plan", "allot",
                 "select", "stand", "budget", "transcript", "picture"):  # fmt: skip
        assert "Examples:" in called(name, "--help").output, name

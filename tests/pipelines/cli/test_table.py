"""``dpstream table``: records come and go, ranges are closed, and only the operator is told.

``dpstream sql`` about points: what is asked is told once and paid once, and refusals in words.
"""

import re
import shlex
import shutil
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from dpstream.accounting.errors import PolicyError, UsageError
from dpstream.pipelines.cli.main import cli
from dpstream.pipelines.cli.parts import runner_of
from dpstream.pipelines.session.config import load_config
from dpstream.state.ledger.events import Created, TableNamed
from dpstream.state.ledger.open import PROJECT_FILE
from tests import accounts
from tests.pipelines.cli.called import (
    Named,
    answer_of,
    ask_sql,
    budget_of,
    call,
    called,
    failed,
    json_of,
    loaded,
    named,
    prepared,
    printed,
)
from tests.pipelines.session.statements import Session
from tests.pipelines.session.tables import RECORDS, SMALL_PROJECT


def test_a_file_with_a_byte_order_mark_gets_its_account(tmp_path: Path) -> None:
    table, mark = named(tmp_path), b"\xef\xbb\xbf"
    (tmp_path / "small.csv").write_text(RECORDS)
    text = SMALL_PROJECT.format(key="22" * 32, more="").encode()
    (tmp_path / PROJECT_FILE).write_bytes(mark + text)
    assert called("init", *table).exit_code == 0
    written = (tmp_path / PROJECT_FILE).read_bytes()
    assert written.startswith(mark + text[:20]) and written.count(mark) == 1
    assert {spent for *_, spent in budget_of(table)} == {0}


def test_the_ledger_says_that_entries_are_of_points(tmp_path: Path) -> None:
    table = loaded(tmp_path)
    answer_of(table, "epsilon = 0.5 | COUNT(*) AS n | epsilon >= 1")
    outcome = CliRunner().invoke(cli, ["account", "show", str(tmp_path / "ledger.db")])
    assert "record (string)" in outcome.output and "only some points pay" in outcome.output


def told_refusal(*words: str) -> dict[str, Any]:
    """What a command of the owner that is refused says to machines."""
    return refusal_of(called(*words, "--json"))


def sql_refusal(table: Named, statement: str) -> dict[str, Any]:
    """What a statement that is refused says to machines."""
    return refusal_of(ask_sql(table, statement, "--json"))


def refusal_of(result: Result) -> dict[str, Any]:
    assert result.exit_code in (2, 3), result.output
    refusal: dict[str, Any] = printed(result.stderr.splitlines()[-1])
    return refusal


def test_records_come_and_go(tmp_path: Path) -> None:
    table = prepared(tmp_path)
    first = json_of("init", *table)
    following = shlex.split(first.pop("next"))
    assert first == {"version": 1, "tidied": True, "warnings": []}
    assert following[:3] == ["dpstream", "sql", "--explain"]
    assert "Can ask     yes" in call(*following[1:]).stdout
    assert "holds a table already" in failed(3, called("init", *table))
    more = tmp_path / "more.csv"
    more.write_text("name,a,b,epsilon,rho\nr0,0,1,1.0,0.5\nr9,0,1,1.0,0.5\n")
    added = called("change", *table, str(more), "--operator")
    done, line = added.stdout.splitlines()  # and nothing about records
    assert done == "Version 2 of the table is in place."
    following = shlex.split(line.removeprefix("Next"))
    assert call(*following[1:]).exit_code == 0
    assert "8 records, 7 usable; 1 taken" in added.stderr and "1 refused" in added.stderr
    replaced = json_of("change", *table, str(more), "--replace", "--operator")
    assert replaced["operator_only"]["taken"] == 2
    gone = tmp_path / "gone.csv"
    gone.write_text("name\nr9\n")
    deleted = json_of("change", *table, str(gone), "--delete", "--operator")
    assert deleted["operator_only"]["records"] == 7


def test_a_range_is_closed_for_ever(tmp_path: Path) -> None:
    table = loaded(tmp_path)
    assert called("close", *table, "--arrival", "b", "--before", "3").output == "Closed.\n"
    assert json_of("close", *table, "--arrival", "b", "--before", "3") == {"closed": False}
    text = failed(3, ask_sql(table, "epsilon = 0.001 | COUNT(*) AS n | b = 2 AND epsilon = 2"))
    assert "0 left where" in text
    assert ("epsilon", "b < 3", None) in budget_of(table)
    for beside in (("--arrival", "epsilon"), ("--arrival", "nothing")):
        assert failed(2, called("close", *table, *beside, "--before", "1")).startswith("usage")


def test_nothing_private_is_said(tmp_path: Path) -> None:
    """Canaries: ids, values outside of the domain, and values inside that no question was about."""
    table = prepared(tmp_path)
    rows = "name,a,b,epsilon,rho\n" + "".join(
        f"canary-{n},{n % 4},{'canary' if n % 3 else 7},{'nan' if n == 5 else 1.75},0.5\n"
        for n in range(40)
    )
    (tmp_path / "small.csv").write_text(rows)
    outcomes = [called("init", *table), called("change", *table, str(tmp_path / "small.csv"))]
    for statement in (
        "epsilon = 0.5 | a, COUNT(*) AS n | epsilon >= 1.5 GROUP BY a",
        "epsilon = 0.5 | COUNT(*) AS n | b = 'canary'",
        "epsilon = 0.5 | COUNT(*) AS n | MOD(b, 'canary') = 1",
        "rho = 0.5, drop = TRUE | MEDIAN(b) AS n | epsilon >= 1.5",
        "epsilon = 0.5 | COUNT(*) AS n",
        "CREATE ALLOTMENT night AS SELECT WITH DIFFERENTIAL_PRIVACY OPTIONS(epsilon = 0.5) *"
        " FROM small WHERE remaining_epsilon >= 0.5",
        "SELECT * FROM dpstream.budget", "SELECT * FROM dpstream.allotments",
    ):  # fmt: skip
        outcomes += [ask_sql(table, statement, *more) for more in ((), ("--json",), ("--explain",))]
    outcomes.append(called("change", *table, str(tmp_path / "small.csv"), "--delete"))
    outputs = "".join(result.output for result in outcomes)
    held = (tmp_path / "ledger.db").read_bytes() + outputs.encode()
    assert len(outputs) > 1_000 and b"canary" not in held


ASK = "epsilon = 0.5 | COUNT(*) AS n | epsilon >= 0.5"


def test_five_data_sets_in_turn_over_one_folder(tmp_path: Path) -> None:
    """A table has one account: in another one its records would have their budgets again."""
    table = loaded(tmp_path)
    assert ask_sql(table, ASK).exit_code == 0
    file = tmp_path / PROJECT_FILE
    text = file.read_text()
    line = f'account = {{ path = "ledger.db", id = "{accounts.ID}" }}'
    assert line in text
    for number in range(5):
        name = f"other{number}"
        other = text.replace("[data_set.small]", f"[data_set.{name}]")
        file.write_text(other.replace(line, f'account = {{ path = "{name}.db" }}'))
        assert told_refusal("init", *table)["field"] == "table.coordinates"
        assert not (tmp_path / f"{name}.db").exists()  # and no account was made for it
        # An account that somebody made in another place, with a file that names it.
        accounts.write(file, file.read_text(), f"{number:016x}")
        for statement in (ASK, "SELECT * FROM dpstream.budget"):
            assert sql_refusal(table, statement)["field"] == "table.coordinates"
        change = ("change", *table, str(tmp_path / "small.csv"))
        assert told_refusal(*change)["field"] == "table.coordinates"
        assert accounts.charges(tmp_path / f"{name}.db") == []
    file.write_text(text)
    assert ask_sql(table, ASK).exit_code == 0


def test_a_table_that_is_exchanged_while_a_session_is_open(tmp_path: Path) -> None:
    """Nothing is charged: the folder is looked at before each charge."""
    loaded(tmp_path)
    with Session(load_config(tmp_path)) as session:
        points = session.where("epsilon >= 0.5")
        assert points.count(0.25).value is not None
        other = tmp_path / "other"
        other.mkdir()
        loaded(other)
        shutil.rmtree(tmp_path / "small.table")
        (other / "small.table").rename(tmp_path / "small.table")
        with pytest.raises(PolicyError) as caught:
            points.count(0.5)
    assert caught.value.field == "table.coordinates"
    assert len(accounts.charges(tmp_path / "ledger.db")) == 1


def test_an_account_is_made_once(tmp_path: Path) -> None:
    """At the path of the data set, and named in the project file; the fix of a refusal is typed."""
    table, file = prepared(tmp_path), tmp_path / PROJECT_FILE
    text = file.read_text().replace(f', id = "{accounts.ID}"', "")
    file.write_text(text)
    (tmp_path / "ledger.db").unlink()
    refusal = sql_refusal(table, ASK)
    assert refusal["field"] == "data_set.small.account.id"
    typed = re.findall("`dpstream table ([^`]*)`", refusal["fix"])[0].split()
    outcome = called(*typed, *table[1:])
    assert outcome.exit_code == 0
    own = accounts.events(tmp_path / "ledger.db")
    assert [type(event) for event in own] == [Created, TableNamed]
    assert f"The account {own[0].id} of small is now in {PROJECT_FILE}" in outcome.stderr  # type: ignore[union-attr]
    # A second table of the same records in the same account: their budgets are shared.
    assert ask_sql(table, ASK).exit_code == 0
    file.write_text(file.read_text() + copied(text, "second"))
    assert called("init", *named(tmp_path, "second")).exit_code == 0
    assert len(accounts.charges(tmp_path / "ledger.db")) == 1
    second = "epsilon = 1.75 | COUNT(*) AS n | epsilon >= 0.5"
    assert sql_refusal(named(tmp_path, "second"), second)["field"] == "budget"
    assert told_refusal("init", *table[1:])["rule"].endswith("several: second, small")


def copied(text: str, name: str) -> str:
    """The table of a project file's text, by another name."""
    return text[text.index("[table.small]") :].replace("[table.small", f"[table.{name}")


WIDER = """
[table.small.dimension.c]
type = "category"
values = ["x", "y"]
missing = "point"
"""


def wider(folder: Path, *change: str) -> Named:
    """The project file gets a copy of its table with wider ranges and one dimension more.

    Args:
        change: a part of the copy, and what is in its place.
    """
    file = folder / PROJECT_FILE
    text = file.read_text().partition("\n[table.wide]")[0]
    copy = text + WIDER
    for old, new in (("high = 4\n", "high = 6\n"), ("high = 10\n", "high = 12\n"),
                     ('"small.csv"', '"wide.csv"'), *([change] if change else [])):  # fmt: skip
        assert old in copy, old
        copy = copy.replace(old, new)
    file.write_text(f"{text}\n{copied(copy, 'wide')}")
    rows = "".join(f"{row},x\n" for row in RECORDS.splitlines()[1:])
    (folder / "wide.csv").write_text("name,a,b,epsilon,rho,c\n" + rows)
    return named(folder, "wide")


def test_wider_dimensions_do_not_make_budgets_whole_again(tmp_path: Path) -> None:
    """The fix of the refusal is typed, and points have spent what they had spent."""
    old = loaded(tmp_path)
    rich = "COUNT(*) AS n | a < 2 AND epsilon >= 1.5"
    assert ask_sql(old, f"epsilon = 1.25 | {rich}").exit_code == 0
    new, charges = wider(tmp_path), accounts.charges(tmp_path / "ledger.db")
    refusal = told_refusal("init", *new)
    assert refusal["field"] == "data_set"
    typed = re.findall("`dpstream table ([^`]*)`", refusal["fix"])[0]
    words = [{"OLD": "small", "NEW": "wide"}.get(word, word) for word in typed.split()]
    done = called(*words, *old[1:])
    assert done.exit_code == 0 and "small was migrated now, with 1 charge." in done.stderr
    assert "Version 1 of the table" in done.stdout and accounts.charges(tmp_path / "ledger.db")
    assert told_refusal(*words, *old[1:])["field"] == "table.coordinates"
    assert sql_refusal(new, f"epsilon = 0.5 | {rich}")["field"] == "budget"
    assert ask_sql(new, f"epsilon = 0.25 | {rich}").exit_code == 0
    elsewhere = "epsilon = 1.5 | COUNT(*) AS n | a >= 4 AND epsilon >= 1.5"
    assert ask_sql(new, elsewhere).exit_code == 0
    # The old table is refused, and its question's old answer is not taken for one of now.
    for statement in (ASK, f"epsilon = 1.25 | {rich}"):
        for options in ((), ("--explain",)):
            result = ask_sql(old, statement, *options, "--json")
            assert refusal_of(result)["field"] == "data_set"
    change = ("change", *old, str(tmp_path / "small.csv"))
    assert told_refusal(*change)["field"] == "data_set"
    assert len(accounts.charges(tmp_path / "ledger.db")) == len(charges) + 2
    for options in ((), ("--json",)):  # every event has its line
        view = CliRunner().invoke(cli, ["account", "show", "small", *new[1:], *options])
        assert view.exit_code == 0 and "widened" in view.output


def test_what_cannot_be_migrated_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    old = loaded(tmp_path)
    assert ask_sql(old, ASK).exit_code == 0
    before = accounts.events(tmp_path / "ledger.db")
    column = '[table.small.dimension.b]\ntype = "integer"\n'
    changes = {
        "a narrower range": ("high = 6", "high = 3", "table.wide.dimension.a"),
        "another column": (column, f'{column}column = "a"\n', "table.wide.dimension.b"),
        "a value": ('kind = "rho"\n', 'kind = "rho"\nvalue = 1.0\n', "table.wide.dimension.rho"),
        "the old folder": (
            "[table.small]\n", '[table.small]\ncoordinates = "small.table"\n', "table.coordinates"
        ),
    }  # fmt: skip
    for line, new, field in changes.values():
        wider(tmp_path, line, new)
        assert told_refusal("init", "wide", "--migrate", "small", *old[1:])["field"] == field
    refusal = told_refusal("init", "small", "--migrate", "small", *old[1:])
    assert refusal["field"] == "table.small.dimension"
    wider(tmp_path)
    file = tmp_path / PROJECT_FILE
    text = file.read_text()
    more = '[data_set.large]\naccount = { path = "large.db" }\n'
    two = text.replace("[table.small]\n", f'{more}[table.small]\ndata_set = "small"\n')
    two = two.replace("[table.wide]\n", '[table.wide]\ndata_set = "large"\n')
    accounts.write(file, two, "1" * 16)
    refusal = told_refusal("init", "wide", "--migrate", "small", *old[1:])
    assert refusal["field"] == "table.wide.data_set"
    assert accounts.events(tmp_path / "ledger.db") == before
    file.write_text(text)
    migrating = ("init", "--migrate", "small", *named(tmp_path, "wide"))
    assert "now, with 1 charge" in called(*migrating).stderr


def test_a_runner_is_named_with_its_flags() -> None:
    assert runner_of(None, 1, ()) is None
    runner = runner_of("DirectRunner", 2, ("--x",))
    assert runner is not None and runner.parallelism == 2
    with pytest.raises(UsageError, match="--runner"):
        runner_of(None, 2, ())


RICH = "epsilon = 0.5 | a, COUNT(*) AS n | epsilon >= 1 GROUP BY a"


def test_a_question_is_charged_once(tmp_path: Path) -> None:
    table = loaded(tmp_path)
    first = ask_sql(table, RICH)
    assert first.exit_code == 0 and "Charged epsilon 0.5 to every point asked" in first.stderr
    assert [line.split()[0] for line in first.stdout.splitlines()] == ["a", "-", *"0123"]
    assert "INSECURE" in first.stderr and "ledger.db" in first.stderr
    again = ask_sql(table, RICH)
    assert again.stdout == first.stdout and "first answered" in again.stderr
    assert answer_of(table, RICH)["charged"] is False
    assert answer_of(table, RICH, "--fresh")["charged"]
    refusal = failed(3, ask_sql(table, RICH.replace("0.5", "0.75")))
    assert "0 left where epsilon >= 1 AND epsilon < 1.75" in refusal
    dropped = answer_of(table, "epsilon = 0.25, drop = TRUE | COUNT(*) AS n | epsilon >= 1")
    assert dropped["charged"] and len(dropped["rows"]) == 1


def test_a_refusal_for_machines(tmp_path: Path) -> None:
    table = loaded(tmp_path)
    poor = "COUNT(*) AS n | a < 2"
    allots = "SELECT WITH DIFFERENTIAL_PRIVACY OPTIONS(epsilon = 0.5) * FROM small WHERE a < 2"
    lacking = "a < 2 AND epsilon >= 0.25 AND epsilon < 0.5"
    for statement in (f"epsilon = 0.5 | {poor}", f"CREATE ALLOTMENT half AS {allots}"):
        result = ask_sql(table, statement, "--json")
        assert result.exit_code == 3 and result.stdout == ""
        figures = printed(result.stderr)  # one object
        assert figures["error"] == "refused" and figures["lacking_boxes"] == 1
        assert figures["lacking"] == [{"where": lacking, "left": 0.25}]
        assert figures["largest"] == 0.25


def test_the_first_question_and_what_a_refusal_names(tmp_path: Path) -> None:
    """Each way that a refusal names is typed, and answered."""
    table, all_ = loaded(tmp_path), "epsilon = {} | COUNT(*) AS n"
    assert answer_of(table, all_.format(0.25))["charged"]
    fix = sql_refusal(table, all_.format(0.5))["fix"]
    [where] = re.findall(r"WHERE ([^,]+),", fix)
    result = ask_sql(table, all_.format(0.5), "--explain", "--json")
    planned = printed(result.stdout)
    assert result.exit_code == 3 and not planned["acceptance"]["accepted"]
    assert not planned["accepted"] and planned["enough"] == where and "drop = TRUE" in fix
    assert answer_of(table, f"{all_.format(0.5)} | {where}")["charged"]
    assert answer_of(table, all_.format("0.5, drop = TRUE"))["charged"]
    nothing = sql_refusal(table, all_.format("1.9, drop = TRUE"))["fix"]
    [statement] = re.findall("SELECT .* FROM dpstream.budget", nothing)
    assert "drop" not in nothing and ask_sql(table, statement).exit_code == 0


def test_several_figures_and_rho(tmp_path: Path) -> None:
    table = loaded(tmp_path)
    items = (
        "COUNT(*) AS n, SUM(b) AS s, AVG(b) AS m, MEDIAN(b) AS med, PERCENTILE_CONT(b, 0.25) AS q"
    )
    answer = answer_of(table, f"rho = 0.5 | {items} | rho >= 0.5")
    [row] = answer["rows"]
    assert row["values"].keys() == row["intervals"].keys() == {"n", "s", "m", "med", "q"}
    assert row["intervals"]["n"].keys() == {"sd", "noise_low", "noise_high"}
    question = answer["points"]["question"]
    assert (question["kind"], question["amount"]) == ("rho", 500_000)


def test_a_union_is_free(tmp_path: Path) -> None:
    table = loaded(tmp_path)
    answer_of(table, RICH)
    part = "union = TRUE | COUNT(*) AS n | {}epsilon >= 1"
    union = answer_of(table, part.format("a < 2 AND "))
    assert not union["charged"] and union["run_id"] == ""
    plan = printed(ask_sql(table, "epsilon = 0.1 | COUNT(*) AS n | a < 2 AND epsilon >= 1",
                         "--explain", "--json").stdout)  # fmt: skip
    assert plan["union"]["parts"] == 2
    failed(3, ask_sql(table, "union = TRUE | COUNT(*) AS n | a < 2"))
    failed(2, ask_sql(table, part.format(""), "--fresh"))


def test_statements_of_one_command_are_checked_first(tmp_path: Path) -> None:
    table = loaded(tmp_path)
    text = "SELECT WITH DIFFERENTIAL_PRIVACY OPTIONS(epsilon = 0.25) COUNT(*) AS n FROM small"
    failed(2, ask_sql(table, f"{text}; {text} WHERE nothing = 1"))
    assert {spent for *_, spent in budget_of(table)} == {0}
    result = ask_sql(table, f"{text}; EXPLAIN {text}; SELECT COUNT(*) AS n FROM dpstream.budget;")
    assert result.exit_code == 0 and "asking it again is free" in result.stdout


def test_a_plan_is_free(tmp_path: Path) -> None:
    table = loaded(tmp_path)
    plan = printed(ask_sql(table, "epsilon = 0.5 | DIV(a, 2) AS h, COUNT(*) AS n, AVG(b) AS m | "
                         "epsilon >= 1 GROUP BY h", "--explain", "--json").stdout)  # fmt: skip
    assert plan["accepted"] and plan["cells"] == 2 and len(plan["errors"]) == 2
    text = ask_sql(table, "epsilon = 0.5 | COUNT(*) AS n | a < 2", "--explain").output
    assert "Refused" in text and "0.25 left where a < 2 AND epsilon >= 0.25" in text
    assert {spent for *_, spent in budget_of(table)} == {0}


@pytest.mark.parametrize("analyst", ["", "a\nb", "x" * 201])
def test_an_analyst_has_a_name(analyst: str, tmp_path: Path) -> None:
    table = loaded(tmp_path)
    assert "--analyst" in failed(2, ask_sql(table, RICH, "--analyst", analyst))


def test_the_prompt_asks_points_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table = loaded(tmp_path)
    monkeypatch.setattr("dpstream.pipelines.cli.sql.on_terminal", lambda: True)
    lines = [
        "SELECT WITH DIFFERENTIAL_PRIVACY OPTIONS(epsilon = 0.25)\nCOUNT(*) AS n FROM small;",
        "DROP ALLOTMENT night ON small;",
        "SELECT DISTINCT spent FROM dpstream.budget WHERE kind = 'epsilon' ORDER BY spent;",
        "exit",
    ]
    result = CliRunner().invoke(cli, ["sql", *table[1:]], input="\n".join(lines))
    assert result.exit_code == 0 and "has no allotment 'night'" in result.output
    assert "0.25" in result.output.partition("spent")[2]
    assert result.output.count("ledger.db") == 1  # which account pays is told once

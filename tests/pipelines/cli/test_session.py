"""``dpstream session``: records come and go, ranges are closed, and only the operator is told.

``dpstream session budget|picture|stand``: what everybody may see.

``dpstream session ask|allot|select``: what is asked is told once, and paid once.

What the commands of sessions share: budgets, runners, and refusals in words.
"""

import re
import shlex
import shutil
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from dpstream.accounting.errors import PolicyError, UsageError
from dpstream.pipelines.cli.main import cli
from dpstream.pipelines.cli.parts import Chosen, runner_of
from dpstream.pipelines.cli.session_ask import budget_of, opened, subspace
from dpstream.pipelines.session.session import Session
from dpstream.state.ledger.events import Created, TableNamed
from dpstream.state.ledger.open import PROJECT_FILE
from tests import accounts
from tests.pipelines.cli.called import (
    Named,
    called,
    json_of,
    loaded,
    named,
    prepared,
    printed,
    session_refused,
)
from tests.pipelines.session.tables import RECORDS, SMALL_PROJECT

QUOTA = "\n[table.small.quota]\nepsilon = 1.5\n"


def test_budgets_and_transcripts(tmp_path: Path) -> None:
    table = loaded(tmp_path, QUOTA)
    assert called("budget", *table, "--transcript").output == "Nothing was asked yet.\n"
    run_id = json_of("ask", *table, "--where", "a < 2 AND epsilon >= 1", "--epsilon", "0.5")[
        "run_id"
    ]
    text = called("budget", *table).output
    assert "epsilon     spent by a point at most 0.5, at least 0" in text
    assert "0.5  where a < 2 AND epsilon >= 1" in text
    assert "Quota       analyst: epsilon 1.5 of a point, charged to one at most 0.5" in text
    part = json_of("budget", *table, "--where", "a = 0 AND epsilon = 2")
    assert part["budgets"]["epsilon"]["least_spent"] == 0.5
    transcript = called("budget", *table, "--transcript").output
    assert run_id[:12] in transcript and "question epsilon 0.5: count" in transcript
    [entry] = json_of("budget", *table, "--transcript")["entries"]
    assert entry["run_id"] == run_id and entry["amount"] == 0.5


def test_a_file_with_a_byte_order_mark_gets_its_account(tmp_path: Path) -> None:
    table, mark = named(tmp_path), b"\xef\xbb\xbf"
    (tmp_path / "small.csv").write_text(RECORDS)
    text = SMALL_PROJECT.format(key="22" * 32, more="").encode()
    (tmp_path / PROJECT_FILE).write_bytes(mark + text)
    assert called("init", *table).exit_code == 0
    written = (tmp_path / PROJECT_FILE).read_bytes()
    assert written.startswith(mark + text[:20]) and written.count(mark) == 1
    assert json_of("budget", *table, "--transcript")["entries"] == []


def test_an_allotment_is_named_in_transcript_and_picture(tmp_path: Path) -> None:
    table, page = loaded(tmp_path), tmp_path / "page.html"
    run_id = json_of("allot", *table, "half", "--where", "epsilon >= 1", "--epsilon", "0.5")[
        "run_id"
    ]
    json_of("ask", *table, "--from", "half", "--epsilon", "0.25")
    lines = called("budget", *table, "--transcript").output
    assert "allotment half epsilon 0.5\n" in lines and "draw on half epsilon 0.25: count\n" in lines
    made, draw = json_of("budget", *table, "--transcript")["entries"]
    assert (made["name"], draw["name"], draw["allotment"]) == ("half", "half", run_id)
    assert called("picture", *table, "--out", str(page)).exit_code == 0
    assert "allotment half" in page.read_text() and "draw on half: count" in page.read_text()
    (tmp_path / "small.names.json").unlink()
    assert f"draw on {run_id} epsilon 0.25" in called("budget", *table, "--transcript").output


def test_pictures(tmp_path: Path) -> None:
    table = loaded(tmp_path)
    json_of("ask", *table, "--where", "epsilon >= 1", "--epsilon", "0.5")
    page = tmp_path / "page.html"
    assert json_of("picture", *table, "--out", str(page), "--by", "a,b") == {"out": "page.html"}
    assert "spent by a point, at most" in page.read_text()
    for words in (["--by", "a,b", "--epsilon", "1"], ["--over-time"], ["--kind", "rho"]):
        out = tmp_path / "one.png"
        assert called("picture", *table, "--out", str(out), *words).exit_code == 0
        assert out.read_bytes()[:4] == b"\x89PNG"
    session_refused(2, "picture", *table, "--out", str(tmp_path / "a.svg"))
    mine = tmp_path / "mine.html"
    mine.write_text("mine")
    session_refused(2, "picture", *table, "--out", str(mine))


def test_standing_queries(tmp_path: Path) -> None:
    table = loaded(tmp_path)
    words = ["stand", *table, "--where", "epsilon >= 1", "--arrival", "b", "--width", "2",
             "--until", "6", "--epsilon", "1"]  # fmt: skip
    first = json_of(*words, "--tick", "one")
    assert json_of(*words, "--tick", "one")["receipt"] == first["receipt"]
    json_of(*words, "--tick", "two")
    wheres = [entry["where"][0] for entry in json_of("budget", *table, "--transcript")["entries"]]
    assert wheres == ["b < 2 AND epsilon >= 1", "b >= 2 AND b < 4 AND epsilon >= 1"]
    json_of(*words, "--tick", "three")
    assert "no window" in session_refused(3, *words, "--tick", "four")


def test_the_ledger_says_that_entries_are_of_points(tmp_path: Path) -> None:
    table = loaded(tmp_path)
    json_of("ask", *table, "--where", "epsilon >= 1", "--epsilon", "0.5")
    outcome = CliRunner().invoke(cli, ["account", "show", str(tmp_path / "ledger.db")])
    assert "record (string)" in outcome.output and "only some points pay" in outcome.output


def told_refusal(*words: str) -> dict[str, Any]:
    """What a command that is refused says to machines."""
    result = called(*words, "--json")
    assert result.exit_code in (2, 3), result.output
    refusal: dict[str, Any] = printed(result.stderr.splitlines()[-1])
    return refusal


def test_records_come_and_go(tmp_path: Path) -> None:
    table = prepared(tmp_path)
    first = json_of("init", *table)
    following = shlex.split(first.pop("next"))
    assert first == {"version": 1, "tidied": True, "warnings": []}
    assert following == ["dpstream", "session", "ask", "small", "count", "--epsilon", "0.25",
                         "--dry-run", *table[1:]]  # fmt: skip
    assert "Can ask     yes" in called(*following[2:]).stdout
    assert "holds a table already" in session_refused(3, "init", *table)
    more = tmp_path / "more.csv"
    more.write_text("name,a,b,epsilon,rho\nr0,0,1,1.0,0.5\nr9,0,1,1.0,0.5\n")
    added = called("change", *table, str(more), "--operator")
    done, line = added.stdout.splitlines()  # and nothing about records
    assert done == "Version 2 of the table is in place."
    following = shlex.split(line.removeprefix("Next"))
    assert following[:4] == ["dpstream", "session", "budget", "small"]
    assert called(*following[2:]).exit_code == 0
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
    refusal = session_refused(
        3, "ask", *table, "--where", "b = 2 AND epsilon = 2", "--epsilon", "0.001"
    )
    assert "0 left where a" in refusal or "0 left where" in refusal
    assert "closed  where b < 3" in called("budget", *table).output
    assert session_refused(2, "close", *table, "--arrival", "epsilon", "--before", "1").startswith(
        "usage"
    )


def test_nothing_private_is_said(tmp_path: Path) -> None:
    """Canaries: ids, values outside of the domain, and values inside that no question was about."""
    table = prepared(tmp_path)
    rows = "name,a,b,epsilon,rho\n" + "".join(
        f"canary-{n},{n % 4},{'canary' if n % 3 else 7},{'nan' if n == 5 else 1.75},0.5\n"
        for n in range(40)
    )
    (tmp_path / "small.csv").write_text(rows)
    outcomes = [called("init", *table), called("change", *table, str(tmp_path / "small.csv"))]
    page = str(tmp_path / "page.html")
    for words in (
        ["ask", *table, "--where", "epsilon >= 1.5", "--epsilon", "0.5", "--by", "a"],
        ["ask", *table, "--where", "b = 'canary'", "--epsilon", "0.5"],
        ["ask", *table, "median(b)", "--where", "epsilon >= 1.5", "--rho", "0.5", "--drop"],
        ["ask", *table, "--epsilon", "0.5", "--dry-run"], ["budget", *table],
        ["budget", *table, "--transcript", "--json"],
        ["select", *table, "rich", "--with-epsilon", "0.5"], ["picture", *table, "--out", page],
        ["change", *table, str(tmp_path / "small.csv"), "--delete"], ["budget", *table],
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
    assert called("ask", *table, *ASK).exit_code == 0
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
        for words in (("ask", *table, *ASK), ("ask", *table, *ASK, "--dry-run"), ("budget", *table),
                      ("allot", *table, "all", *ASK[1:]),
                      ("change", *table, str(tmp_path / "small.csv"))):  # fmt: skip
            assert told_refusal(*words)["field"] == "table.coordinates"
        assert accounts.charges(tmp_path / f"{name}.db") == []
    file.write_text(text)
    assert called("ask", *table, *ASK).exit_code == 0


def test_a_table_that_is_exchanged_while_a_session_is_open(tmp_path: Path) -> None:
    """Nothing is charged: the folder is looked at before each charge."""
    loaded(tmp_path)
    with Session(tmp_path) as session:
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
    refusal = told_refusal("ask", *table, *ASK)
    assert refusal["field"] == "data_set.small.account.id"
    typed = re.findall("`dpstream session ([^`]*)`", refusal["fix"])[0].split()
    outcome = called(*typed, *table[1:])
    assert outcome.exit_code == 0
    own = accounts.events(tmp_path / "ledger.db")
    assert [type(event) for event in own] == [Created, TableNamed]
    assert f"The account {own[0].id} of small is now in {PROJECT_FILE}" in outcome.stderr  # type: ignore[union-attr]
    # A second table of the same records in the same account: their budgets are shared.
    assert called("ask", *table, *ASK).exit_code == 0
    file.write_text(file.read_text() + copied(text, "second"))
    assert called("init", *named(tmp_path, "second")).exit_code == 0
    assert len(accounts.charges(tmp_path / "ledger.db")) == 1
    refusal = told_refusal("ask", *named(tmp_path, "second"), *ASK[:4], "1.75")
    assert refusal["field"] == "budget"
    assert told_refusal("budget", *table[1:])["rule"].endswith("several: second, small")


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
    question = ("count", "--where", "a < 2 AND epsilon >= 1.5", "--epsilon")
    assert called("ask", *old, *question, "1.25").exit_code == 0
    new, charges = wider(tmp_path), accounts.charges(tmp_path / "ledger.db")
    refusal = told_refusal("init", *new)
    assert refusal["field"] == "data_set"
    typed = re.findall("`dpstream session ([^`]*)`", refusal["fix"])[0]
    words = [{"OLD": "small", "NEW": "wide"}.get(word, word) for word in typed.split()]
    done = called(*words, *old[1:])
    assert done.exit_code == 0 and "small was migrated now, with 1 charge." in done.stderr
    assert "Version 1 of the table" in done.stdout and accounts.charges(tmp_path / "ledger.db")
    assert told_refusal(*words, *old[1:])["field"] == "table.coordinates"
    assert told_refusal("ask", *new, *question, "0.5")["field"] == "budget"
    assert called("ask", *new, *question, "0.25").exit_code == 0
    elsewhere = ("--where", "a >= 4 AND epsilon >= 1.5", "--epsilon", "1.5")
    assert called("ask", *new, "count", *elsewhere).exit_code == 0
    # The old table is refused, and its question's old answer is not taken for one of now.
    for refused_words in (
        ["ask", *old, *ASK, "--dry-run"], ["budget", *old], ["ask", *old, *question, "1.25"],
        ["change", *old, str(tmp_path / "small.csv")],
    ):  # fmt: skip
        assert told_refusal(*refused_words)["field"] == "data_set"
    assert len(accounts.charges(tmp_path / "ledger.db")) == len(charges) + 2
    assert "1.5" in called("budget", *new, "--transcript").output
    for options in ((), ("--json",)):  # every event has its line
        view = CliRunner().invoke(cli, ["account", "show", "small", *new[1:], *options])
        assert view.exit_code == 0 and "widened" in view.output


def test_what_cannot_be_migrated_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    old = loaded(tmp_path)
    assert called("ask", *old, *ASK).exit_code == 0
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


def test_one_kind_of_budget_pays() -> None:
    assert budget_of("0.5", None) == ("0.5", "epsilon") and budget_of(None, "1") == ("1", "rho")
    for wrong in ((None, None), ("1", "1")):
        with pytest.raises(UsageError, match="--epsilon"):
            budget_of(*wrong)


def test_a_runner_is_named_with_its_flags() -> None:
    assert runner_of(None, 1, ()) is None
    runner = runner_of("DirectRunner", 2, ("--x",))
    assert runner is not None and runner.parallelism == 2
    with pytest.raises(UsageError, match="--runner"):
        runner_of(None, 2, ())


def test_points_by_name_and_predicate(tmp_path: Path) -> None:
    from dpstream.pipelines.session import names

    loaded(tmp_path)
    table = Chosen(None, tmp_path)
    with opened(table, "alice") as session:
        names.write(session.open_table.config, "low", "a < 2")
        selection = subspace(session, table, "a >= 1", "low")
        assert selection.boxes()[0, 0].tolist() == [1, 2]
        assert len(subspace(session, table, "", None).boxes()) == 1


RICH = ("--where", "epsilon >= 1")


def test_a_question_is_charged_once(tmp_path: Path) -> None:
    table = loaded(tmp_path)
    first = called("ask", *table, *RICH, "--epsilon", "0.5", "--by", "a")
    assert first.exit_code == 0 and "Charged epsilon 0.5 to every point asked" in first.stderr
    assert [line.split()[0] for line in first.stdout.splitlines()] == ["a", "-", *"0123"]
    assert "INSECURE" in first.stderr
    again = called("ask", *table, *RICH, "--epsilon", "0.5", "--by", "a")
    assert again.stdout == first.stdout and "first answered" in again.stderr
    assert json_of("ask", *table, *RICH, "--epsilon", "0.5", "--by", "a")["charged"] is False
    assert json_of("ask", *table, *RICH, "--epsilon", "0.5", "--by", "a", "--fresh")["charged"]
    refusal = session_refused(3, "ask", *table, *RICH, "--epsilon", "0.25", "--by", "a")
    assert "0 left where epsilon >= 1 AND epsilon < 1.25" in refusal
    dropped = json_of("ask", *table, *RICH, "--epsilon", "0.25", "--drop")
    assert dropped["charged"] and len(dropped["rows"]) == 1


def test_a_refusal_for_machines(tmp_path: Path) -> None:
    table = loaded(tmp_path)
    result = called("ask", *table, "--where", "a < 2", "--epsilon", "0.5", "--json")
    allotted = called("allot", *table, "half", "--where", "a < 2", "--epsilon", "0.5", "--json")
    lacking = "a < 2 AND epsilon >= 0.25 AND epsilon < 0.5"
    for refusal in (result, allotted):
        assert refusal.exit_code == 3 and refusal.stdout == ""
        figures = printed(refusal.stderr)  # one object
        assert figures["error"] == "refused" and figures["lacking_boxes"] == 1
        assert figures["lacking"] == [{"where": lacking, "left": 0.25}]
        assert figures["largest"] == 0.25


def test_the_first_question_and_what_a_refusal_names(tmp_path: Path) -> None:
    """Each way that a refusal names is typed, and answered."""
    table = loaded(tmp_path)
    assert json_of("ask", *table, "--epsilon", "0.25")["charged"]
    result = called("ask", *table, "--epsilon", "0.5", "--json")
    fix = printed(result.stderr)["fix"]
    [where] = re.findall(r'--where "([^"]+)"', fix)
    result = called("ask", *table, "--epsilon", "0.5", "--dry-run", "--json")
    planned = printed(result.stdout)
    assert result.exit_code == 3 and not planned["acceptance"]["accepted"]
    assert not planned["accepted"] and planned["enough"] == where and "--drop" in fix
    assert json_of("ask", *table, "--epsilon", "0.5", "--where", where)["charged"]
    assert json_of("ask", *table, "--epsilon", "0.5", "--drop")["charged"]


def test_dropping_is_no_way_out_where_every_point_lacks_budget(tmp_path: Path) -> None:
    table = loaded(tmp_path)
    first = json_of("ask", *table, "--epsilon", "0.25")
    assert first["charged"]
    result = called("ask", *table, "--epsilon", "1.9", "--drop", "--json")
    fix = printed(result.stderr)["fix"]
    assert result.exit_code == 3 and "--drop" not in fix
    [command] = re.findall(r"`dpstream session (\w+)`", fix)
    assert called(command, *table).exit_code == 0


def test_several_figures_and_rho(tmp_path: Path) -> None:
    table = loaded(tmp_path)
    answer = json_of("ask", *table, "count", "sum(b)", "average(b)", "median(b)",
                     "quantiles(b, 0.25)", "--where", "rho >= 0.5", "--rho", "0.5")  # fmt: skip
    [row] = answer["rows"]
    names = {"count", "sum_b", "average_b", "median_b", "quantiles_b_0.25"}
    assert row["values"].keys() == row["intervals"].keys() == names
    assert row["intervals"]["count"].keys() == {"sd", "noise_low", "noise_high"}
    assert (answer["kind"], answer["amount"]) == ("rho", 0.5)


def test_a_union_is_free(tmp_path: Path) -> None:
    table = loaded(tmp_path)
    json_of("ask", *table, *RICH, "--epsilon", "0.5", "--by", "a")
    union = json_of("ask", *table, "--where", "epsilon >= 1 AND a < 2", "--union")
    assert union["parts"] == 2 and union["low"] < union["value"] < union["high"]
    text = called("ask", *table, "--where", "epsilon >= 1 AND a < 2", "--union").output
    assert "of 2 parts" in text and text.endswith("free\n")
    session_refused(3, "ask", *table, "--where", "a < 2", "--union")
    for beside in (("--by", "a"), ("--from", "half"), ("--ticket", "t.json")):
        session_refused(2, "ask", *table, "--where", "epsilon >= 1 AND a < 2", "--union", *beside)


def test_allotments_are_drawn_on_by_their_run_id(tmp_path: Path) -> None:
    table = loaded(tmp_path)
    run_id = json_of("allot", *table, "one", *RICH, "--epsilon", "1")["run_id"]
    drawn = called("ask", *table, "--from", "one", "--epsilon", "0.75", "--where", "a < 2")
    assert "which has 0.25 left" in drawn.stderr
    again = called("ask", *table, "--from", "one", "--epsilon", "0.75", "--where", "a < 2")
    assert "every point" not in again.stderr and "which has 0.25 left" in again.stderr
    assert "has 0.25 left" in session_refused(
        3, "ask", *table, "--from", run_id, "--epsilon", "0.5"
    )
    assert "allotment" in session_refused(2, "ask", *table, "--from", run_id, "--rho", "0.1")
    for nobody in ("0" * 32, "two"):
        session_refused(3, "ask", *table, "--from", nobody, "--epsilon", "0.1")
    again = called("allot", *table, "one", *RICH, "--epsilon", "1")  # as one that was killed
    assert run_id in again.output and "Charged before; 0.25 left" in again.stderr
    session_refused(2, "allot", *table, "a b", *RICH, "--epsilon", "0.1")
    assert "0 left" in session_refused(3, "allot", *table, "two", *RICH, "--epsilon", "0.5")


def test_named_subspaces(tmp_path: Path) -> None:
    table = loaded(tmp_path)
    called("ask", *table, "--where", "a = 0 AND epsilon >= 1", "--epsilon", "1")
    entry = json_of("select", *table, "low", "--where", "a < 2")
    assert entry == {"name": "low", "where": "a < 2", "max_consumed": {"epsilon": 1.0, "rho": 0.0}}
    rich = json_of("select", *table, "rich", "--in", "low", "--with-epsilon", "1")
    # What was spent before is taken into account, and later it is the same points.
    assert rich["where"] == (
        "(a = 0 AND epsilon >= 2) OR (a = 1 AND epsilon >= 1)"
    ) or sorted(rich["where"].split(" OR ")) == [
        "(a = 0 AND epsilon >= 2)", "(a = 1 AND epsilon >= 1)"]  # fmt: skip
    json_of("ask", *table, "--in", "rich", "--epsilon", "1")
    session_refused(3, "ask", *table, "--in", "rich", "--epsilon", "0.25")
    session_refused(3, "select", *table, "none", "--in", "rich", "--with-epsilon", "2")
    session_refused(2, "ask", *table, "--in", "nobody", "--epsilon", "1")


def test_what_cover_costs_is_said(tmp_path: Path) -> None:
    table = loaded(tmp_path)
    words = ("ask", *table, "--where", "a = 0 AND epsilon >= 1", "--epsilon", "0.5")
    assert "Points charged" not in called(*words).stderr
    stderr = called(*words, "--fresh", "--cover", "a").stderr
    assert "Points charged, for each point asked: 4\n" in stderr


def test_a_ticket_is_paid_here(tmp_path: Path) -> None:
    table, out = loaded(tmp_path), tmp_path / "ticket"
    answer = json_of("ask", *table, *RICH, "--epsilon", "0.5", "--ticket", str(out))
    assert answer["charged"] and out.exists()
    assert "handed out as a ticket" in session_refused(3, "ask", *table, *RICH, "--epsilon", "0.5")


def test_a_plan_is_free(tmp_path: Path) -> None:
    table = loaded(tmp_path)
    plan = json_of("ask", *table, "count", "average(b)", *RICH, "--epsilon", "0.5", "--by", "a=2",
                   "--dry-run")  # fmt: skip
    assert plan["accepted"] and plan["cells"] == 2 and len(plan["errors"]) == 2
    text = called("ask", *table, "--where", "a < 2", "--epsilon", "0.5", "--dry-run").output
    assert "Refused" in text and "0.25 left where a < 2 AND epsilon >= 0.25" in text
    assert json_of("budget", *table, "--transcript") == {"entries": []}


@pytest.mark.parametrize(
    ("words", "field"),
    [
        (["ask"], "--epsilon"),
        (["ask", "--epsilon", "1", "--rho", "1"], "--epsilon"),
        (["ask", "--epsilon", "x"], "budget"),
        (["ask", "--epsilon", "inf"], "budget"),
        (["ask", "--epsilon", "0"], "budget"),
        (["ask", "--epsilon", "1", "max(b)"], "figure"),
        (["ask", "--epsilon", "1", "sum(nothing)"], "dimension"),
        (["ask", "--epsilon", "1", "--by", "a=x"], "--by"),
        (["ask", "--epsilon", "1", "--cover", "nothing"], "dimension"),
        (["ask", "--epsilon", "1", "--parallelism", "2"], "--runner"),
        (["ask", "--epsilon", "1", "--runner", "None"], "--runner"),
        (["ask", "--epsilon", "1", "--where", "a = 'x'", "--dry-run"], "where"),
        (["ask", "--epsilon", "1", "--analyst", ""], "--analyst"),
    ],
)
def test_bad_words_have_field_rule_and_fix(words: list[str], field: str, tmp_path: Path) -> None:
    table = loaded(tmp_path)
    text = session_refused(2, words[0], *table, *words[1:]).splitlines()[-1]
    assert text.startswith("usage: ") and ". Fix: " in text and field in text.split(":")[1], text
    assert json_of("budget", *table, "--transcript") == {"entries": []}

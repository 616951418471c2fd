"""``dpstream session ask|plan|allot|select``: what is asked is told once, and paid once.

What the commands of sessions share: budgets, runners, and refusals in words.
"""

import re
from pathlib import Path

import pytest

from dpstream.accounting.errors import UsageError
from dpstream.pipelines.cli.parts import Chosen, runner_of
from dpstream.pipelines.cli.session_ask import budget_of, opened, subspace
from tests.pipelines.cli.called import printed
from tests.pipelines.cli.sessions import called, json_of, loaded, refused


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
    refusal = refused(3, "ask", *table, *RICH, "--epsilon", "0.25", "--by", "a")
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
    result = called("plan", *table, "--epsilon", "0.5", "--json")
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
    refused(3, "ask", *table, "--where", "a < 2", "--union")
    for beside in (("--by", "a"), ("--from", "half"), ("--ticket", "t.json")):
        refused(2, "ask", *table, "--where", "epsilon >= 1 AND a < 2", "--union", *beside)


def test_allotments_are_drawn_on_by_their_run_id(tmp_path: Path) -> None:
    table = loaded(tmp_path)
    run_id = json_of("allot", *table, "one", *RICH, "--epsilon", "1")["run_id"]
    drawn = called("ask", *table, "--from", "one", "--epsilon", "0.75", "--where", "a < 2")
    assert "which has 0.25 left" in drawn.stderr
    again = called("ask", *table, "--from", "one", "--epsilon", "0.75", "--where", "a < 2")
    assert "every point" not in again.stderr and "which has 0.25 left" in again.stderr
    assert "has 0.25 left" in refused(3, "ask", *table, "--from", run_id, "--epsilon", "0.5")
    assert "allotment" in refused(2, "ask", *table, "--from", run_id, "--rho", "0.1")
    for nobody in ("0" * 32, "two"):
        refused(3, "ask", *table, "--from", nobody, "--epsilon", "0.1")
    again = called("allot", *table, "one", *RICH, "--epsilon", "1")  # as one that was killed
    assert run_id in again.output and "Charged before; 0.25 left" in again.stderr
    refused(2, "allot", *table, "a b", *RICH, "--epsilon", "0.1")
    assert "0 left" in refused(3, "allot", *table, "two", *RICH, "--epsilon", "0.5")


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
    refused(3, "ask", *table, "--in", "rich", "--epsilon", "0.25")
    refused(3, "select", *table, "none", "--in", "rich", "--with-epsilon", "2")
    refused(2, "ask", *table, "--in", "nobody", "--epsilon", "1")


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
    assert "handed out as a ticket" in refused(3, "ask", *table, *RICH, "--epsilon", "0.5")


def test_a_plan_is_free(tmp_path: Path) -> None:
    table = loaded(tmp_path)
    plan = json_of("plan", *table, "count", "average(b)", *RICH, "--epsilon", "0.5", "--by", "a=2")
    assert plan["accepted"] and plan["cells"] == 2 and len(plan["errors"]) == 2
    text = called("plan", *table, "--where", "a < 2", "--epsilon", "0.5").output
    assert "Refused" in text and "0.25 left where a < 2 AND epsilon >= 0.25" in text
    assert json_of("transcript", *table) == {"entries": []}


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
        (["plan", "--epsilon", "1", "--where", "a = 'x'"], "where"),
        (["ask", "--epsilon", "1", "--analyst", ""], "--analyst"),
    ],
)
def test_bad_words_have_field_rule_and_fix(words: list[str], field: str, tmp_path: Path) -> None:
    table = loaded(tmp_path)
    text = refused(2, words[0], *table, *words[1:]).splitlines()[-1]
    assert text.startswith("usage: ") and ". Fix: " in text and field in text.split(":")[1], text
    assert json_of("transcript", *table) == {"entries": []}

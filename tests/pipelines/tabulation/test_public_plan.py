"""Plans of public files."""

import json

import pytest

from dpstream.accounting.errors import UsageError
from dpstream.pipelines.render.census_plan import census_text
from dpstream.pipelines.tabulation.config import Choice, fields_of
from dpstream.pipelines.tabulation.inputs import inputs_of, prepared
from dpstream.pipelines.tabulation.public_plan import faults, figures, plan
from tests.pipelines.tabulation.office import Office


def test_the_plan_is_that_of_the_execution(made: Office) -> None:
    public_plan = plan(*made, Choice("p"))
    assert public_plan.complete
    assert public_plan.prepared.plan.hash == prepared(inputs_of(*made, Choice("p"))).plan.hash
    plan_figures = figures(public_plan)
    assert json.loads(json.dumps(plan_figures)) == plan_figures
    assert plan_figures["guarantee"]["rho"] == pytest.approx(4.944)
    assert sum(row["groups"] for row in plan_figures["levels"]) == 593
    assert "Groups      593 in 19 levels" in census_text(plan_figures)


def test_no_record_is_needed(spoilt: Office) -> None:
    before = figures(plan(*spoilt, Choice("p")))
    (spoilt.data / "person-records.txt").unlink()
    assert figures(plan(*spoilt, Choice("p"))) == before


def test_a_public_file_changes_the_hash(made: Office, spoilt: Office) -> None:
    spoilt.spoil("race-and-ethnicity-codes.txt", lambda lines: [lines[0], *reversed(lines[1:])])
    hashes = {plan(*office, Choice("p")).prepared.plan.hash for office in (made, spoilt)}
    assert len(hashes) == 2


def test_households_before_their_totals_are_there(made: Office) -> None:
    public_plan = plan(*made, Choice("h"))
    plan_figures = figures(public_plan)
    assert (
        not public_plan.complete
        and plan_figures["plan_hash"] is None
        and plan_figures["unit"].startswith("one house")
    )
    assert "Plan        none yet" in census_text(
        plan_figures
    ) and "before pop-group-totals" in census_text(plan_figures)


def test_what_makes_no_sense(made: Office, spoilt: Office) -> None:
    with pytest.raises(UsageError, match=r"^estimates: "):
        plan(*made, Choice("h", estimates="combined"))
    for delta in (0.0, 1.0, float("nan")):
        with pytest.raises(UsageError, match="--delta"):
            figures(plan(*made, Choice("p")), delta)
    spoilt.configure(reader="cef")
    with pytest.raises(UsageError, match=r"config.json reader"):
        plan(*spoilt, Choice("p"))


def test_what_is_wrong_with_a_plan_is_a_fault_of_its_files(spoilt: Office) -> None:
    """Budgets of rho are no budgets of epsilon: the noise would be beyond the sampler's tables."""
    assert faults(*spoilt, Choice("p")) == []
    spoilt.configure(privacy_defn="puredp", privacy_budget_p_level_1_usa=1e-3)
    [fault] = faults(*spoilt, Choice("p"))
    assert (fault.file, fault.column) == ("config.json", "t1t2 (USA, 1)")
    assert "is so small that noise of a scale above" in fault.rule
    spoilt.configure(
        **{name: 0.0 for name in fields_of("p") if name.startswith("privacy_budget_p_level")}
    )
    [fault] = faults(*spoilt, Choice("p"))
    assert (fault.file, fault.column) == ("config.json", "") and "no level" in fault.rule
    spoilt.configure(reader="cef")
    assert [config_fault.column for config_fault in faults(*spoilt, Choice("p"))] == ["reader"]


def test_groups_without_a_block_are_named(spoilt: Office) -> None:
    table = spoilt.load("p").files.iterations.to_pylist()
    code = next(row["CODE"] for row in table if not (row["DETAILED_ONLY"] or row["COARSE_ONLY"]))
    rows = [f"1|USA|{code}|12", f"01999|COUNTY|{code}|3", f"72999|PR-COUNTY|{code}|3"]
    notes = []
    for totals in (rows[:1], rows):
        lines = ["REGION_ID|REGION_TYPE|ITERATION_CODE|COUNT", *totals]
        (spoilt.data / "pop-group-totals.txt").write_text("\n".join(lines) + "\n")
        plan_figures = figures(plan(*spoilt, Choice("h")))
        notes.append([note for note in plan_figures["notes"] if "without a block" in note])
    assert notes[0] == [] and len(notes[1]) == 1 and notes[1][0].startswith("2 groups")

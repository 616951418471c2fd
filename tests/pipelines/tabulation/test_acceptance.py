"""A plan of tables looks at OUT as `execute` does, and makes nothing."""

from pathlib import Path

from tests.pipelines.cli.called import call
from tests.pipelines.cli.test_plans_and_charges import acceptance, census, same_refusal


def test_a_place_is_looked_at_as_it_is_made(tmp_path: Path) -> None:
    """OUT of an execution that is there already, and of another one's draft."""
    of = census(tmp_path)
    out = tmp_path / "a"
    plan = (*of.plan, "--out", out)
    assert acceptance(plan)[1]["charged"] and not out.exists()
    assert call(*of.ask).exit_code == 0
    code, report = acceptance(plan)
    assert code == 0 and report["charged"] is None and report["run_id"]
    same_refusal((*of.ask, "--fresh"), (*plan, "--fresh"), tmp_path)

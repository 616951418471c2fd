"""What follows from the public files, and that they are the ones that were meant."""

from pathlib import Path

import pytest

from dpstream.accounting.errors import RunError, UsageError
from dpstream.pipelines.tabulation.config import Choice
from dpstream.pipelines.tabulation.inputs import (
    content_of,
    digest_of,
    inputs_of,
    prepared,
    stamps,
)
from tests.pipelines.tabulation.office import Office


def test_records_are_no_part_of_what_is_public(spoilt: Office) -> None:
    before = inputs_of(spoilt.parameters, spoilt.data, Choice("p"))
    plan = prepared(before).plan
    spoilt.spoil("person-records.txt", lambda lines: lines[:-1])
    after = inputs_of(spoilt.parameters, spoilt.data, Choice("p"))
    assert after == before and prepared(after).plan.hash == plan.hash
    assert before.records.name == "person-records.txt" and before.records in before.paths
    for name in ("config.json", "GRF-C.txt", "race-and-ethnicity-codes.txt"):
        was = inputs_of(spoilt.parameters, spoilt.data, Choice("p"))
        spoilt.path(name).write_text(spoilt.path(name).read_text() + "\n")
        assert inputs_of(spoilt.parameters, spoilt.data, Choice("p")).digest != was.digest


def test_files_that_changed_since_are_refused(spoilt: Office) -> None:
    inputs = inputs_of(spoilt.parameters, spoilt.data, Choice("p"))
    spoilt.configure(zero_suppression_chance=0.25)
    with pytest.raises(RunError, match="changed while it was read"):
        prepared(inputs)
    assert prepared(inputs_of(spoilt.parameters, spoilt.data, Choice("p")))


def test_plans_differ_by_what_is_asked(made: Office) -> None:
    choices = (Choice("p"), Choice("p", "rounded"), Choice("p", estimates="combined"))
    hashes = {prepared(inputs_of(made.parameters, made.data, c)).plan.hash for c in choices}
    assert len(hashes) == 3


def test_levels_without_a_budget_are_no_tables(spoilt: Office) -> None:
    fields = {name: 0 for name in _budgets(spoilt)}
    spoilt.configure(**fields)
    with pytest.raises(UsageError):
        prepared(inputs_of(spoilt.parameters, spoilt.data, Choice("p")))


def _budgets(made: Office) -> list[str]:
    import json

    config = json.loads(made.path("config.json").read_text())
    return [name for name in config if name.startswith("privacy_budget_p_level")]


def test_content_tells_files_apart_and_stamps_notice_a_change(
    tmp_path: Path, spoilt: Office
) -> None:
    a, b = tmp_path / "a", tmp_path / "b"
    a.write_text("x")
    b.write_text("x")
    assert content_of(a) != content_of(b)  # by their names
    assert digest_of([a, b]) != digest_of([b, a])
    with pytest.raises(UsageError, match="missing"):
        content_of(tmp_path / "c")
    with pytest.raises(RunError, match="cannot be read"):
        content_of(tmp_path)
    inputs = inputs_of(spoilt.parameters, spoilt.data, Choice("p"))
    before = stamps(inputs)
    assert stamps(inputs) == before and len(before) == len(inputs.paths) == 7
    inputs.records.touch()
    assert stamps(inputs) != before

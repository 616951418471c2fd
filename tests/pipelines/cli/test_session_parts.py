"""What the commands of sessions share: budgets, runners, and refusals in words."""

from pathlib import Path

import numpy as np
import pytest

from dpstream.accounting.errors import UsageError
from dpstream.accounting.regions.decision import decide
from dpstream.accounting.regions.spent import untouched
from dpstream.pipelines.cli.parts import Chosen, runner_of
from dpstream.pipelines.cli.session_parts import (
    as_builtins,
    budget_of,
    lacking,
    opened,
    subspace,
)
from tests.pipelines.cli.sessions import loaded
from tests.pipelines.session.people import PEOPLE, box


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


def test_refusals_in_words() -> None:
    space = PEOPLE.space
    boxes = np.concatenate([box(age=(n, n + 5)) for n in range(0, 100, 10)])
    decision = decide(untouched(space, "epsilon"), boxes, 500_000)
    lines = lacking(space, decision)
    assert lines[0] == "0 left where age < 5 AND epsilon < 0.5"
    assert lines[-1] == "... and 2 more boxes" and len(lines) == 9
    fields = as_builtins(space, decision)
    assert fields["lacking_boxes"] == 10 and fields["largest"] == 0 and not fields["accepted"]


def test_points_by_name_and_predicate(tmp_path: Path) -> None:
    from dpstream.pipelines.session import names

    loaded(tmp_path)
    table = Chosen(None, tmp_path)
    with opened(table, "alice") as session:
        names.write(session.open_table.config, "low", "a < 2")
        selection = subspace(session, table, "a >= 1", "low")
        assert selection.boxes()[0, 0].tolist() == [1, 2]
        assert len(subspace(session, table, "", None).boxes()) == 1

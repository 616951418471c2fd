"""An audit's runs: on two windows, half of the trials on each side, with a key of their own.

Rows of trials: numbers become columns of the job's types, and come back as numbers.
"""

from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np
import pyarrow as pa
import pytest

from dpstream.accounting.errors import UsageError
from dpstream.accounting.plan.plan import Plan
from dpstream.pipelines.jobs.job import Job
from tests.audit.blackbox.run import (
    Fixed,
    Runner,
    audited_plan,
    key_columns,
    numbered_field,
    released,
    rows_of,
    sides,
    table_of,
)


@pytest.fixture
def plan(make_job: Callable[..., Job]) -> Plan:
    return make_job().plan


def test_each_key_has_its_others_and_only_added_trials_their_unit(plan: Plan) -> None:
    added = np.array([False, True])
    pattern, when = np.array([0, 1]), np.array([1, 3])
    rows = rows_of(plan, np.arange(2), added, 2, pattern, when, 3, [(0, 1), (0, 2)])
    others = ~rows.own
    assert np.bincount(rows.key[others]).tolist() == [6, 6, 6, 6]
    assert len(set(rows.unit[others])) == others.sum() and set(rows.unit[others] % 2) == {1}
    assert rows.key[rows.own].tolist() == [2, 3] and set(rows.unit[rows.own]) == {2}
    every = plan.timeline.trigger_every
    assert (rows.event[rows.own] - plan.timeline.start).tolist() == [0, 2 * every]


def test_a_table_has_the_jobs_columns_and_the_units_own_inputs(plan: Plan) -> None:
    rows = rows_of(
        plan, np.arange(1), np.array([True]), 1, np.array([0]), np.array([1]), 1, [(0, 1)]
    )
    table = table_of(plan, rows, {"value": (7.0, 1.0)})
    assert set(table.column_names) == {"user", "key", "time", "value"}
    assert table["value"].to_pylist() == [1.0, 7.0]
    assert table["key"].to_pylist() == ["k0", "k0"]
    assert len(set(table["user"].to_pylist())) == 2


@pytest.mark.parametrize("kind", ["string", "int"])
def test_released_keys_windows_and_triggers_are_numbers_again(plan: Plan, kind: str) -> None:
    field = msgspec.structs.replace(plan.key[0], type=kind)
    plan = msgspec.structs.replace(plan, key=(field,))
    numbers, timeline = np.array([0, 12, 345]), plan.timeline
    starts = pa.array(timeline.start + np.array([0, 1, 0]) * timeline.slide).view(
        pa.timestamp("us", tz="UTC")
    )
    columns = {**key_columns(plan, numbers), "window_start": starts, "trigger": [1, 2, 4]}
    rows = released(plan, pa.table(columns))
    assert rows.key.tolist() == numbers.tolist()
    assert (rows.window.tolist(), rows.trigger.tolist()) == ([0, 1, 0], [1, 2, 4])
    assert len(released(plan, pa.table({})).key) == 0


def test_keys_of_yes_and_no_are_too_few(plan: Plan) -> None:
    yes = msgspec.structs.replace(plan.key[0], type="bool")
    text = msgspec.structs.replace(plan.key[0], column="other", type="bytes")
    assert numbered_field(msgspec.structs.replace(plan, key=(yes, text))) is text
    with pytest.raises(UsageError) as error:
        numbered_field(msgspec.structs.replace(plan, key=(yes,)))
    assert error.value.field == "key"


def test_a_long_plan_is_cut_to_two_windows_and_a_short_one_stays(
    make_job: Callable[..., Job],
) -> None:
    plan = make_job().plan
    assert audited_plan(plan) is plan
    timeline = plan.timeline
    long = msgspec.structs.replace(timeline, end=timeline.start + 9 * timeline.slide)
    cut = audited_plan(msgspec.structs.replace(plan, timeline=long))
    assert cut.timeline.windows == 2
    assert cut.timeline.start == timeline.start and cut.privacy == plan.privacy


def test_sides_are_halves_that_the_seed_alone_draws() -> None:
    drawn = sides(50, 7)
    assert drawn.sum() == 50 and len(drawn) == 100
    assert (drawn == sides(50, 7)).all() and (drawn != sides(50, 8)).any()
    assert not np.array_equal(drawn, np.sort(drawn))


def test_a_runner_has_a_fresh_key_unless_a_test_fixes_one(
    tmp_path: Path, make_job: Callable[..., Job]
) -> None:
    job, folders = make_job(), (tmp_path / "a", tmp_path / "b", tmp_path / "c")
    for folder in folders:
        folder.mkdir()
    Runner(job, folders[0], False, None)
    Runner(job, folders[1], False, None)
    first, second = ((folder / "noise.secret").read_bytes() for folder in folders[:2])
    assert first != second
    Runner(job, folders[2], False, Fixed("0f" * 32, "0" * 32))
    assert list(folders[2].iterdir()) == []

"""An audit's runs: on two windows, half of the trials on each side, with a key of their own.

Rows of trials: numbers become columns of the job's types, and come back as numbers.

A table of several chunks, as of more text than one array can hold, is the same rows.

Trials that read values: which run each is in, what feeds them, and their statistics.

Trials of key selection: when a key first appears, and what the score of a design shows.
"""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import pytest

from dpstream.accounting.errors import UsageError
from dpstream.accounting.plan.plan import Plan
from dpstream.pipelines.formats.rows import Rows
from dpstream.pipelines.jobs.job import Job
from tests.audit.blackbox import run as module
from tests.audit.blackbox.run import (
    Fixed,
    Released,
    Runner,
    TrialInput,
    TrialRows,
    audited_plan,
    key_columns,
    numbered_field,
    released,
    rows_of,
    sides,
    table_of,
)
from tests.audit.blackbox.values import (
    Crossing,
    chunks,
    feeds_of,
    first_tests,
    inputs_of,
    statistics,
    visible_mu,
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


UNITS, KEYS = 300, 4


def table(job: Job) -> pa.Table:
    """Each unit has a row of each key, in an order by keys."""
    unit, key = np.tile(np.arange(UNITS), KEYS), np.repeat(np.arange(KEYS), UNITS)
    event = np.full(UNITS * KEYS, job.plan.timeline.start)
    rows = TrialRows(unit, key, event, np.zeros(len(unit), np.bool_))
    return table_of(job.plan, rows, inputs_of(job.plan))


def chunked(rows: pa.Table) -> pa.Table:
    """The rows in a chunk of each key: a unit stands in all of them at the same place."""
    return pa.concat_tables([rows.slice(k * UNITS, UNITS) for k in range(KEYS)])


def released_by_run(job: Job, folder: Path, given: pa.Table) -> pa.Table:
    folder.mkdir()
    runner = Runner(job, folder, False, Fixed("0f" * 32, "0" * 32))
    return runner.run(TrialInput(given, np.zeros(0, np.int64)))


def test_chunks_change_no_release(make_job: Callable[..., Job], tmp_path: Path) -> None:
    rows = table(job := make_job())
    several = chunked(rows)
    assert several.column(0).num_chunks == KEYS and several.equals(rows)
    one = released_by_run(job, tmp_path / "one", rows)
    assert len(set(one["key"].to_pylist())) == KEYS
    assert released_by_run(job, tmp_path / "several", several).equals(one)


def test_chunks_that_all_begin_at_the_first_position_lose_records(
    make_job: Callable[..., Job], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = table(job := make_job())
    one = released_by_run(job, tmp_path / "one", rows)
    monkeypatch.setattr(module, "Rows", lambda offset, batch: Rows(0, batch))
    assert not released_by_run(job, tmp_path / "several", chunked(rows)).equals(one)


@pytest.mark.parametrize(
    ("rows", "numbers", "most"),
    [(0, 0, 1_500_000), (500_000, 1, 3), (1, 2_000_000, 2), (1e9, 1e9, 1)],
)
def test_chunks_are_all_trials_in_order(rows: float, numbers: float, most: int) -> None:
    pieces = list(chunks(7, rows, numbers))
    assert np.concatenate(pieces).tolist() == list(range(7))
    assert max(map(len, pieces)) == min(7, most)


def test_a_second_window_is_watched_where_windows_do_not_overlap(
    make_job: Callable[..., Job],
) -> None:
    plan = make_job().plan
    design: Any = SimpleNamespace(feeds=(1, 3))
    timeline = plan.timeline
    assert feeds_of(plan, design) == [(0, 1), (0, 3)]
    two = msgspec.structs.replace(timeline, end=timeline.start + 2 * timeline.slide)
    assert feeds_of(msgspec.structs.replace(plan, timeline=two), design) == [
        (0, 1),
        (0, 3),
        (1, 1),
        (1, 3),
    ]
    over = msgspec.structs.replace(two, slide=timeline.slide // 2)
    assert feeds_of(msgspec.structs.replace(plan, timeline=over), design) == [(0, 1), (0, 3)]


def test_statistics_are_split_by_side_and_one_more_is_fitted() -> None:
    rng, added = np.random.default_rng(3), np.arange(400) % 2 == 1
    features = rng.standard_normal((400, 2))
    features[added, 1] += 3
    samples = statistics(np.arange(800.0).reshape(400, 2), features, added)
    assert len(samples) == 3
    assert samples[0].without.tolist() == list(range(0, 800, 4))
    assert samples[2].added.mean() > samples[2].without.mean()


def test_the_first_test_of_each_key_in_window_0_counts(make_job: Callable[..., Job]) -> None:
    plan = make_job().plan
    assert plan.design.select_every == 1
    key, window, trigger = (
        np.array([4, 4, 5, 7]), np.array([0, 0, 0, 1]), np.array([3, 2, 4, 1])
    )  # fmt: skip
    rows = Released(key, window, trigger, pa.table({}))
    tests = first_tests(plan, rows, np.array([2, 3]), 2, 3)
    # Key 5 passes after the last test that is told apart; key 7 in a window of no trial.
    assert tests.tolist() == [[1, 3], [3, 3]]


def test_ratios_are_logs_and_equal_sides_show_nothing() -> None:
    even = np.array([0.5, 0.3, 0.2])
    more = np.array([0.7, 0.2, 0.1])
    blind = Crossing(5, 1, even, even[None])
    seen = Crossing(5, 4, even, np.stack([more] * 4))
    assert not blind.ratios.any()
    assert np.allclose(np.exp(seen.ratios[0]), more / even)
    assert visible_mu(blind, 1) < 0.1 < 0.5 < visible_mu(seen, 1)

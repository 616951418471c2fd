"""An audit's runs: on two windows, half of the trials on each side, with a key of their own."""

from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np

from dpstream.pipelines.audit.run import Fixed, Runner, audited_plan, sides
from dpstream.pipelines.jobs.job import Job


def test_a_long_plan_is_cut_to_two_windows_and_a_short_one_stays(
    make_job: Callable[..., Job],
) -> None:
    plan = make_job().plan
    assert audited_plan(plan) is plan
    line = plan.timeline
    long = msgspec.structs.replace(line, end=line.start + 9 * line.slide)
    cut = audited_plan(msgspec.structs.replace(plan, timeline=long))
    assert cut.timeline.windows == 2
    assert cut.timeline.start == line.start and cut.privacy == plan.privacy


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

"""The text for a field of another shape, which works when it is followed."""

from pathlib import Path

import pytest

from dpstream.pipelines.jobs.job import load_job
from dpstream.pipelines.project.text import EXAMPLES, fix_of
from tests.golden.refusals import Refused
from tests.projects import write_project

UNIT, START = 'unit_column = "user"', 'start = "2024-01-01T00:00:00Z"'
SHORTEST = 'budget = { epsilon = 1.0, delta = 1e-8, covers = "window" }'
BUDGET = 'budget = { epsilon = 4, delta = 1e-6, covers = "window" }'


@pytest.mark.parametrize(
    ("old", "new", "line"),
    [
        (UNIT, "unit_column = 7", UNIT),
        ('key = ["page"]', "key = 7", 'key = ["user"]'),
        ('window = "1 day"', "window = 1", 'window = "7 days"'),
        ("contributions = 8", "", "contributions = 10"),
        (START, "start = 2024-01-01", START),
        (BUDGET, "", SHORTEST),
        ('kind = "parquet", path', "path", None),
    ],
)
def test_wrong_shapes_are_answered_with_a_line_that_works(
    tmp_path: Path, old: str, new: str, line: str | None, refused: Refused
) -> None:
    error = refused(lambda: load_job(write_project(tmp_path, (old, new))))
    if line is not None:
        assert line in error.fix.replace("COLUMN", "user")
        assert load_job(write_project(tmp_path, (old, line)))


def test_a_month_is_answered_with_its_weeks(tmp_path: Path, refused: Refused) -> None:
    window = 'window = "1 day"'
    refused(lambda: load_job(write_project(tmp_path, (window, 'window = "1 month"'))))
    assert load_job(write_project(tmp_path, (window, 'window = "28d"')))


def test_other_shapes_are_told_by_their_type() -> None:
    for rule, path, hint in (
        ("Expected `str`, got `int`", "table.visits.path", EXAMPLES["table.path"]),
        ("Expected `array`, got `str`", "table.visits.key_columns", "key_columns = [...]"),
        ("Expected `object`, got `str`", "job.daily.mechanism", "[job.daily.mechanism]"),
        ("Expected `int`, got `str`", "job.daily.shards", "shards = 1"),
        ("Expected `int`, got `float`", "job.daily.shards", "a whole number, shards = 1"),
        ("Expected `float`, got `str`", "job.daily.aggregate.n.grid", "grid = 1.0"),
        ("Expected `bool`, got `str`", "job.daily.mechanism.combine", "combine = true"),
        ("Expected `object`, got `int`", "job.daily.key[1]", EXAMPLES["job.key"]),
        ("Expected `array`, got `int`", "job.daily.aggregate.n.bounds", "bounds = [0, 100]"),
    ):
        assert hint in fix_of(path, rule)
    assert fix_of("job.daily.sink.x", "odd") == "correct the value"

"""A column by its name alone; the text for another shape, which works when it is followed."""

from collections.abc import Callable
from pathlib import Path

import pytest

from dpstream.accounting.errors import UsageError
from dpstream.pipelines.jobs.job import load_job
from dpstream.pipelines.jobs.shapes import EXAMPLES, fix_of, with_columns

LONG = """
aggregate = [{ name = "n", kind = "count" }]
[source]
kind = "csv"
path = "a.csv"
[schema]
unit = { column = "author" }
key = [{ column = "page" }, { column = "lang" }]
event_time = { column = "at" }
[time]
start = "2024-01-01T00:00:00Z"
end = "2024-02-01T00:00:00Z"
window = "1d"
trigger_every = "1d"
[privacy]
epsilon = 1.0
delta = 1e-8
contributions = 8
[sink]
kind = "csv"
path = "releases"
"""


@pytest.fixture
def loaded(tmp_path: Path) -> Callable[..., object]:
    def load(*changes: tuple[str, str]) -> object:
        text = LONG
        for old, new in changes:
            assert old in text
            text = text.replace(old, new)
        (tmp_path / "job.toml").write_text(text)
        return load_job(tmp_path / "job.toml").plan

    return load


UNIT, KEY = '{ column = "author" }', '[{ column = "page" }, { column = "lang" }]'


def test_short_columns_are_the_long_ones(loaded: Callable[..., object]) -> None:
    short = loaded((UNIT, '"author"'), (KEY, '["page", "lang"]'), ('{ column = "at" }', '"at"'))
    assert short == loaded()
    mixed = loaded((KEY, '["page", { column = "lang", type = "int" }]'))
    assert mixed == loaded((KEY, '[{ column = "page" }, { column = "lang", type = "int" }]'))
    assert loaded((KEY, '"page"')) == loaded((KEY, '[{ column = "page" }]'))
    assert loaded((KEY, '{ column = "page" }')) == loaded((KEY, '["page"]'))


def test_the_tables_that_were_given_stay() -> None:
    given = {"schema": {"unit": "a", "key": ["b"]}, "time": 1}
    found = with_columns(given)
    assert found["schema"] == {"unit": {"column": "a"}, "key": [{"column": "b"}]}
    assert given["schema"]["unit"] == "a" and with_columns({"schema": 3}) == {"schema": 3}


WHOLE_UNIT, WHOLE_KEY = f"unit = {UNIT}", f"key = {KEY}"
START, WINDOW = 'start = "2024-01-01T00:00:00Z"', 'window = "1d"'
COUNT = 'aggregate = [{ name = "n", kind = "count" }]'


@pytest.mark.parametrize(
    ("old", "new", "field", "line"),
    [
        (WHOLE_UNIT, "unit = 7", "schema.unit", 'unit = "author"'),
        (WHOLE_UNIT, "unit = 7", "schema.unit", 'unit = { column = "author", type = "int" }'),
        (WHOLE_UNIT, 'unit = ["author"]', "schema.unit", 'unit = "author"'),
        (WHOLE_KEY, "key = 7", "schema.key", 'key = ["author"]'),
        (WINDOW, "window = 1", "time.window", 'window = "7d"'),
        ("contributions = 8\n", "", "privacy.contributions", "contributions = 10"),
        ("epsilon = 1.0", 'epsilon = "1"', "privacy.epsilon", "epsilon = 1.0"),
        (START, "start = 2024-01-01", "time.start", START),
    ],
)
def test_wrong_shapes_are_answered_with_a_line_that_works(
    loaded: Callable[..., object], old: str, new: str, field: str, line: str
) -> None:
    with pytest.raises(UsageError) as error:
        loaded((old, new))
    assert error.value.field == field
    assert line in error.value.fix.replace("COLUMN", "author")
    assert loaded((old, f"{line}\n"))


def test_a_month_and_a_single_table_are_answered_too(loaded: Callable[..., object]) -> None:
    with pytest.raises(UsageError, match="write '28d'"):
        loaded((WINDOW, 'window = "1 month"'))
    assert loaded((WINDOW, 'window = "28d"'))
    with pytest.raises(UsageError, match=r"^aggregate: .*\[\[aggregate\]\] with name = "):
        loaded((COUNT, COUNT.strip("]").replace("[", "")))
    assert loaded((COUNT, ""), ("[sink]", "[[aggregate]]\nname = 'n'\nkind = 'count'\n[sink]"))


def test_other_shapes_are_told_by_their_type() -> None:
    for rule, path, said in (
        ("Expected `str`, got `int`", "source.path", 'path = "..."'),
        ("Expected `array`, got `str`", "source.query.look_up", "look_up = [...]"),
        ("Expected `object`, got `str`", "state", "[state]"),
        ("Expected `int`, got `str`", "state.shards", "shards = 1"),
        ("Expected `int`, got `float`", "state.shards", "a whole number, shards = 1"),
        ("Expected `float`, got `str`", "aggregate[0].grid", "grid = 1.0"),
        ("Expected `bool`, got `str`", "privacy.combine", "combine = true"),
        ("Expected `object`, got `int`", "schema.key[1]", EXAMPLES["schema.key"]),
    ):
        assert said in fix_of(path, rule)
    assert fix_of("sink.x", "odd") == "correct the value"

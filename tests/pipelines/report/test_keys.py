"""Which keys and rows a page holds: the busiest, each key's newest, and no more than the rule."""

from collections.abc import Iterator

import numpy as np
import pyarrow as pa
import pytest

from dpstream.pipelines.report import keys as module
from dpstream.pipelines.report.keys import PAGE_NUMBERS, Keys, gathered, most_rows, newest_rows

SCHEMA = pa.schema([("k", pa.string()), ("n", pa.float64()), ("n_sd", pa.float64())])
#: Values of each key by window.
VALUES: dict[str, dict[int, float | None]] = {
    "big": {0: 100.0, 1: 90.0, 2: 110.0},
    "mid": {0: 50.0, 2: 40.0},
    "late": {2: 60.0},
    "early": {0: 30.0, 1: 20.0},
    "none": {1: None},
}


def parts() -> Iterator[tuple[int, pa.Table]]:
    """Each window in two parts."""
    for window in (0, 1, 2):
        rows = [
            {"k": key, "n": counts[window], "n_sd": 1.0}
            for key, counts in VALUES.items()
            if window in counts
        ]
        for part in (rows[:1], rows[1:]):
            yield window, pa.Table.from_pylist(part, SCHEMA)


def keys_of(limit: int) -> Keys:
    return gathered(parts(), parts(), ["k"], "n", SCHEMA, limit)


def rows_of(keys: Keys) -> list[tuple[str, int, float | None]]:
    names = keys.ranked["k"].to_pylist()
    return [(names[row["_key"]], row["_window"], row["n"]) for row in keys.rows.to_pylist()]


def test_all_rows_where_there_is_room() -> None:
    keys = keys_of(100)
    assert keys.ranked["k"].to_pylist() == ["big", "mid", "late", "early", "none"]
    assert keys.ranked["_windows"].to_pylist() == [3, 2, 1, 2, 1]
    assert (keys.complete, keys.distinct, keys.exact, keys.values) == (5, 5, True, 9)
    want = [(k, w, v) for k in keys.ranked["k"].to_pylist() for w, v in sorted(VALUES[k].items())]
    assert rows_of(keys) == want


@pytest.mark.parametrize("limit", range(1, 10))
def test_the_newest_of_each_before_all_of_the_busiest(limit: int) -> None:
    keys, every = keys_of(limit), keys_of(100)
    names = every.ranked["k"].to_pylist()[:limit]
    assert keys.ranked["k"].to_pylist() == names
    assert keys.rows.num_rows <= limit and keys.distinct == 5 and keys.values == 9
    wanted = [
        (key, window, value)
        for place, key in enumerate(names)
        for window, value in sorted(VALUES[key].items())
        if place < keys.complete or window == max(VALUES[key])
    ]
    assert rows_of(keys) == wanted
    # One more key with all of its windows would be too many.
    if keys.complete < len(names):
        more = len(VALUES[names[keys.complete]]) - 1
        assert keys.rows.num_rows + more > limit


def test_newest_rows_of_complete_windows() -> None:
    """A key's newest row of a complete window; of a key without one its newest row."""
    rows = pa.table({"_key": [0, 0, 0, 1, 1, 2], "_window": [0, 1, 2, 1, 2, 2]})
    keys = Keys(rows.slice(0, 0), rows, 3, 3, True, 6)
    complete = np.array([True, True, False, False, False, False])
    assert newest_rows(keys, complete).tolist() == [1, 4, 5]
    assert newest_rows(keys).tolist() == [2, 4, 5]


def test_newest_rows() -> None:
    keys = keys_of(100)
    newest = keys.rows.take(newest_rows(keys))
    assert newest["_window"].to_pylist() == [2, 2, 2, 1, 1]
    assert newest["_key"].to_pylist() == [0, 1, 2, 3, 4]
    nothing = gathered(iter(()), iter(()), ["k"], "n", SCHEMA, 10)
    assert len(newest_rows(nothing)) == 0 and nothing.distinct == nothing.complete == 0


def test_keys_beyond_those_held_are_the_small_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "HELD_KEYS", 2)
    keys = keys_of(100)
    assert not keys.exact and keys.ranked["k"].to_pylist()[0] == "big"
    assert keys.ranked["_total"].to_pylist()[0] == 300.0


def test_a_page_holds_so_many_numbers() -> None:
    assert most_rows(1) == PAGE_NUMBERS // 2 and most_rows(12) == PAGE_NUMBERS // 24
    rng = np.random.default_rng(0)
    names = [f"key {i}" for i in range(1000)]

    def many() -> Iterator[tuple[int, pa.Table]]:
        for window in range(100):
            values = {"k": names, "n": rng.random(1000), "n_sd": np.ones(1000)}
            yield window, pa.table(values, SCHEMA)

    keys = gathered(many(), many(), ["k"], "n", SCHEMA, most_rows(4))
    assert keys.ranked.num_rows == 1000 and keys.values == 100_000
    assert (
        keys.rows.num_rows
        == 1000 + 99 * keys.complete
        <= most_rows(4)
        < 1000 + 99 * (keys.complete + 1)
    )

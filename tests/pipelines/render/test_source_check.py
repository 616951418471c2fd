"""What ``dpstream check`` counted, as text."""

from typing import Any

import pytest

from dpstream.pipelines.render.source_check import check_text

FAULT = {
    "reason": "time", "problem": "its time cannot be read", "records": 2, "no_time": 0,
    "first": [["a.csv", 3], ["b.csv", 1_000]], "fix": "correct the files",
}  # fmt: skip
CHECKED: dict[str, Any] = {
    "read": 1_005, "left_out": 0, "usable": 998, "complete": True, "unusable": [FAULT],
    "units_needed": 1, "most_units_up_to_needed": 4,
}  # fmt: skip


def test_every_fault_has_its_place_and_fix() -> None:
    assert check_text(CHECKED, "daily --env prod").splitlines() == [
        "Read        1,005 rows, all of the source",
        "Usable      998 records",
        "Unusable    2 records (0.2%)",
        "  2 with the reason time: its time cannot be read",
        "    first at a.csv, row 3; b.csv, row 1,000 (rows are counted from 0, without header and "
        "blank lines)",
        "    Fix: correct the files.",
        "Appears     yes: a key has 1 unit of one window, enough for a 50% chance of being "
        "published",
        "Nothing was charged or stored. Next: `dpstream plan daily --env prod`.",
    ]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"complete": False}, "the first ones only (--limit)"),
        ({"left_out": 7}, "Left out    7 rows"),
        ({"usable": 0}, "No record is usable"),
        ({"most_units_up_to_needed": None}, "not counted: too many keys"),
        ({"units_needed": 5}, "nothing is likely: no key has 5 units of one window"),
        ({"units_needed": 5, "complete": False}, "the most is 4, among the rows read"),
        ({"unusable": [FAULT | {"no_time": 1}]}, "Fix: write times as 2024-01-31T13:05:00Z"),
    ],
)
def test_what_else_it_says(changes: dict[str, Any], words: str) -> None:
    assert words in check_text(CHECKED | changes, "a") and words not in check_text(CHECKED, "a")


@pytest.mark.parametrize("changes", [{"units_needed": None}, {"usable": 0}])
def test_public_keys_and_no_records_need_no_units(changes: dict[str, Any]) -> None:
    assert "Appears" not in check_text(CHECKED | changes, "a")

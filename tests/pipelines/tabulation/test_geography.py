"""The geography: blocks once, regions of each."""

import numpy as np
import pytest

from dpstream.pipelines.tabulation.geography import GEOGRAPHY, is_in, read_geography, texts
from dpstream.pipelines.tabulation.text import Faults
from tests.pipelines.tabulation.office import Office

HEADER = "TABBLKST|TABBLKCOU|TABTRACTCE|TABBLK|PLACEFP|AIANNHCE"
ROWS = [
    "02|001|000001|0002|00007|0001",
    "01|001|000001|0001|99999|9999",
    "72|031|050901|2040|10001|0003",
    "04|001|000001|0001|99999|9999",
]


def read(made: Office, rows: list[str], states: tuple[str, ...] = ("01", "02", "72")) -> tuple[
    list[dict[str, str | None]] | None, list[tuple[int | None, str, str]]
]:  # fmt: skip
    path = made.data / "other.txt"
    path.write_text("\n".join([HEADER, *rows]) + "\n")
    faults = Faults(GEOGRAPHY)
    table = read_geography(path, states, faults)
    fault_rows = [(fault.row, fault.column, fault.rule) for fault in faults.faults]
    return None if table is None else table.to_pylist(), fault_rows


def test_blocks_of_the_run_are_sorted(spoilt: Office) -> None:
    blocks, faults = read(spoilt, ROWS)
    assert faults == [] and blocks is not None
    assert [row["block"] for row in blocks] == [
        "010010000010001", "020010000010002", "720310509012040"
    ]  # fmt: skip
    assert blocks[1] == {
        "block": "020010000010002", "state": "02", "county": "02001", "tract": "02001000001",
        "place": "0200007", "aiannh": "0001",
    }  # fmt: skip
    assert blocks[0]["place"] is None and blocks[0]["aiannh"] is None
    # Areas are counted outside of Puerto Rico only.
    assert blocks[2]["place"] == "7210001" and blocks[2]["aiannh"] is None


def test_a_block_that_is_there_twice(spoilt: Office) -> None:
    blocks, faults = read(spoilt, [*ROWS, ROWS[0].replace("00007", "99999")])
    assert blocks is None
    [(row, column, rule)] = faults
    assert (row, column) == (6, "TABBLKST .. TABBLK") and "would count twice" in rule
    assert read(spoilt, [*ROWS, ROWS[3]])[1] == []  # of a state that does not run


@pytest.mark.parametrize(
    ("row", "column"),
    [
        ("1|001|000001|0009|99999|9999", "TABBLKST"),
        ("01|1|000001|0009|99999|9999", "TABBLKCOU"),
        ("01|001|00000x|0009|99999|9999", "TABTRACTCE"),
        ("01|001|000001||99999|9999", "TABBLK"),
        ("01|001|000001|0009|999999|9999", "PLACEFP"),
        ("01|001|000001|0009|99999|-999", "AIANNHCE"),
    ],
)
def test_fields_of_another_form(spoilt: Office, row: str, column: str) -> None:
    _, [(number, where, rule)] = read(spoilt, [*ROWS, row])
    assert (number, where) == (6, column) and rule.endswith("digits")


def test_states_without_blocks(spoilt: Office) -> None:
    assert read(spoilt, ROWS, ("01", "05"))[1] == [
        (None, "TABBLKST", "has no block of a state of the run")
    ]
    assert read(spoilt, [])[1] == [(None, "", "has no rows")]


def test_texts_and_places_in_sorted_numbers() -> None:
    assert texts(np.array([7, 123]), 4).to_pylist() == ["0007", "0123"]
    assert is_in(np.array([1, 2, 9]), np.array([2, 5])).tolist() == [False, True, False]
    assert is_in(np.array([1]), np.array([], np.int64)).tolist() == [False]

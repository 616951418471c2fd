"""The answer of a receipt, and of a view of it."""

import pyarrow as pa
import pytest

from dpstream.accounting.errors import PolicyError
from dpstream.pipelines.formats.receipt import encoded, table_bytes
from dpstream.pipelines.sql.receipt import MARK, Header, SqlAnswer, decoded, python_values
from dpstream.state.ledger.answers import Answer

HEADER = Header(
    run_id="ab" * 16, plan_hash="q", answered="2026-01-02T03:04:05Z", epsilon=2.0, delta=1e-9,
    mu=0.5, threshold_delta=1e-10, reports=("n",), bounds={"s": (0.0, 1.0)}, nulls=("m",),
)  # fmt: skip
ROWS = pa.table(
    {
        "page": ["a", None],
        "n": [3.0, 4.0],
        **{f"n{MARK}{part}": [1.0, 2.0] for part in ("sd", "low", "high")},
        "m": pa.array([None, 1.5]),
        **{f"m{MARK}{part}": [0.5, 0.5] for part in ("sd", "low", "high")},
    }
)


def read(receipt: bytes, view: bytes | None = None) -> SqlAnswer:
    return decoded(Answer("", receipt, "digest", True, view), False)


def test_round_trip_with_and_without_report() -> None:
    answer = read(encoded(HEADER, ROWS))
    assert answer.header == HEADER and (answer.digest, answer.charged) == ("digest", True)
    assert answer.table.column_names == ["page", "n", "n_sd", "n_noise_low", "n_noise_high", "m"]
    assert answer.table.column("page").to_pylist() == ["a", None]
    assert answer.intervals["m"].column("sd").to_pylist() == [0.5, 0.5]
    assert encoded(answer.header, ROWS) == answer.receipt


def test_the_rows_of_a_view_stand_for_the_released_ones() -> None:
    receipt = encoded(HEADER, ROWS)
    answer = read(receipt, table_bytes(ROWS.slice(1)))
    assert answer.table.column("m").to_pylist() == [1.5] and answer.receipt == receipt
    assert read(receipt).table.num_rows == 2
    with pytest.raises(PolicyError):
        read(receipt, b"no table")


def test_days_beyond_the_calendar_are_numbers() -> None:
    days = pa.chunked_array([pa.array([0, 5_000_000], pa.date32())])
    assert python_values(days) == [0, 5_000_000]
    assert python_values(pa.chunked_array([pa.array([1, None])])) == [1, None]

"""What a ledger keeps of an answer is read back as it was, or refused."""

import pyarrow as pa
import pytest

from dpstream.accounting.errors import PolicyError
from dpstream.pipelines.sql.receipt import MARK, Header, decoded, encoded, python_values

HEADER = Header(
    "ab" * 16, "q", "2026-01-02T03:04:05Z", 2.0, 1e-9, 0.5, 1e-10, ("n",), {"s": (0.0, 1.0)}, ("m",)
)
ROWS = pa.table(
    {
        "page": ["a", None],
        "n": [3.0, 4.0],
        **{f"n{MARK}{part}": [1.0, 2.0] for part in ("sd", "low", "high")},
        "m": pa.array([None, 1.5]),
        **{f"m{MARK}{part}": [0.5, 0.5] for part in ("sd", "low", "high")},
    }
)


def test_round_trip_with_and_without_report() -> None:
    answer = decoded(encoded(HEADER, ROWS), "digest", True, False)
    assert answer.header == HEADER and (answer.digest, answer.charged) == ("digest", True)
    assert answer.table.column_names == ["page", "n", "n_sd", "n_noise_low", "n_noise_high", "m"]
    assert answer.table.column("page").to_pylist() == ["a", None]
    assert answer.intervals["m"].column("sd").to_pylist() == [0.5, 0.5]
    assert encoded(answer.header, ROWS) == answer.receipt


def test_released_rows_go_through_the_outer_query_when_they_are_read() -> None:
    receipt = encoded(HEADER, ROWS, outer=False)
    answer = decoded(receipt, "", False, False, lambda rows: rows.slice(1))
    assert answer.table.column("m").to_pylist() == [1.5] and answer.receipt == receipt
    whole = decoded(encoded(HEADER, ROWS), "", False, False, lambda rows: rows.slice(1))
    assert whole.table.num_rows == 2


def test_other_bytes_are_refused() -> None:
    receipt = encoded(HEADER, ROWS)
    other = encoded(HEADER, ROWS).replace(b'"question"', b'"questiom"')
    for bad in (b"", receipt[:8], b"x" + receipt[1:], receipt[:-40], other):
        with pytest.raises(PolicyError, match=r"ledger\.path"):
            decoded(bad, "digest", False, False)


def test_days_beyond_the_calendar_are_numbers() -> None:
    days = pa.chunked_array([pa.array([0, 5_000_000], pa.date32())])
    assert python_values(days) == [0, 5_000_000]
    assert python_values(pa.chunked_array([pa.array([1, None])])) == [1, None]

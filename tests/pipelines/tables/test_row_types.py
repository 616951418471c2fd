"""Values as a query sees them: each by itself."""

from datetime import UTC, date, datetime
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest

from dpstream.pipelines.tables.columns import TYPES
from dpstream.pipelines.tables.row_types import DUCKDB, typed

_NOON = datetime(2024, 1, 1, 12, tzinfo=UTC)
_CASES: list[tuple[str, list[Any], list[Any]]] = [
    ("INT64", ["7", " 7", "x", None, "-0"], [7, None, None, None, 0]),
    ("INT64", [7.0, 7.5, float("nan"), 2.0**60], [7, None, None, None]),
    ("FLOAT64", ["1.5", "nan", "1e400", None, "2"], [1.5, None, None, None, 2.0]),
    ("FLOAT64", [float("inf"), float("nan"), 0.25], [None, None, 0.25]),
    ("BOOL", ["true", "FALSE", "1", None], [True, False, None, None]),
    ("STRING", ["e\u0301", "y" * 1025, "", None], ["\u00e9", None, "", None]),
    ("BYTES", [b"\xff", None], [b"\xff", None]),
    ("TIMESTAMP", ["2024-01-01T12:00:00Z", "2024-13-01T12:00:00Z", None], [_NOON, None, None]),
    ("TIMESTAMP", [_NOON], [_NOON]),
    ("DATETIME", ["2024-01-01T12:00:00"], [_NOON.replace(tzinfo=None)]),
    ("DATE", [date(2024, 1, 1), None], [date(2024, 1, 1), None]),
    ("DATE", ["2024-01-01", "2024-02-31"], ["2024-01-01", "2024-02-31"]),
    ("DATE", [1, 2], [None, None]),
    ("NUMERIC", [Decimal("1.25"), None], [Decimal("1.25"), None]),
    ("NUMERIC", [3], [Decimal(3)]),
    ("NUMERIC", ["1.25", None], ["1.25", None]),
]


@pytest.mark.parametrize(("kind", "values", "wanted"), _CASES)
def test_values(kind: str, values: list[Any], wanted: list[Any]) -> None:
    assert typed(pa.array(values), kind).to_pylist() == wanted
    alone = [typed(pa.chunked_array([pa.array([v], pa.array(values).type)]), kind) for v in values]
    assert [one.to_pylist()[0] for one in alone] == wanted


def test_text_that_is_not_utf8_is_null() -> None:
    raw = pa.array([b"a", b"\xff"], pa.binary()).view(pa.string())
    assert typed(raw, "STRING").to_pylist() == ["a", None]


def test_every_type_is_known() -> None:
    assert set(DUCKDB) == TYPES
    for kind in TYPES:
        assert len(typed(pa.array([], pa.string()), kind)) == 0

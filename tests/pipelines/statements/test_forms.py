"""Casts and functions of one row, by the documentation of GoogleSQL: values written by hand.

What GoogleSQL has an error for is NULL here; what has no exact form is refused.
"""

import datetime as dt
from decimal import Decimal
from typing import Any

import duckdb
import pytest

from dpstream.accounting.errors import DpstreamError
from dpstream.pipelines.statements.allowed import parsed, qualified
from dpstream.pipelines.statements.exact import tried

_TYPES = {"s": "STRING", "n": "INT64", "d": "DATE", "a": "TIMESTAMP", "m": "DATETIME",
          "f": "FLOAT64", "c": "NUMERIC", "b": "BOOL", "y": "BYTES"}  # fmt: skip
_DUCKDB = ("s VARCHAR, n BIGINT, d DATE, a TIMESTAMPTZ, m TIMESTAMP, f DOUBLE, "
           "c DECIMAL(38, 9), b BOOLEAN, y BLOB")  # fmt: skip


def value_of(expression: str, column: str, value: Any) -> Any:
    """An expression of one row whose one column has a value."""
    query = qualified(parsed(f"SELECT {expression} AS x FROM t"), {"t": _TYPES})
    text = tried(query.selects[0].unalias().copy()).sql("duckdb")
    with duckdb.connect() as base:
        base.execute(f"SET TimeZone = 'UTC'; CREATE TABLE t ({_DUCKDB})")
        base.execute(f"INSERT INTO t ({column}) VALUES (?)", [value])
        [(result,)] = base.execute(f"SELECT {text} FROM t").fetchall()
    return result


_UTC = dt.UTC
_MOST = 2**63 - 1
#: By expression and its column: each value with its result.
VALUES: dict[tuple[str, str], dict[Any, Any]] = {
    ("SAFE_CAST(s AS INT64)", "s"): {
        "12": 12, " -7 ": -7, "+5": 5, "0x1F": 31, "-0x1f": -31, str(_MOST): _MOST,
        f"-{hex(2**63)}": -(2**63), hex(2**63): None, "1e3": None, "5.7": None, "1_000": None,
        "": None, "t": None, "infinity": None,
    },
    ("SAFE_CAST(s AS BOOL)", "s"): {
        "true": True, "FALSE": False, "t": None, "1": None, "yes": None, "on": None,
    },
    ("SAFE_CAST(s AS FLOAT64)", "s"): {
        "1.5": 1.5, "1e3": 1000.0, ".5": 0.5, "-Infinity": float("-inf"), "1_0.5": None, "x": None,
    },
    ("SAFE_CAST(s AS NUMERIC)", "s"): {
        "1.5": Decimal("1.5"), "2e2": Decimal(200), "1_0": None, "inf": None,
    },
    ("CAST(s AS BYTES)", "s"): {"é": b"\xc3\xa9", "\\x41": b"\\x41"},
    ("SAFE_CAST(y AS STRING)", "y"): {b"\xc3\xa9": "é", b"\x00a": "\x00a", b"\xff\xfe": None},
    ("SAFE_CAST(s AS DATE)", "s"): {
        "2024-01-05": dt.date(2024, 1, 5), "2024-1-5": dt.date(2024, 1, 5), "2024-02-30": None,
        "24-1-5": None, "2024/01/05": None, "infinity": None, "0000-01-01": None,
        "2024-01-05 01:00:00": None,
    },
    ("SAFE_CAST(s AS TIMESTAMP)", "s"): {
        "2024-01-05": dt.datetime(2024, 1, 5, tzinfo=_UTC),
        "2024-1-5 1:2:3": dt.datetime(2024, 1, 5, 1, 2, 3, tzinfo=_UTC),
        "2024-01-05T01:02:03.5Z": dt.datetime(2024, 1, 5, 1, 2, 3, 500_000, tzinfo=_UTC),
        "2024-01-05 01:02:03+05:30": dt.datetime(2024, 1, 4, 19, 32, 3, tzinfo=_UTC),
        "2024-01-05 24:00:00": None, "2024-01-05 01:02": None, "infinity": None,
    },
    ("SAFE_CAST(s AS DATETIME)", "s"): {
        "2024-01-05T01:02:03": dt.datetime(2024, 1, 5, 1, 2, 3), "2024-01-05 01:02:03Z": None,
    },
    ("CAST(c AS STRING)", "c"): {
        Decimal("1.5"): "1.5", Decimal(100): "100", Decimal(0): "0", Decimal("-0.5"): "-0.5",
        Decimal("1.000000001"): "1.000000001",
    },
    ("CAST(c AS INT64)", "c"): {Decimal("2.5"): 3, Decimal("-2.5"): -3},
    ("CAST(f AS INT64)", "f"): {2.5: 3, -2.5: -3, 1e20: None, float("nan"): None},
    ("CAST(f AS STRING)", "f"): {5.0: "5", 0.1: "0.1", 1e20: "1e+20"},
    ("CAST(b AS STRING)", "b"): {True: "true", False: "false"},
    ("CAST(n AS BOOL)", "n"): {0: False, -3: True},
    ("CAST(a AS STRING)", "a"): {
        "2024-01-01 00:00:00+00": "2024-01-01 00:00:00+00",
        "2024-01-01 00:00:00.5+00": "2024-01-01 00:00:00.500+00",
        "2024-01-01 00:00:00.12345+00": "2024-01-01 00:00:00.123450+00", "infinity": None,
    },
    ("CAST(m AS STRING)", "m"): {"2024-01-01 10:20:30": "2024-01-01 10:20:30"},
    ("CAST(d AS STRING)", "d"): {"0099-01-02": "0099-01-02", "infinity": None},
    ("REVERSE(s)", "s"): {"e\u0301x": "x\u0301e", "": ""},
    ("TRIM(s, 'ab')", "s"): {"abxba": "x", "x": "x"},
    ("LTRIM(s, 'é')", "s"): {"ééx": "x"},
    ("DATE_TRUNC(d, WEEK)", "d"): {
        "2024-02-03": dt.date(2024, 1, 28), "2024-02-04": dt.date(2024, 2, 4), "infinity": None,
    },
    ("DATE_TRUNC(d, WEEK(MONDAY))", "d"): {
        "2024-02-04": dt.date(2024, 1, 29), "2024-02-05": dt.date(2024, 2, 5),
    },
    ("DATE_TRUNC(d, ISOWEEK)", "d"): {"2023-01-01": dt.date(2022, 12, 26)},
    ("DATETIME_TRUNC(m, WEEK)", "m"): {"2024-02-03 10:00:00": dt.datetime(2024, 1, 28)},
    ("EXTRACT(WEEK FROM d)", "d"): {"2024-01-06": 0, "2024-01-07": 1, "2023-01-01": 1},
    ("EXTRACT(WEEK(MONDAY) FROM d)", "d"): {"2023-01-01": 0, "2024-01-01": 1, "2024-01-08": 2},
    ("FORMAT_DATE('%Y-%m %a %%', d)", "d"): {
        "2024-02-03": "2024-02 Sat %", "0099-01-01": None, "infinity": None,
    },
    ("FORMAT_TIMESTAMP('%F %T', a, 'America/New_York')", "a"): {
        "2024-06-30 23:30:00+00": "2024-06-30 19:30:00",
    },
    ("DATE(a, 'Europe/Berlin')", "a"): {"2024-06-30 23:30:00+00": dt.date(2024, 7, 1)},
    ("EXTRACT(HOUR FROM a AT TIME ZONE 'Asia/Kolkata')", "a"): {"2024-06-30 23:30:00+00": 5},
    ("EXTRACT(DATE FROM a)", "a"): {"2024-06-30 23:30:00+00": dt.date(2024, 6, 30)},
    ("REGEXP_EXTRACT(s, r'a(.)')", "s"): {"xab": "b", "x": None, "a": None},
    (r"REGEXP_EXTRACT(s, r'\d+')", "s"): {"x12y3": "12", "": None},
    ('REGEXP_EXTRACT(s, "it\'s")', "s"): {"it's": "it's"},
}  # fmt: skip


@pytest.mark.parametrize(("expression", "column"), VALUES)
def test_values_are_those_of_the_documentation(expression: str, column: str) -> None:
    cases = VALUES[expression, column]
    results = {value: value_of(expression, column, value) for value in cases}
    assert [(type(r), str(r)) for r in results.values()] == [
        (
            type(result),
            str(result.quantize(Decimal("1e-9")) if isinstance(result, Decimal) else result),
        )
        for result in cases.values()
    ]
    assert value_of(expression, column, None) is None


@pytest.mark.parametrize(("expression", "rule"), [
    ("CAST(n AS DATE)", "cast"), ("CAST(f AS BOOL)", "cast"), ("CAST(b AS FLOAT64)", "cast"),
    ("CAST(y AS INT64)", "cast"), ("CAST(a AS INT64)", "cast"), ("CAST(c AS BOOL)", "cast"),
    ("REGEXP_EXTRACT(s, 'a(b)?')", "function"), ("REGEXP_EXTRACT(s, '(a)|b')", "function"),
    ("REGEXP_EXTRACT(s, '(a)(b)')", "function"), ("REGEXP_EXTRACT(s, s)", "function"),
    ("REGEXP_EXTRACT(s, 'a', 2)", "function"), ("EXTRACT(MONDAY FROM d)", "function"),
    ("DATE_DIFF(d, d, WEEK)", "function"), ("DATE_TRUNC(d, MONDAY)", "function"),
    ("FORMAT_DATE('%Q', d)", "function"), ("FORMAT_DATE(s, d)", "function"),
    ("DATE(m, 'Europe/Berlin')", "time-zone"), ("DATE(a, 'Mars/Olympus')", "time-zone"),
    ("DATE(a, s)", "time-zone"), ("TIMESTAMP_TRUNC(a, DAY, 'Europe/Berlin')", "time-zone"),
])  # fmt: skip
def test_what_has_no_exact_form_is_refused(expression: str, rule: str) -> None:
    with pytest.raises(DpstreamError) as error:
        qualified(parsed(f"SELECT {expression} AS x FROM t"), {"t": _TYPES})
    assert error.value.code == rule  # type: ignore[attr-defined]

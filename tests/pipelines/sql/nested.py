"""Statements of nested expressions, and a table of values that each of them may fail on."""

import decimal
import random

import pyarrow as pa

_PARTS = ("YEAR", "MONTH", "SECOND", "ISOYEAR", "ISOWEEK", "WEEK", "QUARTER", "DAYOFYEAR",
          "DAYOFWEEK")  # fmt: skip
_OPTIONS = (
    "SELECT WITH DIFFERENTIAL_PRIVACY OPTIONS(epsilon = 10, delta = 1e-5, "
    "max_groups_contributed = 3) "
)
_BOUNDS = "contribution_bounds_per_group => (0, 5)"


def nasty(seed: int, rows: int = 40) -> pa.Table:
    """Ends of ranges, NaN, bad casts, patterns and zones, of five units."""
    draw = random.Random(seed)

    def drawn(*values: object) -> list[object]:
        return [draw.choice(values) for _ in range(rows)]

    power = decimal.Decimal(10)
    integers = drawn(0, 1, -1, 5, 2**63 - 1, -(2**63), 2**31, 10**18, None, 37)
    number = drawn(0.0, -0.0, float("nan"), float("inf"), -float("inf"), 1e308, -1e308, 5e-324,
                   2.5, None)  # fmt: skip
    text = drawn("", "a", "[", "\\", "%", "é", "\U0001f3f3", "1e400", "-", "9" * 40, "2024-02-30",
                 "infinity", "290000-01-01", None, "\0a", "Mexico/General", "a\\_",
                 "2024-01-01 00:00:00 Foo/Bar", "x" * 40_000)  # fmt: skip
    far = 922337202240000000
    at = drawn(None, 0, -(2**62), 2**62, far, -far)
    day = drawn(None, 0, -(2**31) + 10, 2**31 - 10, 106751991, -106751991)
    return pa.table({
        "uid": [f"u{i % 5}" for i in range(rows)],
        "x": pa.array(integers, pa.int64()),
        "f": pa.array(number, pa.float64()),
        "s": pa.array(text, pa.string()),
        "t": pa.array(at, pa.int64()).cast(pa.timestamp("us")),
        "dd": pa.array(day, pa.int32()).cast(pa.date32()),
        "d": pa.array(drawn(None, *(decimal.Decimal(v) for v in (0, "1e-9")), power**28,
                            -(power**28)), pa.decimal128(38, 9)),
        "w": pa.array(drawn(None, decimal.Decimal(0), power**37, -(power**37)),
                      pa.decimal128(38, 0)),
        "b": pa.array(drawn(True, False, None), pa.bool_()),
    })  # fmt: skip


class Nested:
    """Expressions of every kind, nested to a depth."""

    def __init__(self, seed: int) -> None:
        self._draw = random.Random(seed)

    def _pick(self, *forms: str) -> str:
        return self._draw.choice(forms)

    def number(self, k: int) -> str:
        """Floats, whole numbers and decimals."""
        if k <= 0:
            return self._pick("x", "f", "d", "w", "x", "f", "1", "0", "-1", "9223372036854775807",
                              "0.5", "1e300", "0.0000000000000000000000000000000000001",
                              "LENGTH(s)")  # fmt: skip
        a, b, s, day = self.number(k - 1), self.number(k - 1), self.text(k - 1), self.day(k - 1)
        sign = self._pick("+", "-", "*", "/")
        of = self._pick("ABS", "CEIL", "FLOOR", "ROUND", "TRUNC", "SIGN", "SQRT", "EXP", "LN",
                        "LOG10")  # fmt: skip
        two = self._pick("MOD", "LOG", "POW", "GREATEST", "LEAST", "SAFE_DIVIDE", "NULLIF",
                         "COALESCE")  # fmt: skip
        kind = self._pick("INT64", "FLOAT64", "NUMERIC")
        return self._pick(
            f"({a} {sign} {b})", f"({a} {sign} {b})", f"{of}({a})", f"{of}({a})",
            f"{two}({a}, {b})", f"{two}({a}, {b})",
            f"DIV({self.integer(k - 1)}, {self.integer(k - 1)})", f"ROUND({a}, 2)",
            f"IF({self.holds(k - 1)}, {a}, {b})", f"CAST({a} AS {kind})",
            f"CAST({s} AS {kind})", f"(-{a})", f"STRPOS({s}, {self.text(k - 1)})",
            f"EXTRACT({self._pick(*_PARTS)} FROM {day})",
            f"DATE_DIFF({day}, {self.day(k - 1)}, {self._pick('DAY', 'MONTH', 'YEAR')})",
            f"TIMESTAMP_DIFF({self.instant(k - 1)}, {self.instant(k - 1)}, "
            f"{self._pick('SECOND', 'DAY', 'HOUR')})",
        )  # fmt: skip

    def integer(self, k: int) -> str:
        """INT64."""
        if k <= 0:
            return self._pick("x", "LENGTH(s)", "1", "-1", "9223372036854775807")
        a, b = self.integer(k - 1), self.integer(k - 1)
        return self._pick(f"CAST({self.number(k - 1)} AS INT64)", f"({a} * {b})", f"({a} & {b})",
                          "x")  # fmt: skip

    def text(self, k: int) -> str:
        """STRING."""
        if k <= 0:
            return self._pick("s", "s", "'a'", "''", "'%'")
        a, b, n = self.text(k - 1), self.text(k - 1), self.integer(k - 1)
        of = self._draw.choice((self.number, self.day, self.instant, self.holds))(k - 1)
        return self._pick(
            f"CONCAT({a}, {b})", f"{a} || {b}", f"SUBSTR({a}, {n}, {self.integer(k - 1)})",
            f"REPLACE({a}, {b}, {self.text(0)})", f"LEFT({a}, {n})", f"RIGHT({a}, {n})",
            f"REVERSE({a})", f"UPPER({a})", f"LOWER({a})", f"TRIM({a})", f"CAST({of} AS STRING)",
            f"CAST(CAST({a} AS BYTES) AS STRING)",
        )  # fmt: skip

    def day(self, k: int) -> str:
        """DATE."""
        if k <= 0:
            return self._pick("dd", "CAST('2024-01-01' AS DATE)")
        of, n = self.day(k - 1), self.integer(k - 1)
        return self._pick(
            f"CAST({self.text(k - 1)} AS DATE)", f"DATE_SUB({of}, INTERVAL {n} DAY)",
            f"DATE_ADD({of}, INTERVAL {n} {self._pick('DAY', 'MONTH', 'YEAR')})",
            f"DATE_TRUNC({of}, {self._pick('MONTH', 'YEAR', 'QUARTER', 'WEEK')})",
            f"DATE({self.instant(k - 1)})", f"CAST({self.instant(k - 1)} AS DATE)",
        )  # fmt: skip

    def instant(self, k: int) -> str:
        """TIMESTAMP and DATETIME."""
        if k <= 0:
            return self._pick("t", "CAST(t AS TIMESTAMP)")
        kind = self._pick("TIMESTAMP", "DATETIME")
        return self._pick(
            f"CAST({self.text(k - 1)} AS {kind})", f"CAST({self.day(k - 1)} AS {kind})",
            f"TIMESTAMP_TRUNC({self.instant(k - 1)}, {self._pick('DAY', 'HOUR', 'YEAR')})", "t",
        )  # fmt: skip

    def holds(self, k: int) -> str:
        """BOOL."""
        if k <= 0:
            return self._pick("b", "x > 0", "s = 'a'", "f = f", "d = w", "f < 1")
        a, s, t = self.number(k - 1), self.text(k - 1), self.text(k - 1)
        sign = self._pick("=", "<", ">=", "<>")
        return self._pick(
            f"({a} {sign} {self.number(k - 1)})", f"({s} LIKE {t})", f"REGEXP_CONTAINS({s}, {t})",
            f"STARTS_WITH({s}, {t})", f"({a} BETWEEN {self.number(0)} AND {self.number(0)})",
            f"({a} IN ({self.number(0)}, {self.number(0)}))",
            f"({self.holds(k - 1)} AND {self.holds(k - 1)})", f"(NOT {self.holds(k - 1)})",
            f"({self.day(k - 1)} < {self.day(k - 1)})", f"CAST({s} AS BOOL)",
            f"({self.instant(k - 1)} = {self.instant(k - 1)})", f"({a} IS NULL)",
            f"({s} IS DISTINCT FROM {t})",
        )  # fmt: skip

    def statement(self) -> str:
        """A statement over the table ``v``; two of its parts often share an expression."""
        k = self._draw.choice((1, 2, 2, 3))
        kind = self._draw.choice((self.number, self.text, self.day, self.instant, self.holds))
        key = self._draw.choice((self.text, self.day, self.holds))
        a, b, n = kind(k), kind(k), self.number(k)
        extreme = self._pick("MAX", "MIN", "AVG", "SUM")
        branches = "SELECT uid, {} AS z FROM v UNION ALL SELECT uid, {} FROM v"
        return _OPTIONS + self._pick(
            f"COUNT({a}, {_BOUNDS}) AS c, SUM({n}, {_BOUNDS}) AS s FROM v WHERE {self.holds(k)}",
            f"SUM({n} + 1, {_BOUNDS}) AS a, SUM({n} + 2, {_BOUNDS}) AS b FROM v",
            f"z, SUM(q.y, contribution_bounds_per_row => (0, 5)) AS s FROM (SELECT uid, {key(k)} "
            f"AS z, {n} AS y FROM v) AS q GROUP BY z",
            f"SUM(q.y, {_BOUNDS}) AS s, MEDIAN(q.w, contribution_bounds_per_row => (0, 5)) AS m "
            f"FROM (SELECT uid, SUM({n}) AS y, {extreme}({self.number(k)}) AS w, "
            f"COUNT(DISTINCT {a}) AS c FROM v GROUP BY uid HAVING MAX({n}) > {self.number(0)}) "
            "AS q WHERE q.c > q.y OR q.w > 1",
            f"COUNT(*, {_BOUNDS}) AS s FROM (SELECT uid, {a} AS z FROM v) AS q JOIN "
            f"(SELECT uid, {b} AS z FROM v) AS r ON q.uid = r.uid AND q.z = r.z",
            f"COUNT(*, {_BOUNDS}) AS s FROM (SELECT uid, {n} AS y, {self.number(k)} AS z FROM v) "
            "AS q WHERE q.y = q.z",
            f"COUNT(q.z, {_BOUNDS}) AS s FROM ({branches.format(a, b)}) AS q",
            f"COUNT(q.z, {_BOUNDS}) AS s FROM "
            f"({branches.format(self._pick('d', 'w', n), self._pick('d', 'w', self.number(k)))}) "
            "AS q",
        )  # fmt: skip

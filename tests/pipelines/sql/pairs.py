"""Pairs of statements: one that is accepted, and the like of it that breaks one rule.

Pairs of relations stand in six surroundings each; a relation gives ``uid`` and a whole number
``v``.  The tests ask that the first is accepted and the second refused by exactly the rule named.
"""

import decimal
import random

import pyarrow as pa

from tests.pipelines.sql.form_pairs import FORMS, WITHIN

OPTIONS = "OPTIONS(epsilon = 1, delta = 1e-9, max_groups_contributed = 3)"
DP = f"SELECT WITH DIFFERENTIAL_PRIVACY {OPTIONS}"
ANON = f"SELECT WITH ANONYMIZATION {OPTIONS}"
#: Where a relation can stand.
AROUND = (
    DP + " v, COUNT(*) AS k FROM ({}) AS r GROUP BY v",
    ANON + " v, ANON_COUNT(*, 5) AS k FROM ({}) AS r GROUP BY v",
    DP + " v, COUNT(*) AS k FROM (SELECT * FROM ({}) AS q) AS r GROUP BY v",
    "WITH r AS ({}) " + DP + " v, COUNT(*) AS k FROM r GROUP BY v",
    DP + " r.v, COUNT(*) AS k FROM ({}) AS r JOIN users AS u2 ON u2.uid = r.uid GROUP BY r.v",
    DP + " v, COUNT(*) AS k FROM (SELECT uid, n AS v FROM visits UNION ALL {}) AS r GROUP BY v",
)
_UV = "SELECT a.uid, b.n AS v FROM users AS a JOIN visits AS b ON"
_GROUP = "SELECT uid, COUNT(*) AS v FROM visits GROUP BY"
_SIGNED, _DEPTS = "SELECT u.uid,", "FROM users AS u JOIN depts AS d ON u.dept = d.dept"
#: (accepted, refused, rule)
RELATIONS: list[tuple[str, str, str]] = [
    # The unit is selected.
    ("SELECT uid, n AS v FROM visits", "SELECT n AS uid, n AS v FROM visits", "unit-not-selected"),
    ("SELECT uid, age AS v FROM users", "SELECT uid + 0 AS uid, age AS v FROM users",
     "unit-not-selected"),
    ("SELECT uid, age AS v FROM users", "SELECT ABS(uid) AS uid, age AS v FROM users",
     "unit-not-selected"),
    ("SELECT uid, 1 AS v FROM orders", "SELECT order_id AS uid, 1 AS v FROM orders",
     "unit-not-selected"),
    ("SELECT customer_id AS uid, 1 AS v FROM orders", "SELECT order_id AS uid, 1 AS v FROM items",
     "unit-not-selected"),
    ("SELECT uid, age AS v FROM users",
     "SELECT COALESCE(uid, age) AS uid, age AS v FROM users", "unit-not-selected"),
    ("SELECT uid, age AS v FROM users",
     "SELECT IF(age > 3, uid, 7) AS uid, age AS v FROM users", "unit-not-selected"),
    ("SELECT uid, age AS v FROM users",
     "SELECT CAST(uid AS INT64) AS uid, age AS v FROM users", "unit-not-selected"),
    # Groups.
    (f"{_GROUP} uid", f"{_GROUP} page", "group-without-unit"),
    (f"{_GROUP} uid, page", "SELECT MIN(uid) AS uid, COUNT(*) AS v FROM visits GROUP BY page",
     "group-without-unit"),
    (f"{_GROUP} uid, day", "SELECT MAX(uid) AS uid, SUM(n) AS v FROM visits", "group-without-unit"),
    (f"{_GROUP} 1", "SELECT uid + 0 AS uid, COUNT(*) AS v FROM visits GROUP BY 1",
     "group-without-unit"),
    ("SELECT customer_id AS uid, COUNT(*) AS v FROM orders GROUP BY customer_id",
     "SELECT order_id AS uid, COUNT(*) AS v FROM items GROUP BY order_id", "group-without-unit"),
    ("SELECT uid, SUM(n) AS v FROM visits GROUP BY uid, page HAVING COUNT(*) > 1",
     "SELECT ANY_VALUE(uid) AS uid, 1 AS v FROM visits GROUP BY page", "group-without-unit"),
    ("SELECT uid, ANY_VALUE(n) AS v FROM visits GROUP BY uid",
     "SELECT uid, ANY_VALUE(n HAVING MAX at) AS v FROM visits GROUP BY uid", "inner-aggregate"),
    (f"{_GROUP} uid, day", f"{_GROUP} uid, seconds", "group-type"),
    (f"{_GROUP} uid, cost", f"{_GROUP} uid, n / 3", "group-type"),
    ("SELECT DISTINCT uid, n AS v FROM visits", "SELECT DISTINCT n AS uid, n AS v FROM visits",
     "unit-not-selected"),
    (f"{_GROUP} uid", f"{_GROUP} ROLLUP(uid)", "grouping-sets"),
    (f"{_GROUP} uid", f"{_GROUP} CUBE(uid, page)", "grouping-sets"),
    (f"{_GROUP} uid", f"{_GROUP} GROUPING SETS (uid, page)", "grouping-sets"),
    (f"{_GROUP} uid", "SELECT uid, n AS v FROM visits GROUP BY uid", "aggregate-place"),
    (f"{_GROUP} uid", "SELECT uid, COUNT(*) + n AS v FROM visits GROUP BY uid", "aggregate-place"),
    (f"{_GROUP} uid", f"{_GROUP} uid HAVING n > 1", "aggregate-place"),
    ("SELECT uid, n AS v FROM visits WHERE n > 1",
     "SELECT uid, n AS v FROM visits WHERE COUNT(*) > 1", "aggregate-place"),
    ("SELECT uid, CAST(SUM(n) AS INT64) AS v FROM visits GROUP BY uid",
     "SELECT uid, CAST(STDDEV_SAMP(n) AS INT64) AS v FROM visits GROUP BY uid", "inner-aggregate"),
    ("SELECT uid, MAX(n) AS v FROM visits GROUP BY uid",
     "SELECT uid, SUM(DISTINCT n) AS v FROM visits GROUP BY uid", "inner-aggregate"),
    ("SELECT uid, COUNT(DISTINCT page) AS v FROM visits GROUP BY uid",
     "SELECT uid, MEDIAN(n) AS v FROM visits GROUP BY uid", "dp-function-outside"),
    ("SELECT uid, COUNTIF(flag) AS v FROM visits GROUP BY uid",
     "SELECT uid, ANON_COUNT(*) AS v FROM visits GROUP BY uid", "dp-function-outside"),
    ("SELECT uid, SUM(n + 1) AS v FROM visits GROUP BY uid",
     "SELECT uid, SUM(MAX(n)) AS v FROM visits GROUP BY uid", "nested-aggregate"),
    # Joins of private relations.
    (f"{_UV} a.uid = b.uid", "SELECT a.uid, b.n AS v FROM users AS a CROSS JOIN visits AS b",
     "join-without-unit"),
    (f"{_UV} a.uid = b.uid AND b.n > 1", "SELECT a.uid, b.n AS v FROM users AS a, visits AS b",
     "join-without-unit"),
    (f"{_UV} b.uid = a.uid",
     "SELECT a.uid, b.n AS v FROM users AS a, visits AS b WHERE a.uid = b.uid OR a.age = 1",
     "join-without-unit"),
    (f"{_UV} a.uid = b.uid AND (a.age = 1 OR b.n = 1)", f"{_UV} a.uid = b.uid OR a.age = b.n",
     "join-without-unit"),
    (f"{_UV} a.uid = b.uid", f"{_UV} a.uid < b.uid", "join-without-unit"),
    (f"{_UV} a.uid = b.uid", f"{_UV} a.uid = a.uid", "join-without-unit"),
    (f"{_UV} a.uid = b.uid", f"{_UV} a.uid + 1 = b.uid + 1", "join-without-unit"),
    (f"{_UV} (a.uid = b.uid)", f"{_UV} ABS(a.uid) = ABS(b.uid)", "join-without-unit"),
    (f"{_UV} a.uid = b.uid", f"{_UV} a.uid = b.n", "join-without-unit"),
    (f"{_UV} a.uid = b.uid", f"{_UV} a.age = b.uid", "join-without-unit"),
    (f"{_UV} a.uid = b.uid", f"{_UV} NOT a.uid <> b.uid", "join-without-unit"),
    (f"{_UV} a.uid = b.uid", f"{_UV} a.uid IN (b.uid)", "join-without-unit"),
    (f"{_UV} a.uid = b.uid", f"{_UV} (a.uid = b.uid) IS TRUE", "join-without-unit"),
    (f"{_UV} a.uid = b.uid", f"{_UV} TRUE", "join-without-unit"),
    (f"{_UV} a.uid = b.uid", f"{_UV} CASE WHEN a.uid = b.uid THEN TRUE ELSE b.n = 1 END",
     "join-without-unit"),
    ("SELECT uid, n AS v FROM users JOIN visits USING (uid)",
     "SELECT users.uid, n AS v FROM users JOIN visits ON users.dept = visits.page",
     "join-without-unit"),
    ("SELECT a.uid, b.n AS v FROM users AS a LEFT JOIN visits AS b ON a.uid = b.uid",
     "SELECT b.uid, b.n AS v FROM users AS a LEFT JOIN visits AS b ON a.uid = b.uid",
     "unit-not-selected"),
    ("SELECT b.uid, a.age AS v FROM users AS a RIGHT JOIN visits AS b ON a.uid = b.uid",
     "SELECT a.uid, a.age AS v FROM users AS a RIGHT JOIN visits AS b ON a.uid = b.uid",
     "unit-not-selected"),
    ("SELECT COALESCE(a.uid, b.uid) AS uid, b.n AS v FROM users AS a FULL JOIN visits AS b "
     "ON a.uid = b.uid",
     "SELECT a.uid, b.n AS v FROM users AS a FULL JOIN visits AS b ON a.uid = b.uid",
     "unit-not-selected"),
    ("SELECT uid, n AS v FROM users FULL JOIN visits USING (uid)",
     "SELECT COALESCE(a.uid, b.n) AS uid, b.n AS v FROM users AS a FULL JOIN visits AS b "
     "ON a.uid = b.uid", "unit-not-selected"),
    ("SELECT c.uid, 1 AS v FROM users AS a LEFT JOIN visits AS b ON a.uid = b.uid "
     "JOIN users AS c ON c.uid = a.uid",
     "SELECT c.uid, 1 AS v FROM users AS a LEFT JOIN visits AS b ON a.uid = b.uid "
     "JOIN users AS c ON c.uid = b.n", "join-without-unit"),
    ("SELECT c.uid, 1 AS v FROM users AS a FULL JOIN visits AS b ON a.uid = b.uid "
     "JOIN users AS c ON c.uid = COALESCE(a.uid, b.uid)",
     "SELECT c.uid, 1 AS v FROM users AS a FULL JOIN visits AS b ON a.uid = b.uid "
     "JOIN users AS c ON c.uid = COALESCE(a.uid, b.n)", "join-without-unit"),
    ("SELECT c.uid, 1 AS v FROM visits AS a FULL JOIN visits AS b ON a.uid = b.uid "
     "JOIN visits AS c ON c.uid = b.uid",
     "SELECT a.uid, 1 AS v FROM visits AS a FULL JOIN visits AS b ON a.uid = b.uid "
     "LEFT JOIN visits AS c ON c.uid = b.uid", "unit-not-selected"),
    # Joins with public relations.
    ("SELECT v.uid, v.n AS v FROM visits AS v LEFT JOIN pages AS p ON p.page = v.page",
     "SELECT v.uid, v.n AS v FROM visits AS v RIGHT JOIN pages AS p ON p.page = v.page",
     "outer-join-public"),
    ("SELECT v.uid, v.n AS v FROM pages AS p RIGHT JOIN visits AS v ON p.page = v.page",
     "SELECT v.uid, v.n AS v FROM pages AS p LEFT JOIN visits AS v ON p.page = v.page",
     "outer-join-public"),
    ("SELECT v.uid, v.n AS v FROM visits AS v CROSS JOIN depts AS d",
     "SELECT v.uid, v.n AS v FROM visits AS v FULL JOIN pages AS p ON p.page = v.page",
     "outer-join-public"),
    ("SELECT v.uid, v.n AS v FROM visits AS v JOIN pages AS p ON v.n < p.weight",
     "SELECT p.uid, v.n AS v FROM visits AS v JOIN pages AS p ON p.page = v.page",
     "unit-not-selected"),
    ("SELECT v.uid, v.n AS v FROM visits AS v JOIN pages AS p ON v.page = p.page",
     "SELECT v.uid, v.n AS v FROM visits AS v NATURAL JOIN pages", "join-kind"),
    ("SELECT v.uid, v.n AS v FROM visits AS v JOIN users AS p ON v.uid = p.uid",
     "SELECT v.uid, v.n AS v FROM visits AS v SEMI JOIN users AS p ON v.uid = p.uid", "join-kind"),
    # Set operations.
    ("(SELECT uid, n AS v FROM visits UNION ALL SELECT uid, age AS v FROM users)",
     "(SELECT uid, n AS v FROM visits UNION ALL SELECT uid, 1 AS v FROM pages)",
     "set-operation-mixed"),
    ("(SELECT uid, n AS v FROM visits UNION DISTINCT SELECT uid, age AS v FROM users)",
     "(SELECT uid, n AS v FROM visits UNION ALL SELECT age AS v, uid FROM users)",
     "set-operation-unit"),
    ("(SELECT uid, n AS v FROM visits EXCEPT DISTINCT SELECT uid, age AS v FROM users)",
     "(SELECT uid, n AS v FROM visits EXCEPT DISTINCT SELECT uid, 1 AS v FROM pages)",
     "set-operation-mixed"),
    ("(SELECT uid, n AS v FROM visits INTERSECT DISTINCT SELECT uid, age AS v FROM users)",
     "(SELECT uid, n AS v FROM visits INTERSECT DISTINCT SELECT age, uid FROM users)",
     "set-operation-unit"),
    ("(SELECT uid, n AS v FROM visits UNION ALL SELECT uid, age FROM users)",
     "(SELECT uid, n AS v FROM visits UNION ALL SELECT uid, age, age + 1 AS b FROM users)",
     "set-operation-columns"),
    ("(SELECT uid, n AS v FROM visits UNION ALL SELECT uid, age FROM users)",
     "(SELECT uid, n AS v FROM visits UNION ALL SELECT uid, dept FROM users)",
     "set-operation-columns"),
    # What depends on other units' rows, a clock or a random source.
    ("SELECT uid, n AS v FROM visits", "SELECT uid, n AS v FROM (SELECT * FROM visits LIMIT 5)",
     "limit"),
    ("SELECT uid, n AS v FROM (SELECT * FROM visits ORDER BY n) AS s",
     "SELECT uid, n AS v FROM (SELECT * FROM visits ORDER BY n LIMIT 5) AS s", "limit"),
    ("SELECT uid, n AS v FROM visits",
     "SELECT uid, n AS v FROM (SELECT * FROM visits ORDER BY n LIMIT 9 OFFSET 5) AS s", "limit"),
    ("SELECT v.uid, n AS v FROM visits AS v JOIN (SELECT DISTINCT page FROM pages) AS p "
     "ON p.page = v.page",
     "SELECT v.uid, n AS v FROM visits AS v JOIN (SELECT page FROM pages LIMIT 1) AS p "
     "ON p.page = v.page", "limit"),
    ("SELECT uid, n AS v FROM visits",
     "SELECT uid, n AS v FROM visits TABLESAMPLE SYSTEM (10 PERCENT)", "sample"),
    ("SELECT uid, n AS v FROM visits",
     "SELECT uid, n AS v FROM visits TABLESAMPLE RESERVOIR (10 ROWS)", "sample"),
    ("SELECT uid, n AS v FROM visits WHERE n < 5",
     "SELECT uid, n AS v FROM visits WHERE RAND() < 0.5", "nondeterministic"),
    ("SELECT uid, n AS v FROM visits WHERE day < DATE '2024-01-01'",
     "SELECT uid, n AS v FROM visits WHERE day < CURRENT_DATE()", "nondeterministic"),
    ("SELECT uid, n AS v FROM visits",
     "SELECT uid, n AS v FROM visits WHERE at < CURRENT_TIMESTAMP()", "nondeterministic"),
    ("SELECT uid, LENGTH(page) AS v FROM visits",
     "SELECT uid, LENGTH(GENERATE_UUID()) AS v FROM visits", "nondeterministic"),
    ("SELECT uid, n AS v FROM visits ORDER BY n",
     "SELECT uid, n AS v FROM visits ORDER BY RAND()", "nondeterministic"),
    ("SELECT uid, n + 1 AS v FROM visits",
     "SELECT uid, ROW_NUMBER() OVER (ORDER BY n) AS v FROM visits", "window"),
    ("SELECT uid, n + 1 AS v FROM visits", "SELECT uid, SUM(n) OVER () AS v FROM visits", "window"),
    ("SELECT uid, n + 1 AS v FROM visits",
     "SELECT uid, LAG(n) OVER (PARTITION BY n ORDER BY uid) AS v FROM visits", "window"),
    ("SELECT uid, n AS v FROM visits",
     "SELECT uid, n AS v FROM visits QUALIFY ROW_NUMBER() OVER (ORDER BY n) = 1", "window"),
    # Subqueries as values.
    ("SELECT uid, n AS v FROM visits WHERE n IN (1, 2)",
     "SELECT uid, n AS v FROM visits JOIN users USING (uid) WHERE n IN (SELECT age FROM users)",
     "join-without-unit"),
    ("SELECT uid, n AS v FROM visits WHERE n IN (SELECT uid FROM pages)",
     "SELECT v.uid, n AS v FROM visits AS v JOIN users AS u ON v.uid IN (SELECT uid FROM pages)",
     "join-without-unit"),
    ("SELECT uid, n AS v FROM visits WHERE n = 2",
     "SELECT uid, n AS v FROM visits WHERE EXISTS (SELECT 1 FROM users)", "subquery-expression"),
    ("SELECT uid, n AS v FROM visits WHERE n = 2",
     "SELECT uid, n AS v FROM visits WHERE n > (SELECT AVG(n) FROM visits)",
     "subquery-expression"),
    ("SELECT uid, n AS v FROM visits", "SELECT uid, (SELECT MAX(age) FROM users) AS v FROM visits",
     "subquery-expression"),
    ("SELECT uid, n AS v FROM visits",
     "SELECT uid, n AS v FROM visits WHERE n = ANY(SELECT age FROM users)", "subquery-expression"),
    *FORMS,
    # Names and forms.
    ("SELECT uid, n AS v FROM visits", "SELECT uid, n AS v FROM secrets", "unknown-table"),
    ("SELECT uid, n AS v FROM visits", "SELECT uid, n AS v FROM main.visits", "unknown-table"),
    ("SELECT uid, n AS v FROM visits", "SELECT uid, m AS v FROM visits", "unknown-column"),
    ("SELECT u.uid, n AS v FROM visits AS u JOIN users AS w ON w.uid = u.uid",
     "SELECT uid, n AS v FROM visits AS u JOIN users AS w ON w.uid = u.uid", "ambiguous-column"),
    ("SELECT uid, n AS v FROM visits", "SELECT uid, n AS v, n AS v FROM visits",
     "duplicate-column"),
    ("SELECT uid, ABS(n) AS v FROM visits", "SELECT uid, FARM_FINGERPRINT(page) AS v FROM visits",
     "function"),
    ("SELECT uid, ABS(n) AS v FROM visits", "SELECT uid, GETENV(page) AS v FROM visits",
     "function"),
    ("SELECT uid, ABS(n) AS v FROM visits",
     "SELECT uid, 1 AS v FROM READ_CSV('/etc/passwd')", "function"),
    ("SELECT uid, n AS v FROM visits", "SELECT uid, x AS v FROM visits, UNNEST([n, 2]) AS x",
     "lateral"),
    ("SELECT uid, CAST(page AS INT64) AS v FROM visits",
     "SELECT uid, CAST(page AS JSON) AS v FROM visits", "function"),
    ("SELECT uid, EXTRACT(YEAR FROM day) AS v FROM visits",
     "SELECT uid, EXTRACT(MICROSECOND FROM day) AS v FROM visits", "function"),
    ("SELECT uid, EXTRACT(YEAR FROM day) AS v FROM visits",
     "SELECT uid, EXTRACT(DAY FROM DATE(at, 'Foo/Bar')) AS v FROM visits", "time-zone"),
    ("SELECT uid, EXTRACT(YEAR FROM day) AS v FROM visits",
     "SELECT uid, EXTRACT(DAY FROM DATE(at, page)) AS v FROM visits", "time-zone"),
    ("SELECT uid, EXTRACT(YEAR FROM day) AS v FROM visits",
     "SELECT uid, EXTRACT(DAY FROM TIMESTAMP_TRUNC(at, MONTH, 'Foo/Bar')) AS v FROM visits",
     "time-zone"),
    ("SELECT uid, EXTRACT(YEAR FROM day) AS v FROM visits",
     "SELECT uid, EXTRACT(DAY FROM at AT TIME ZONE 'Foo/Bar') AS v FROM visits", "time-zone"),
    # Numbers of files that declare their signs.
    (f"{_SIGNED} CAST(TRIM(d.dept) AS INT64) AS v {_DEPTS}",
     f"{_SIGNED} CAST((d.dept) AS INT64) AS v {_DEPTS}", "number-signs"),
    (f"{_SIGNED} d.floor AS v {_DEPTS} WHERE SAFE_CAST(d.floor AS FLOAT64) > 3",
     f"{_SIGNED} d.floor AS v {_DEPTS} WHERE SAFE_CAST(d.dept AS FLOAT64) > 3", "number-signs"),
    (f"SELECT uid, EXTRACT(DAY FROM CAST(p AS DATE)) AS v FROM ({_SIGNED} d.dept AS p {_DEPTS})",
     "SELECT uid, CAST(CAST(p AS NUMERIC) AS INT64) AS v FROM (SELECT uid, page AS p FROM visits "
     f"UNION ALL {_SIGNED} d.dept AS p {_DEPTS})", "number-signs"),
]  # fmt: skip
_OK = f"{DP} dept, COUNT(*) AS k FROM users GROUP BY dept"


def _with(options: str) -> str:
    return (f"SELECT WITH DIFFERENTIAL_PRIVACY OPTIONS({options}) dept, COUNT(*) AS k "
            "FROM users GROUP BY dept")  # fmt: skip


def _sel(items: str, rest: str = "FROM users GROUP BY dept") -> str:
    return f"{DP} {items} {rest}"


_PUBLIC = ("SELECT WITH DIFFERENTIAL_PRIVACY OPTIONS(epsilon = 1, delta = 1e-9, "
           "max_groups_contributed = 3, group_selection_strategy = PUBLIC_GROUPS) ")  # fmt: skip
_PUB = (_PUBLIC + "p.dept, COUNT(*) AS k FROM users AS u RIGHT JOIN (SELECT DISTINCT dept "
        "FROM depts) AS p ON u.dept = p.dept GROUP BY p.dept")  # fmt: skip
#: Whole statements: (accepted, refused, rule).
STATEMENTS: list[tuple[str, str, str]] = [
    # Form.
    (_OK, "SELECT dept FROM depts", "no-dp-select"),
    (_OK, _OK + "; " + _OK, "one-statement"),
    (_OK, "DROP TABLE users", "select-only"),
    (_OK, "ATTACH 'x.db'", "select-only"),
    (_OK, "COPY users TO 'x.csv'", "select-only"),
    (_OK, "PRAGMA version", "select-only"),
    (_OK, "INSERT INTO users SELECT * FROM users", "select-only"),
    (_OK, "", "one-statement"),
    (_OK, _OK + " )", "syntax"),
    (_OK, f"{DP} dept, COUNT(* FROM users", "syntax"),
    (_OK, _OK + " WHERE dept = 'unclosed", "syntax"),
    (_OK, f"{DP} COUNT(*) AS k", "from"),
    (_OK, "(" * 300 + _OK + ")" * 300, "too-large"),
    (_OK, _OK + " HAVING " + " AND ".join(["k > 1"] * 3_000), "too-large"),
    (f"SELECT a.k, b.k AS j FROM ({_OK}) AS a JOIN ({_OK.replace('dept', 'age')}) AS b ON TRUE",
     f"{DP} k, COUNT(*) AS z FROM ({_OK} UNION ALL {_OK}) AS a GROUP BY k", "one-dp-select"),
    (_OK, f"{DP} k, COUNT(*) AS z FROM ({_OK}) AS a GROUP BY k", "one-dp-select"),
    (_OK, f"{DP} DISTINCT dept, COUNT(*) AS k FROM users GROUP BY dept", "not-supported"),
    (f"WITH a AS (SELECT * FROM users) {DP} dept, COUNT(*) AS k FROM a GROUP BY dept",
     f"WITH RECURSIVE a AS (SELECT * FROM users) {DP} dept, COUNT(*) AS k FROM a GROUP BY dept",
     "recursive"),
    # Options.
    (_OK, _with("delta = 1e-9, max_groups_contributed = 3"), "epsilon"),
    (_OK, _with("epsilon = 0, delta = 1e-9, max_groups_contributed = 3"), "epsilon"),
    (_OK, _with("epsilon = -1, delta = 1e-9, max_groups_contributed = 3"), "epsilon"),
    (_OK, _with("epsilon = 1001, delta = 1e-9, max_groups_contributed = 3"), "epsilon"),
    (_OK, _with("epsilon = '1', delta = 1e-9, max_groups_contributed = 3"), "epsilon"),
    (_OK, _with("epsilon = 1e999, delta = 1e-9, max_groups_contributed = 3"), "epsilon"),
    (_OK, _with("epsilon = 1, max_groups_contributed = 3"), "delta"),
    (_OK, _with("epsilon = 1, delta = 0, max_groups_contributed = 3"), "delta"),
    (_OK, _with("epsilon = 1, delta = 1, max_groups_contributed = 3"), "delta"),
    (_OK, _with("epsilon = 1, delta = 0.02, max_groups_contributed = 3"), "large-delta"),
    (_with("epsilon = 1, delta = 0.02, allow_large_delta = TRUE, max_groups_contributed = 3"),
     _with("epsilon = 1, delta = 0.02, allow_large_delta = FALSE, max_groups_contributed = 3"),
     "large-delta"),
    (_OK, _with("epsilon = 1, delta = 1e-9, allow_large_delta = 1, max_groups_contributed = 3"),
     "allow-large-delta"),
    (_OK, _with("epsilon = 1, delta = 1e-9"), "max-groups"),
    (_OK, _with("epsilon = 1, delta = 1e-9, max_groups_contributed = 0"), "max-groups"),
    (_OK, _with("epsilon = 1, delta = 1e-9, max_groups_contributed = -3"), "max-groups"),
    (_OK, _with("epsilon = 1, delta = 1e-9, max_groups_contributed = 1.5"), "max-groups"),
    (_OK, _with("epsilon = 1, delta = 1e-9, max_groups_contributed = NULL"), "max-groups"),
    (_OK, _with("epsilon = 1, delta = 1e-9, max_groups_contributed = 99999999999999999999"),
     "max-groups"),
    (_OK, _with("epsilon = 1, delta = 1e-9, max_groups_contributed = 3, "
                "max_rows_contributed = 0"), "max-rows"),
    (_OK, _with("epsilon = 1, delta = 1e-9, max_groups_contributed = 3, kappa = 3"),
     "option-twice"),
    (_with("epsilon = 1, delta = 1e-9, kappa = 3"),
     _with("epsilon = 1, delta = 1e-9, k_threshold = 3"), "option-unknown"),
    (_OK, _with("epsilon = 1, epsilon = 2, delta = 1e-9, max_groups_contributed = 3"),
     "option-twice"),
    (_OK, _with("epsilon = 1, delta = 1e-9, max_groups_contributed = 3, "
                "privacy_unit_column = age"), "unit-column"),
    (_with("epsilon = 1, delta = 1e-9, max_groups_contributed = 3, privacy_unit_column = uid"),
     _with("epsilon = 1, delta = 1e-9, max_groups_contributed = 3, privacy_unit_column = 3"),
     "unit-column"),
    (_with("epsilon = 1, max_groups_contributed = 3, delta = 1e-9, mechanism = geometric"),
     _with("epsilon = 1, max_groups_contributed = 3, delta = 1e-9, mechanism = cauchy"),
     "mechanism"),
    (_with("epsilon = 1, max_groups_contributed = 3, delta = 1e-9, optimise = limit"),
     _with("epsilon = 1, max_groups_contributed = 3, delta = 1e-9, optimise = best"), "optimise"),
    (_with("epsilon = 1, max_groups_contributed = 3, delta = 1e-9, "
           "min_privacy_units_per_group = 9"),
     _with("epsilon = 1, max_groups_contributed = 3, delta = 1e-9, "
           "min_privacy_units_per_group = 0"), "min-units"),
    (_with("epsilon = 1, max_groups_contributed = 3, delta = 1e-9, "
           "group_selection_strategy = LAPLACE_THRESHOLD"),
     _with("epsilon = 1, max_groups_contributed = 3, delta = 1e-9, "
           "group_selection_strategy = MINE"), "selection"),
    (_with("epsilon = 1, delta = 1e-9, contribution_norm = 8"),
     _with("epsilon = 1, delta = 1e-9, contribution_norm = 8, max_groups_contributed = 5000"),
     "max-groups"),
    (_with("epsilon = 1, delta = 1e-9, contribution_norm = 8"),
     _with("epsilon = 1, delta = 1e-9, contribution_norm = 8, mechanism = geometric"), "norm"),
    (_sel("dept, COUNT(*, contribution_norm => 8) AS k"),
     _sel("dept, COUNT(*, contribution_norm => 8) AS k, SUM(age) AS s"), "norm"),
    # The select list.
    (_OK, _sel("dept, age, COUNT(*) AS k"), "not-grouped"),
    (_OK, _sel("uid, COUNT(*) AS k"), "not-grouped"),
    (_OK, _sel("dept, COUNT(*) AS k", "FROM users GROUP BY dept ORDER BY age"), "not-grouped"),
    (_OK, _sel("dept, COUNT(*) AS k", "FROM users GROUP BY dept HAVING age > 1"), "not-grouped"),
    (_OK, _sel("SUM(age) + 1 AS k, dept", "FROM users"), "not-grouped"),
    (_sel("COUNT(*) AS k", "FROM users"), _sel("1 AS k", "FROM users"), "no-function"),
    (_OK, _sel("*", "FROM users"), "not-grouped"),
    (_OK, _sel("uid, COUNT(*) AS k", "FROM users GROUP BY uid"), "group-by-unit"),
    (_OK, _sel("dept, COUNT(*) AS k", "FROM users GROUP BY dept, uid"), "group-by-unit"),
    (_OK, _sel("score, COUNT(*) AS k", "FROM users GROUP BY score"), "group-type"),
    (_sel("CAST(score AS INT64) AS g, COUNT(*) AS k", "FROM users GROUP BY g"),
     _sel("score * 2 AS g, COUNT(*) AS k", "FROM users GROUP BY g"), "group-type"),
    (_OK, _sel("COUNT(*) AS k", "FROM users GROUP BY 'x'"), "group-constant"),
    (_sel("dept, COUNT(DISTINCT score) AS k"), _sel("dept, COUNT(DISTINCT uid, age) AS k"),
     "arguments"),
    (_OK, _sel("dept, SUM(DISTINCT age) AS k"), "arguments"),
    (_OK, _sel("dept, SUM(COUNT(*)) AS k"), "nested-aggregate"),
    (_sel("dept, SUM(age) AS k"), _sel("dept, SUM(dept) AS k"), "numbers"),
    (_sel("dept, COUNTIF(age > 3, contribution_bounds_per_group => (0, 2)) AS k"),
     _sel("dept, LOGICAL_OR(age > 3) AS k"), "dp-aggregate"),
    (_OK, _sel("dept, STRING_AGG(dept) AS k"), "inner-aggregate"),
    (_OK, _sel("dept, COUNT(*) AS dept"), "duplicate-column"),
    (_sel("dept, SUM(age, contribution_bounds_per_group => (0, 9)) AS s"),
     _sel("dept, SUM(age, contribution_bounds_per_group => (9, 0)) AS s"), "bounds"),
    (_sel("dept, SUM(age, contribution_bounds_per_group => (0, 9)) AS s"),
     _sel("dept, SUM(age, contribution_bounds_per_group => (0, age)) AS s"), "bounds"),
    (_sel("dept, SUM(age, contribution_bounds_per_row => (0, 9)) AS s"),
     _sel("dept, SUM(age, contribution_bounds_per_row => (0, 9), "
          "contribution_bounds_per_group => (0, 9)) AS s"), "bounds"),
    (_sel("dept, COUNT(*, contribution_bounds_per_group => (-3, 0)) AS s"),
     _sel("dept, COUNT(DISTINCT age, contribution_bounds_per_group => (-3, 0)) AS s"),
     "count-bounds"),
    (_sel("dept, SUM(age, report_format => 'JSON') AS s"),
     _sel("dept, SUM(age, report_format => 'XML') AS s"), "report"),
    (_sel("dept, ANON_SUM(age WITH REPORT(FORMAT = PROTO)) AS s"),
     _sel("dept, ANON_SUM(age WITH REPORT(FORMAT = CSV)) AS s"), "report"),
    (_sel("dept, COUNT(*, contribution_bounds_per_group => (0, 9)) AS s"),
     _sel("dept, COUNT(*, contribution_bounds_per_group => (0, 9.5)) AS s"), "count-bounds"),
    (_sel("dept, ANON_SUM(age CLAMPED BETWEEN 0 AND 9) AS s"),
     _sel("dept, ANON_SUM(age CLAMPED BETWEEN 0 AND age) AS s"), "bounds"),
    (_sel("dept, SUM(age) AS s"), _sel("dept, SUM(age, bounds => (0, 9)) AS s"), "arguments"),
    (_sel("dept, MEDIAN(age) AS s"),
     _sel("dept, MEDIAN(age, contribution_bounds_per_group => (0, 9)) AS s"), "arguments"),
    (_sel("dept, PERCENTILE_CONT(age, 0.5) AS s"), _sel("dept, PERCENTILE_CONT(age, 1.5) AS s"),
     "quantile"),
    (_sel("dept, APPROX_QUANTILES(age, 4) AS s"), _sel("dept, APPROX_QUANTILES(age, 0) AS s"),
     "quantile"),
    (_sel("dept, ANON_NTILE(age, 0.9, 0, 100) AS s"), _sel("dept, ANON_NTILE(age) AS s"),
     "arguments"),
    (_OK, f"{DP} floor, COUNT(*) AS k FROM depts GROUP BY floor", "no-private-table"),
    # What surrounds the private SELECT.
    (f"SELECT r.k FROM ({_OK}) AS r JOIN depts AS d ON d.dept = r.dept",
     f"SELECT r.k FROM ({_OK}) AS r JOIN users AS d ON d.dept = r.dept", "private-outside"),
    (f"SELECT k / 2 AS h FROM ({_OK}) AS r ORDER BY h LIMIT 3",
     f"SELECT k / 2 AS h FROM ({_OK}) AS r UNION ALL SELECT age FROM users", "private-outside"),
    (f"SELECT MAX(k) AS m FROM ({_OK}) AS r", f"SELECT ANON_SUM(k) AS m FROM ({_OK}) AS r",
     "dp-function-outside"),
    # Public groups.
    (_PUB, _PUB.replace("RIGHT JOIN", "JOIN"), "public-groups"),
    (_PUB.replace("DISTINCT", ""), _PUB.replace("DISTINCT", "floor,"), "public-groups"),
    (_PUB, _PUB.replace("GROUP BY", "WHERE p.dept <> 'x' GROUP BY"), "public-filter"),
    (_PUB, _PUB.replace("ON u.dept = p.dept", "ON u.dept = p.dept AND u.age > 3"),
     "public-groups"),
    (_PUB, _PUB.replace("GROUP BY p.dept", "GROUP BY p.dept, u.age"), "public-groups"),
    (_PUB, _PUB.replace("FROM depts", "FROM users"), "public-groups"),
    (_PUB.replace("(SELECT DISTINCT dept FROM depts) AS p ON u.dept = p.dept", "depts AS p "
                  "USING (dept)"),
     _PUB.replace("(SELECT DISTINCT dept FROM depts) AS p ON u.dept = p.dept", "users AS p "
                  "USING (dept)"), "public-groups"),
    (_PUB.replace("(SELECT DISTINCT dept FROM depts) AS p ON u.dept = p.dept",
                  "UNNEST(['a', 'b', 'z']) AS p ON u.dept = p").replace("p.dept", "p"),
     _PUB.replace("(SELECT DISTINCT dept FROM depts) AS p ON u.dept = p.dept",
                  "UNNEST([u.dept, 'z']) AS p ON u.dept = p").replace("p.dept", "p"), "lateral"),
    (_PUB, _PUBLIC + "dept, COUNT(*) AS k FROM users GROUP BY dept", "public-groups"),
    (_PUBLIC + "p.dept, COUNT(*) AS k FROM (SELECT DISTINCT dept FROM depts) AS p LEFT JOIN users "
     "AS u ON u.dept = p.dept GROUP BY p.dept",
     _PUBLIC + "p.dept, COUNT(*) AS k FROM (SELECT DISTINCT dept FROM depts) AS p FULL JOIN users "
     "AS u ON u.dept = p.dept GROUP BY p.dept", "public-groups"),
]  # fmt: skip
#: All of them: (accepted, refused, rule).
PAIRS = [
    *((around.format(good), around.format(bad), rule) for good, bad, rule in RELATIONS
      for around in AROUND),
    *STATEMENTS, *WITHIN,
]  # fmt: skip


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

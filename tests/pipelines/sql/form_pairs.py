"""Pairs of relations: joins by a key, forms that mean the same as a join, windows of one unit.

As in `pairs`: (accepted, refused, rule).
"""

FORMS: list[tuple[str, str, str]] = [
    # Joins by a declared key.
    ("SELECT o.uid, i.qty AS v FROM orders AS o JOIN items AS i ON o.order_id = i.order_id",
     "SELECT o.uid, i.qty AS v FROM orders AS o JOIN items AS i ON o.order_id = i.line",
     "join-without-unit"),
    ("SELECT i.uid, i.qty AS v FROM items AS i JOIN items AS j ON i.order_id = j.order_id",
     "SELECT i.uid, i.qty AS v FROM items AS i JOIN items AS j ON i.product = j.product",
     "join-without-unit"),
    ("SELECT u.uid, 1 AS v FROM users AS u JOIN orders AS o ON u.uid = o.customer_id",
     "SELECT u.uid, 1 AS v FROM users AS u JOIN orders AS o ON u.uid = o.order_id",
     "join-without-unit"),
    ("SELECT o.uid, 1 AS v FROM orders AS o JOIN items AS i ON o.uid = i.uid",
     "SELECT o.uid, 1 AS v FROM orders AS o JOIN items AS i ON o.order_id = i.order_id + 0",
     "join-without-unit"),
    # Windows of one unit, in an order without ties but of equal rows.
    ("SELECT uid, ROW_NUMBER() OVER (PARTITION BY uid ORDER BY n) AS v FROM visits",
     "SELECT uid, ROW_NUMBER() OVER (PARTITION BY page ORDER BY n) AS v FROM visits", "window"),
    ("SELECT uid, RANK() OVER (PARTITION BY page, uid ORDER BY seconds DESC) AS v FROM visits",
     "SELECT uid, RANK() OVER (ORDER BY seconds) AS v FROM visits", "window"),
    ("SELECT uid, LAG(n) OVER (PARTITION BY uid ORDER BY seconds) AS v FROM visits",
     "SELECT uid, LAG(n) OVER (PARTITION BY uid + 0 ORDER BY seconds) AS v FROM visits", "window"),
    ("SELECT uid, LEAD(n, 2) OVER (PARTITION BY uid ORDER BY day DESC, seconds) AS v FROM visits",
     "SELECT uid, LEAD(n, 2) OVER (PARTITION BY uid) AS v FROM visits", "window-order"),
    ("SELECT uid, FIRST_VALUE(n) OVER (PARTITION BY uid ORDER BY day) AS v FROM visits",
     "SELECT uid, FIRST_VALUE(n) OVER (PARTITION BY day ORDER BY uid) AS v FROM visits", "window"),
    ("SELECT uid, v FROM (SELECT uid, n AS v, ROW_NUMBER() OVER (PARTITION BY uid ORDER BY page) "
     "AS k FROM visits) AS r WHERE k <= 2",
     "SELECT uid, n AS v FROM visits WHERE ROW_NUMBER() OVER (PARTITION BY uid ORDER BY n) = 1",
     "window"),
    ("SELECT uid, CAST(SUM(n) OVER (PARTITION BY uid) AS INT64) AS v FROM visits",
     "SELECT uid, CAST(SUM(seconds) OVER (PARTITION BY uid) AS INT64) AS v FROM visits",
     "window-sum"),
    ("SELECT a.uid, COUNT(*) OVER (PARTITION BY b.uid) AS v FROM users AS a JOIN visits AS b "
     "ON a.uid = b.uid",
     "SELECT a.uid, COUNT(*) OVER (PARTITION BY b.uid) AS v FROM users AS a LEFT JOIN visits AS b "
     "ON a.uid = b.uid", "window"),
    ("SELECT uid, COUNT(*) OVER (PARTITION BY uid ORDER BY n ROWS BETWEEN 1 PRECEDING AND CURRENT "
     "ROW) AS v FROM visits",
     "SELECT uid, COUNT(*) OVER (PARTITION BY uid, seconds) AS v FROM visits", "group-type"),
    ("SELECT uid, LAG(n, 2, 0) OVER (PARTITION BY uid ORDER BY seconds) AS v FROM visits",
     "SELECT uid, LAG(n, n) OVER (PARTITION BY uid ORDER BY seconds) AS v FROM visits",
     "window-frame"),
    ("SELECT uid, LEAD(n, 1, n) OVER (PARTITION BY uid ORDER BY seconds) AS v FROM visits",
     "SELECT uid, LEAD(n, 1, page) OVER (PARTITION BY uid ORDER BY seconds) AS v FROM visits",
     "window-frame"),
    ("SELECT uid, LENGTH(CAST(LAG(cost, 1) OVER (PARTITION BY uid ORDER BY n) AS STRING)) AS v "
     "FROM visits",
     "SELECT uid, LENGTH(CAST(LAG(cost, 1, CAST(seconds AS NUMERIC)) OVER (PARTITION BY uid ORDER "
     "BY n) AS STRING)) AS v FROM visits", "window-frame"),
    ("SELECT uid, COUNT(*) OVER (PARTITION BY uid ORDER BY n ROWS BETWEEN 2 PRECEDING AND 1 "
     "FOLLOWING) AS v FROM visits",
     "SELECT uid, COUNT(*) OVER (PARTITION BY uid ORDER BY n ROWS BETWEEN n PRECEDING AND CURRENT "
     "ROW) AS v FROM visits",
     "window-frame"),
    ("SELECT uid, COUNT(*) OVER (PARTITION BY uid ORDER BY n RANGE BETWEEN CURRENT ROW AND "
     "UNBOUNDED FOLLOWING) AS v FROM visits",
     "SELECT uid, COUNT(*) OVER (PARTITION BY uid ORDER BY n RANGE BETWEEN CURRENT ROW AND 1 "
     "FOLLOWING) AS v FROM visits", "window-frame"),
    ("SELECT uid, age AS v FROM users WHERE uid IN (SELECT uid FROM (SELECT uid, ROW_NUMBER() OVER "
     "(PARTITION BY uid ORDER BY seconds) AS k FROM visits) AS r WHERE k = 2)",
     "SELECT uid, age AS v FROM users WHERE uid IN (SELECT uid FROM (SELECT uid, RANK() OVER "
     "(ORDER BY seconds) AS k FROM visits) AS r WHERE k = 2)", "window"),
    # Subqueries in expressions.
    ("SELECT uid, age AS v FROM users AS u WHERE EXISTS (SELECT 1 FROM visits AS w WHERE w.uid = "
     "u.uid AND w.n > 1)",
     "SELECT uid, age AS v FROM users AS u WHERE EXISTS (SELECT 1 FROM visits AS w WHERE w.n = "
     "u.age)", "join-without-unit"),
    ("SELECT uid, age AS v FROM users AS u WHERE NOT EXISTS (SELECT * FROM visits AS w WHERE "
     "u.uid = w.uid AND w.page = u.dept)",
     "SELECT uid, age AS v FROM users AS u WHERE NOT EXISTS (SELECT * FROM visits AS w WHERE "
     "w.uid <> u.uid)", "subquery-expression"),
    ("SELECT uid, age AS v FROM users WHERE uid IN (SELECT uid FROM visits WHERE n > 1)",
     "SELECT uid, age AS v FROM users WHERE uid NOT IN (SELECT uid FROM visits WHERE n > 1)",
     "subquery-expression"),
    ("SELECT uid, age AS v FROM users WHERE uid IN (SELECT uid FROM visits GROUP BY uid HAVING "
     "COUNT(*) > 3)",
     "SELECT uid, age AS v FROM users WHERE uid IN (SELECT n FROM visits)", "join-without-unit"),
    ("SELECT uid, IF(EXISTS (SELECT 1 FROM visits AS w WHERE w.uid = u.uid), 1, 0) AS v "
     "FROM users AS u",
     "SELECT uid, IF(EXISTS (SELECT 1 FROM visits AS w), 1, 0) AS v FROM users AS u",
     "subquery-expression"),
    ("SELECT o.uid, 1 AS v FROM orders AS o WHERE EXISTS (SELECT 1 FROM items AS i WHERE "
     "i.order_id = o.order_id)",
     "SELECT o.uid, 1 AS v FROM orders AS o WHERE EXISTS (SELECT 1 FROM items AS i WHERE "
     "i.line = o.order_id)", "join-without-unit"),
    ("SELECT uid, n AS v FROM visits WHERE page NOT IN (SELECT page FROM pages WHERE weight > 0)",
     "SELECT weight AS uid, 1 AS v FROM pages AS p WHERE EXISTS (SELECT 1 FROM visits AS w "
     "WHERE w.page = p.page)", "subquery-expression"),
    ("SELECT uid, n AS v FROM visits WHERE EXISTS (SELECT 1 FROM pages WHERE pages.page = "
     "visits.page AND pages.uid > 3)",
     "SELECT uid, n AS v FROM visits WHERE n > (SELECT AVG(n) FROM visits)",
     "subquery-expression"),
    ("SELECT uid, (SELECT MAX(floor) FROM depts) + n AS v FROM visits",
     "SELECT uid, (SELECT MAX(age) FROM users AS u WHERE u.uid = w.uid) AS v FROM visits AS w",
     "subquery-expression"),
    ("SELECT uid, CASE WHEN page IN (SELECT dept FROM depts) THEN 1 ELSE 0 END AS v FROM visits",
     "SELECT uid, CASE WHEN uid IN (SELECT uid FROM users) THEN 1 ELSE 0 END AS v FROM visits",
     "subquery-expression"),
    # Functions of a row.
    ("SELECT uid, CAST(flag AS INT64) AS v FROM visits",
     "SELECT uid, CAST(CAST(flag AS FLOAT64) AS INT64) AS v FROM visits", "cast"),
    ("SELECT uid, EXTRACT(DAY FROM DATE(`at`, 'Europe/Berlin')) AS v FROM visits",
     "SELECT uid, EXTRACT(HOUR FROM at AT TIME ZONE page) AS v FROM visits", "time-zone"),
    ("SELECT uid, LENGTH(REGEXP_EXTRACT(page, 'a(.)')) AS v FROM visits",
     "SELECT uid, LENGTH(REGEXP_EXTRACT(page, page)) AS v FROM visits", "function"),
    ("SELECT uid, EXTRACT(DAY FROM DATE_TRUNC(day, WEEK(MONDAY))) AS v FROM visits",
     "SELECT uid, EXTRACT(DAY FROM DATE_TRUNC(day, WEEK(page))) AS v FROM visits", "function"),
    ("SELECT uid, CAST(FORMAT_DATE('%Y%m', day) AS INT64) AS v FROM visits",
     "SELECT uid, CAST(FORMAT_DATE(page, day) AS INT64) AS v FROM visits", "function"),
    # Floats that lose duplicates, or are compared with others.
    ("SELECT uid, 1 AS v FROM (SELECT DISTINCT uid, seconds FROM visits) AS d",
     "SELECT uid, 1 AS v FROM (SELECT uid, seconds FROM visits GROUP BY uid, seconds) AS d",
     "group-type"),
    ("SELECT uid, n AS v FROM (SELECT uid, n, seconds FROM visits INTERSECT ALL SELECT uid, n, "
     "seconds FROM visits WHERE flag) AS d",
     "SELECT uid, n AS v FROM (SELECT uid, n, seconds FROM visits INTERSECT ALL SELECT n, uid, "
     "seconds FROM visits WHERE flag) AS d", "set-operation-unit"),
    ("SELECT uid, LENGTH(CAST(s AS STRING)) AS v FROM (SELECT uid, seconds * 0 AS s FROM visits "
     "UNION DISTINCT SELECT uid, 0 - score * 0 FROM users) AS d",
     "SELECT uid, LENGTH(CAST(s AS STRING)) AS v FROM (SELECT uid, seconds * 0 AS s FROM visits "
     "UNION DISTINCT SELECT uid, weight FROM pages) AS d", "set-operation-mixed"),
    ("SELECT uid, LENGTH(CAST(s AS STRING)) AS v FROM (SELECT DISTINCT uid, seconds * 0 AS s FROM "
     "visits) AS d",
     "SELECT uid, LENGTH(CAST(s AS STRING)) AS v FROM (SELECT DISTINCT seconds * 0 AS s, page "
     "FROM visits) AS d", "unit-not-selected"),
    ("SELECT uid, age AS v FROM users WHERE uid IN (SELECT uid FROM visits EXCEPT ALL SELECT uid "
     "FROM orders)",
     "SELECT uid, age AS v FROM users WHERE uid IN (SELECT uid FROM visits EXCEPT ALL SELECT uid "
     "FROM pages)", "set-operation-mixed"),
    # Other spellings.
    ("SELECT a.uid, b.n AS v FROM users AS a, visits AS b WHERE a.uid = b.uid AND b.n > 1",
     "SELECT a.uid, b.n AS v FROM users AS a, visits AS b RIGHT JOIN orders AS o ON o.uid = b.uid "
     "WHERE a.uid = b.uid", "join-without-unit"),
    ("SELECT a.uid, b.n AS v FROM users AS a JOIN (visits AS b JOIN orders AS o ON b.uid = o.uid) "
     "ON a.uid = b.uid",
     "SELECT a.uid, b.n AS v FROM users AS a JOIN (visits AS b JOIN orders AS o ON b.uid = o.uid) "
     "ON a.age = b.n", "join-without-unit"),
    ("SELECT uid, n AS v FROM (users JOIN visits USING (uid))",
     "SELECT uid, n AS v FROM users JOIN (visits LEFT JOIN pages ON TRUE) USING (uid)",
     "join-kind"),
    ("SELECT a.uid, b.n AS v FROM users AS a JOIN visits AS b ON a.uid IS NOT DISTINCT FROM b.uid",
     "SELECT c.uid, c.n AS v FROM users AS a LEFT JOIN visits AS b ON a.uid = b.uid JOIN visits "
     "AS c ON b.uid IS NOT DISTINCT FROM c.uid", "join-without-unit"),
    ("SELECT (uid) AS uid, x AS v FROM visits, UNNEST([1, 2, -3]) AS x",
     "SELECT (uid + 0) AS uid, x AS v FROM visits, UNNEST([1, 2]) AS x", "unit-not-selected"),
    ("SELECT uid, one AS v FROM visits CROSS JOIN (SELECT 1 AS one)",
     "SELECT uid, one AS v FROM visits RIGHT JOIN (SELECT 1 AS one) AS o ON n = one",
     "outer-join-public"),
    ("SELECT uid, COUNTIF(n IN UNNEST([1, 2])) AS v FROM visits GROUP BY uid",
     "SELECT uid, SUM(n) FILTER (WHERE n > 1) AS v FROM visits GROUP BY page",
     "group-without-unit"),
]  # fmt: skip

_WITHIN = "SELECT WITH DIFFERENTIAL_PRIVACY OPTIONS({} FROM users"
#: Statements that state their error.
WITHIN = [
    (_WITHIN.format(good), _WITHIN.format(bad), rule)
    for good, bad, rule in (
        ("within = 40) COUNT(DISTINCT uid)", "within = 40, epsilon = 1) COUNT(DISTINCT uid)",
         "within"),
        ("within = 1) COUNT(DISTINCT uid)", "within = 0) COUNT(DISTINCT uid)", "within"),
        ("within = 1) COUNT(DISTINCT uid)", "within = -1) COUNT(DISTINCT uid)", "within"),
        ("within = 1) COUNT(DISTINCT uid)", "within = '1') COUNT(DISTINCT uid)", "within"),
        ("epsilon = 1) SUM(age, contribution_bounds_per_group => (0, 9))",
         "within = 4) SUM(age, contribution_bounds_per_group => (0, 9))", "within"),
        ("delta = 1e-9) COUNT(DISTINCT uid, within => 4)",
         "delta = 1e-9) COUNT(DISTINCT uid, within => 'x')", "within"),
        ("within = 40) COUNT(*, contribution_bounds_per_group => (0, 9))",
         "within = 40) COUNT(*)", "within-bounds"),
        ("delta = 1e-9) SUM(age, contribution_bounds_per_group => (0, 9), within => 2)",
         "delta = 1e-9) SUM(age, within => 2)", "within-bounds"),
        ("epsilon = 1) AVG(age, contribution_bounds_per_row => (0, 9))",
         "delta = 1e-9) AVG(age, contribution_bounds_per_row => (0, 9), within => 2)",
         "within-bounds"),
    )
]  # fmt: skip

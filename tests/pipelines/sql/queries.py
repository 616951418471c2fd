"""Queries over three tables, generated from a seed: relations of the validator's whole language.

Every relation gives ``uid``, a whole number ``v``, a float ``w`` and a text ``g``.
"""

import random

_TABLES = (
    "SELECT uid, age AS v, score AS w, dept AS g FROM users",
    "SELECT uid, n AS v, seconds AS w, page AS g FROM visits",
    "SELECT uid, EXTRACT(MONTH FROM day) AS v, CAST(cost AS FLOAT64) AS w, page AS g FROM visits",
    "SELECT customer_id AS uid, order_id AS v, price AS w, CAST(day AS STRING) AS g FROM orders",
    "SELECT uid, qty AS v, qty / line AS w, product AS g FROM items",
    "SELECT o.uid, i.qty AS v, o.price * i.qty AS w, i.product AS g FROM orders AS o "
    "JOIN items AS i ON o.order_id = i.order_id",
)
_CONDITIONS = (
    "v > 1", "w < 3.5", "g IS NOT NULL", "v / (v - 2) > 0.5", "CAST(g AS INT64) > 0", "v * 9 < 40",
    "g LIKE '%a%' OR w > 0", "NOT v = 3", "LENGTH(g) = 1 AND v BETWEEN 0 AND 4", "MOD(v, 3) = 1",
)  # fmt: skip
_INTEGERS = ("v", "v + 1", "v * v", "DIV(v, 2)", "CAST(g AS INT64)", "IF(w > 0, v, -v)",
             "COALESCE(v, 7)", "CAST(w AS INT64)", "v * 4611686018427387904")  # fmt: skip
_FLOAT = ("w", "w / v", "w * 10", "SQRT(w)", "v / 3", "LN(w)", "w + 1e300 * w", "1 / w",
          "CAST(g AS FLOAT64)")  # fmt: skip
_TEXT = ("g", "CONCAT(g, 'x')", "UPPER(g)", "CAST(v AS STRING)", "SUBSTR(g, 1, 1)",
         "IF(v > 2, g, NULL)")  # fmt: skip
_OVER_G = ("COUNT(*)", "MAX(v)", "COUNT(DISTINCT g)", "COUNTIF(w > 0)", "MIN(v)")
_OVER_W = ("SUM(w)", "AVG(w)", "MIN(w)", "MAX(w)", "SUM(w) / COUNT(w)", "SUM(w * w)", "AVG(v)")
_FUNCTIONS = (
    "COUNT(*)", "COUNT(w)", "COUNT(DISTINCT {r}.uid)", "SUM({r}.w)",
    "SUM({r}.w, contribution_bounds_per_row => (-5, 10))", "AVG({r}.w)",
    "AVG({r}.v, contribution_bounds_per_row => (-5, 10))", "MEDIAN({r}.w)", "VAR({r}.v)",
    "SUM({r}.v / {r}.w)",
)  # fmt: skip


class _Writer:
    def __init__(self, seed: int) -> None:
        self.draw = random.Random(seed)
        self.names = iter(f"t{i}" for i in range(1_000))

    def relation(self, tables: int, depth: int = 2) -> str:
        """A relation of so many tables."""
        if tables > 1:
            left = self.draw.randint(1, tables - 1)
            made = self.together(self.relation(left, 1), self.relation(tables - left, 1))
        else:
            made = self.draw.choice(_TABLES)
        for _ in range(self.draw.randint(0, depth)):
            made = self.draw.choice((self.filtered, self.projected, self.grouped, self.distinct,
                                     self.published))(made)  # fmt: skip
        return made

    def together(self, left: str, right: str) -> str:
        a, b = next(self.names), next(self.names)
        kind = self.draw.choice(("JOIN", "LEFT JOIN", "RIGHT JOIN", "FULL JOIN", "UNION", "SET"))
        if kind == "UNION":
            return f"{left} UNION ALL {right}" if " UNION " not in right else left
        if kind == "SET":
            how = self.draw.choice(("UNION DISTINCT", "EXCEPT DISTINCT", "INTERSECT DISTINCT"))
            both = (f"SELECT uid, v, g FROM ({left}) AS {a} {how} "
                    f"SELECT uid, v, g FROM ({right}) AS {b}")  # fmt: skip
            return (f"SELECT uid, v, CAST(v AS FLOAT64) AS w, g FROM ({both}) "
                    f"AS {next(self.names)}")  # fmt: skip
        unit = {"LEFT JOIN": f"{a}.uid", "RIGHT JOIN": f"{b}.uid"}.get(
            kind, f"COALESCE({a}.uid, {b}.uid)"
        )
        more = self.draw.choice(("", f" AND {a}.v < {b}.v", f" AND {a}.g = {b}.g",
                                 f" AND {a}.w / {b}.w > 0.1"))  # fmt: skip
        w = self.draw.choice((f"{a}.w", f"{b}.w", f"{a}.w + {b}.w"))
        return (f"SELECT {unit} AS uid, {a}.v, {w} AS w, {b}.g FROM ({left}) AS {a} {kind} "
                f"({right}) AS {b} ON {a}.uid = {b}.uid{more}")  # fmt: skip

    def filtered(self, of: str) -> str:
        return (f"SELECT * FROM ({of}) AS {next(self.names)} "
                f"WHERE {self.draw.choice(_CONDITIONS)}")  # fmt: skip

    def projected(self, of: str) -> str:
        pick = self.draw.choice
        return (f"SELECT uid, {pick(_INTEGERS)} AS v, {pick(_FLOAT)} AS w, {pick(_TEXT)} AS g "
                f"FROM ({of}) AS {next(self.names)}")  # fmt: skip

    def grouped(self, of: str) -> str:
        pick, by = self.draw.choice, self.draw.choice(("uid, g", "g, uid"))
        having = pick(("", " HAVING COUNT(*) > 1", " HAVING SUM(w) > 0"))
        return (f"SELECT uid, {pick(_OVER_G)} AS v, {pick(_OVER_W)} AS w, g "
                f"FROM ({of}) AS {next(self.names)} GROUP BY {by}{having}")  # fmt: skip

    def distinct(self, of: str) -> str:
        return (f"SELECT uid, v, CAST(v AS FLOAT64) AS w, g FROM (SELECT DISTINCT uid, v, g "
                f"FROM ({of}) AS {next(self.names)}) AS {next(self.names)}")  # fmt: skip

    def published(self, of: str) -> str:
        a, p = next(self.names), next(self.names)
        kind = self.draw.choice(("JOIN", "LEFT JOIN"))
        on = self.draw.choice((f"{a}.g = {p}.page", f"{a}.v < {p}.uid", f"{a}.w < {p}.weight"))
        return (f"SELECT {a}.uid, {a}.v, {p}.weight AS w, {p}.title AS g FROM ({of}) AS {a} "
                f"{kind} pages AS {p} ON {on}")  # fmt: skip


def generated(seed: int) -> str:
    """A differentially private statement over three tables."""
    writer = _Writer(seed)
    functions = writer.draw.sample(_FUNCTIONS, 3)
    items = ", ".join(f"{f.format(r='r')} AS f{i}" for i, f in enumerate(functions))
    group = writer.draw.choice(("r.g", "r.v", "r.g, r.v", "SUBSTR(r.g, 1, 1)"))
    return (
        "SELECT WITH DIFFERENTIAL_PRIVACY OPTIONS(epsilon = 1, delta = 1e-9, "
        f"max_groups_contributed = 4) {items} FROM ({writer.relation(3)}) AS r GROUP BY {group}"
    )

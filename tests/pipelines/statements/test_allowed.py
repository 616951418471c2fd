"""Every node of a statement is on the lists; what is not breaks a rule that has a name.

Names: WITH parts in their places, every column by its relation, and limits of size.
"""

import pytest
from sqlglot import exp, parse_one

from dpstream.accounting.errors import DpstreamError
from dpstream.pipelines.statements.allowed import (
    FUNCTIONS,
    MAX_CHARACTERS,
    MAX_DEPTH,
    MAX_NODES,
    PARTS_REFUSED,
    REFUSED,
    check_nodes,
    inlined,
    parsed,
    qualified,
    require,
)
from dpstream.pipelines.statements.errors import RULES, Position, position


def test_every_refusal_names_a_rule() -> None:
    codes = {code for _, code in REFUSED} | set(PARTS_REFUSED.values())
    assert codes <= set(RULES)


@pytest.mark.parametrize(
    ("items", "code"),
    [("RAND()", "nondeterministic"), ("ROW_NUMBER() OVER (ORDER BY a)", "window"),
     ("CURRENT_DATE()", "nondeterministic"), ("(SELECT 1 FROM t)", "subquery-expression"),
     ("EXTRACT(MICROSECOND FROM a)", "function"), ("CAST(a AS JSON)", "function"),
     ("SOUNDEX(a)", "function"), ("ARRAY_AGG(a)", "inner-aggregate")],
)  # fmt: skip
def test_what_is_on_no_list(items: str, code: str) -> None:
    with pytest.raises(DpstreamError) as error:
        check_nodes(parse_one(f"SELECT {items} AS x FROM t", dialect="bigquery"))
    assert RULES[code].text in str(error.value)


def test_every_function_that_a_refusal_lists_is_allowed() -> None:
    arguments = ("a", "a, b", "a, b, c", "a AS INT64", "YEAR FROM a", "a, MONTH",
                 "a, INTERVAL 1 DAY", "a, b, DAY")  # fmt: skip
    for name in FUNCTIONS:
        assert any(_is_allowed(f"SELECT {name}({given}) AS x FROM t") for given in arguments), name
    assert not _is_allowed("SELECT SOUNDEX(a) AS x FROM t")


def _is_allowed(text: str) -> bool:
    try:
        parsed(text)
    except DpstreamError:
        return False
    return True


def test_allowed_statements_pass_and_long_ones_do_not() -> None:
    check_nodes(parse_one("SELECT ABS(a) AS x, COUNT(*) AS n FROM t WHERE b > 1 GROUP BY x"))
    many = ", ".join(f"c{n}" for n in range(MAX_NODES // 2))
    with pytest.raises(DpstreamError, match="too long"):
        check_nodes(parse_one(f"SELECT {many} FROM t"))


def test_a_refusal_says_where() -> None:
    tree = parsed("SELECT\n  abc AS x FROM t")
    [column] = tree.find_all(exp.Column)
    assert position(column) == Position(2, 3)
    assert position(exp.Null()) == Position(1, 1)
    require(True, "syntax", column)
    with pytest.raises(DpstreamError, match="2"):
        require(False, "syntax", column)


SCHEMA = {"t": {"a": "INT64", "b": "STRING"}, "s": {"a": "INT64"}}


@pytest.mark.parametrize(
    ("text", "code"),
    [("", "one-statement"), ("SELECT a FROM t; SELECT b FROM t", "one-statement"),
     ("DROP TABLE t", "select-only"), ("SELECT FROM", "syntax"),
     ("SELECT a FROM t" + " " * MAX_CHARACTERS, "too-large"),
     (f"SELECT {'(' * (MAX_DEPTH + 1)}a{')' * (MAX_DEPTH + 1)} FROM t", "too-large")],
)  # fmt: skip
def test_what_is_no_statement(text: str, code: str) -> None:
    with pytest.raises(DpstreamError) as error:
        parsed(text)
    assert RULES[code].text in str(error.value)


def test_a_part_used_twice_is_the_same_relation_twice() -> None:
    text = "WITH w AS (SELECT a FROM t), v AS (SELECT a FROM w) SELECT x.a FROM v AS x, w AS y"
    tree = inlined(parsed(text))
    assert tree.args.get("with_") is None and not list(tree.find_all(exp.CTE))
    assert [table.name for table in tree.find_all(exp.Table)] == ["t", "t"]


def test_parts_that_multiply_are_too_large() -> None:
    parts = ["w0 AS (SELECT a FROM t)"]
    parts += [f"w{n} AS (SELECT x.a FROM w{n - 1} AS x, w{n - 1} AS y)" for n in range(1, 30)]
    with pytest.raises(DpstreamError) as error:
        inlined(parsed(f"WITH {', '.join(parts)} SELECT a FROM w29"))
    assert RULES["too-large"].text in str(error.value)


def test_columns_say_their_relation_and_type() -> None:
    tree = qualified(inlined(parsed("SELECT B, s.a AS c FROM T, S")), SCHEMA)
    types = {(c.table, c.name): c.type.this for c in tree.find_all(exp.Column)}
    assert set(types) == {("t", "b"), ("s", "a")}
    assert types["s", "a"] == exp.DType.BIGINT


def test_a_table_that_nobody_knows() -> None:
    with pytest.raises(DpstreamError) as error:
        qualified(inlined(parsed("SELECT a FROM u")), SCHEMA)
    assert RULES["unknown-table"].text in str(error.value)

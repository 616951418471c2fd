"""Names: WITH parts in their places, every column by its relation, and limits of size."""

import pytest
from sqlglot import exp

from dpstream.accounting.errors import DpstreamError
from dpstream.pipelines.statements.allowed import MAX_CHARACTERS, MAX_DEPTH
from dpstream.pipelines.statements.errors import RULES
from dpstream.pipelines.statements.resolve import inlined, parsed, qualified

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

"""Every node of a statement is on the lists; what is not breaks a rule that has a name."""

import pytest
from sqlglot import exp, parse_one

from dpstream.accounting.errors import DpstreamError
from dpstream.pipelines.statements.allowed import (
    MAX_NODES,
    PARTS_REFUSED,
    REFUSED,
    check_nodes,
    require,
)
from dpstream.pipelines.statements.errors import RULES, Position, position
from dpstream.pipelines.statements.resolve import parsed


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

"""Public groups: one outer join keeps distinct public columns, and it becomes an inner join."""

import pytest
from sqlglot import exp, parse_one

from dpstream.accounting.errors import DpstreamError
from dpstream.pipelines.statements.errors import RULES
from dpstream.pipelines.statements.statement import public_side

PUBLIC = "(SELECT DISTINCT page FROM pages) AS p"


def core(joined: str) -> exp.Select:
    tree = parse_one(f"SELECT p.page, COUNT(*) AS n FROM {joined} GROUP BY p.page")
    assert isinstance(tree, exp.Select)
    return tree


@pytest.mark.parametrize(
    "joined",
    [f"visits AS v RIGHT JOIN {PUBLIC} ON v.page = p.page",
     f"visits AS v RIGHT JOIN {PUBLIC} ON v.path = p.page",
     f"{PUBLIC} LEFT OUTER JOIN visits AS v ON p.page = v.page"],
)  # fmt: skip
def test_the_outer_join_is_found_and_made_inner(joined: str) -> None:
    tree = core(joined)
    side = public_side(tree)
    assert side.alias == "p" and side.this.sql() == "SELECT DISTINCT page FROM pages"
    [join] = tree.args["joins"]
    assert join.side == "" and join.kind == ""


def test_a_filter_of_groups_belongs_into_their_query() -> None:
    joined = f"visits AS v RIGHT JOIN {PUBLIC} ON v.page = p.page WHERE "
    assert public_side(core(f"{joined} v.n > 3 AND v.page <> 'p1'")).alias == "p"
    for where in ("p.page <> 'p1'", "v.n > 3 OR UPPER(p.page) IS NULL"):
        with pytest.raises(DpstreamError) as refused:
            public_side(core(joined + where))
        assert RULES["public-filter"].text in str(refused.value)
        assert "p1" not in str(refused.value)


@pytest.mark.parametrize(
    "joined",
    ["visits AS p", f"visits AS v JOIN {PUBLIC} ON v.page = p.page",
     f"visits AS v LEFT JOIN {PUBLIC} ON v.page = p.page",
     "visits AS v RIGHT JOIN (SELECT page FROM pages) AS p ON v.page = p.page",
     f"visits AS v RIGHT JOIN {PUBLIC} ON v.page = p.page AND v.n > 3",
     f"visits AS v RIGHT JOIN {PUBLIC} ON v.page = v.page",
     f"visits AS v RIGHT JOIN {PUBLIC} ON v.page = p.title",
     "visits AS v RIGHT JOIN (SELECT DISTINCT page, title FROM pages) AS p ON v.page = p.page",
     f"visits AS v RIGHT JOIN {PUBLIC} ON TRUE"],
)  # fmt: skip
def test_any_other_form_is_refused(joined: str) -> None:
    with pytest.raises(DpstreamError, match=r"(?i)public"):
        public_side(core(joined))

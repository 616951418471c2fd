"""Public groups: the groups of an answer are the rows of a query over public tables.

The form is GoogleSQL's: one outer join keeps ``SELECT DISTINCT`` of public columns, whose columns
are equated with expressions of the private side and are exactly those of GROUP BY.  A private row
that meets no public one adds to no group, so the private relation is the inner join; groups that
no private row meets are released too, with noise like all others.  No group is selected by data.
"""

from sqlglot import exp

from dpstream.accounting.errors import instance
from dpstream.pipelines.statements.allowed import require
from dpstream.pipelines.statements.ownership import Validator
from dpstream.pipelines.statements.relations import equalities


class PublicSide:
    """The public relation of an outer join, and its name."""

    def __init__(self, subquery: exp.Subquery) -> None:
        self.name, self.select = subquery.alias, subquery.this

    def query(self, validator: Validator, grouped: list[exp.Expr], core: exp.Select) -> exp.Query:
        """The query that gives all groups, columns in the order of GROUP BY.

        Raises:
            DpstreamError: it is not public, or its columns are not those of GROUP BY.
        """
        relation = validator.relation(self.select)
        require(not relation.private, "public-groups", core.args["group"])
        plain = all(isinstance(g, exp.Column) and g.table == self.name for g in grouped)
        names = [g.name for g in grouped]
        same = plain and sorted(names) == sorted(relation.columns)
        require(same, "public-groups", core.args["group"])
        alias = exp.TableAlias(this=exp.to_identifier(self.name, quoted=True))
        source = exp.Subquery(this=self.select.copy(), alias=alias)
        columns = [exp.column(name, table=self.name, quoted=True) for name in names]
        return exp.Select(expressions=columns, from_=exp.From(this=source))


def public_side(core: exp.Select) -> PublicSide:
    """Find the outer join of the form above, and make it an inner join in the tree.

    Raises:
        DpstreamError: there is none.
    """
    joins, first = core.args.get("joins") or [], core.args["from_"].this
    at = core.args["group"]
    require(joins, "public-groups", at)
    last = joins[-1]
    public_query = {"RIGHT": last.this, "LEFT": first if len(joins) == 1 else None}.get(
        last.side.upper()
    )
    require(isinstance(public_query, exp.Subquery), "public-groups", at)
    public_query = instance(public_query, exp.Subquery)
    fits = isinstance(public_query.this, exp.Select)
    require(fits and public_query.this.args.get("distinct") is not None, "public-groups", at)
    require(last.args.get("on") is not None, "public-groups", at)
    _check_on(last.args["on"], public_query, at)
    # It would take groups away, not rows: it belongs into the query that lists them.
    where = core.args.get("where")
    filtered = (
        []
        if where is None
        else [c for c in where.find_all(exp.Column) if c.table == public_query.alias]
    )
    require(not filtered, "public-filter", where or at)
    last.set("side", None)
    last.set("kind", None)
    return PublicSide(public_query)


def _check_on(on: exp.Expr, public_query: exp.Subquery, at: exp.Expr) -> None:
    """Only equalities, one for each public column: a group without rows is never a filtered one."""
    conditions = list(on.flatten()) if isinstance(on, exp.And) else [on]
    equal = [(a, b) for a, b in equalities(on)]
    require(len(conditions) == len(equal), "public-groups", at)
    named = sorted(
        side.name
        for pair in equal
        for side in pair
        if isinstance(side, exp.Column) and side.table == public_query.alias
    )
    require(
        named == sorted(item.alias_or_name for item in public_query.this.expressions),
        "public-groups",
        at,
    )

"""Row-local queries: every output row depends on one input row.

A stream has no whole table to ask: batches of rows arrive, in any size.  A query that each batch
goes through must give, of all batches together, what it gives of all rows at once, and must not
let one unit's rows touch another's.  So it is allowed only what is a function of one row:

* FROM the source itself, or a subquery that is row-local by the same rules; WHERE; a select list
  without aggregates.  Expressions are deterministic functions of one row (`allowed`), NULL where
  they fail (`exact`).
* JOIN or LEFT JOIN of a public table after it, ON plain equality of columns with **all** columns of
  the table's declared key.  No two rows of the table have that key in common (checked when the
  job is loaded, on the very rows that are used, which are part of the plan's hash), equal
  values of these types are equal bytes, and NULL equals nothing: a row meets at most one row of
  the table, which no other row of the source decides.

**Sensitivity.**  By induction over these operators the query is a map f from a row to one row or to
none, fixed by the plan.  Neighbouring inputs differ in the rows of one unit; f applied row by row
leaves them neighbouring, in the images of that unit's rows alone, which are no more than the rows
were.  The unit, the event time, the stamp and the record's id are not computed by f: they are
those of the row it was made of, as is its position, so no two records share a name.  Filters and
look-ups therefore come before bounding and change no sensitivity: C, clamps and thresholds see a
stream as any other.

Refused are aggregates, GROUP BY, DISTINCT, set operations, window functions, LIMIT, joins of
private relations, public tables without a key or by an inequality, and outer joins that would keep
rows of a public table.  `row_query` checks once more, on every batch, that rows came from one row
each.
"""

import dataclasses

from sqlglot import exp

from dpstream.accounting.errors import instance
from dpstream.pipelines.statements.allowed import inlined, parsed, qualified, require
from dpstream.pipelines.statements.dialect import Private
from dpstream.pipelines.statements.errors import refusal
from dpstream.pipelines.statements.exact import safe_query
from dpstream.pipelines.statements.ownership import Validator, equalities, select_list, type_of
from dpstream.pipelines.statements.statement import UNFORESEEN
from dpstream.pipelines.tables.catalog import Table, Tables
from dpstream.pipelines.tables.columns import ROW

#: Types whose values are equal only if they are the same bytes, in DuckDB as in the proof.
KEYED = {
    exp.DType.BIGINT,
    exp.DType.TEXT,
    exp.DType.BOOLEAN,
    exp.DType.VARBINARY,
    exp.DType.DATE,
    exp.DType.TIMESTAMP,
    exp.DType.TIMESTAMPTZ,
}


@dataclasses.dataclass(frozen=True)
class RowTables(Tables):
    """The tables that a row-local query can name.

    Attributes:
        source: the name of the one private table.
        keys: columns of the public tables that no two rows have in common.
    """

    source: str = ""
    keys: dict[str, tuple[str, ...]] = dataclasses.field(default_factory=dict)

    @property
    def rows(self) -> Table:
        """The private table."""
        return self.tables[self.source]


def row_query(text: str, tables: RowTables) -> exp.Select:
    """Return the tree of a row-local SELECT, every column with its relation.

    Raises:
        DpstreamError: it is not usable, or not row-local.
    """
    try:
        return _checked(text, tables)
    except UNFORESEEN:
        raise refusal("not-supported") from None


def _checked(text: str, tables: RowTables) -> exp.Select:
    tree = qualified(inlined(parsed(text)), tables.schema)
    require(isinstance(tree, exp.Select), "stream-rows", tree)
    tree = instance(tree, exp.Select)
    require(tree.args.get("hint") is None, "one-dp-select", tree)
    check_row_local(tree, tables)
    tree.set("order", None)  # rows keep the order they came in
    scope = Validator(tables).scope(tree)
    for item in select_list(tree).values():
        scope.check_columns(item)
    return tree


def check_row_local(node: exp.Select, tables: RowTables) -> None:
    """Refuse a SELECT that is more than a function of one row of the source.

    Args:
        node: qualified; its columns and units are the validator's.

    Raises:
        DpstreamError: says where and why.
    """
    for part in ("limit", "offset"):
        require(node.args.get(part) is None, "limit", node.args.get(part))
    for part in ("distinct", "group", "having"):
        require(node.args.get(part) is None, "stream-rows", node.args.get(part))
    for item in node.expressions:
        require(not item.find(exp.AggFunc, Private), "stream-rows", item)
    require(node.args.get("from_") is not None, "from", node)
    first = node.args["from_"].this
    if isinstance(first, exp.Table):
        require(first.name == tables.source, "stream-look-up", first)
    else:
        require(isinstance(first.this, exp.Select), "stream-rows", first)
        check_row_local(first.this, tables)
    for join in node.args.get("joins") or ():
        named_table = isinstance(join.this, exp.Table) and join.this.name != tables.source
        require(named_table, "stream-join", join.this)
        require(_looks_up(join, tables), "stream-look-up", join.this)


def _looks_up(join: exp.Join, tables: RowTables) -> bool:
    """Whether a row meets at most one row of the joined public table."""
    kinds = join.side.upper() in ("", "LEFT") and join.kind.upper() in ("", "INNER", "OUTER")
    on, key = join.args.get("on"), set(tables.keys.get(join.this.name, ()))
    if not kinds or on is None or not key:
        return False
    met, alias = set[str](), join.this.alias_or_name
    for pair in equalities(on):
        for mine, theirs in (pair, pair[::-1]):
            if not (isinstance(mine, exp.Column) and isinstance(theirs, exp.Column)):
                continue
            kind = type_of(mine)
            if theirs.table == alias != mine.table and kind == type_of(theirs) and kind in KEYED:
                met.add(theirs.name)
    return key <= met


def numbered(tree: exp.Select, arrived: str, types: dict[str, str]) -> str:
    """Return the DuckDB text of a row-local query whose first column is the row's number.

    Args:
        tree: of `row_query`.
        arrived: the table of rows as they are, with their numbers.
        types: DuckDB's types by column: what the query sees of them.
    """
    query = safe_query(tree)
    _number(query, arrived, types)
    return str(query.sql("duckdb", comments=False))


def _number(node: exp.Select, arrived: str, types: dict[str, str]) -> None:
    first = node.args["from_"].this
    name = first.alias_or_name
    if isinstance(first, exp.Table):
        column = exp.column(ROW, quoted=True)
        items = [
            exp.alias_(
                exp.TryCast(
                    this=exp.column(c, quoted=True), to=exp.DataType.build(t, dialect="duckdb")
                ),
                c,
                quoted=True,
            )
            for c, t in types.items()
        ]
        table = exp.From(this=exp.Table(this=exp.to_identifier(arrived, quoted=True)))
        inner = exp.Select(expressions=[column, *items], from_=table)
        alias = exp.TableAlias(this=exp.to_identifier(name, quoted=True))
        first.replace(exp.Subquery(this=inner, alias=alias))
    else:
        _number(first.this, arrived, types)
    node.set("expressions", [exp.column(ROW, table=name, quoted=True), *node.expressions])

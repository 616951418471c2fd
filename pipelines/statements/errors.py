"""Refusals of a statement: the position, the broken rule and a fix that works.

Every text is a constant of this file.  Nothing of the statement enters an error but a line, a
column, and the name of a table, column, function, argument or option that does not exist, so that
no literal (which may be somebody's name or number) is ever shown or logged.
The libraries below quote the statement in their own errors; those are never passed on.
"""

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, NamedTuple

from dpstream.accounting.errors import DpstreamError, PolicyError, UsageError, closest
from dpstream.accounting.strength import TOO_LARGE, fix_of

if TYPE_CHECKING:
    from sqlglot import exp


class Rule(NamedTuple):
    """One rule.

    Attributes:
        text: what is wrong, in words.
        fix: what to write instead.
        privacy: whether the rule protects units (otherwise it is about form).
    """

    text: str
    fix: str
    privacy: bool = False


_UNIT = "the privacy unit's column"
RULES: dict[str, Rule] = {
    # Form.
    "syntax": Rule("is not a statement of this SQL", "correct it at this place"),
    "too-large": Rule(
        "is too long or too deeply nested", "write a shorter statement, or views as tables"
    ),
    "one-statement": Rule("is not exactly one statement", "ask one statement at a time"),
    "select-only": Rule("is not a SELECT", "ask with SELECT WITH DIFFERENTIAL_PRIVACY"),
    "no-dp-select": Rule(
        "has no differentially private SELECT",
        "write SELECT WITH DIFFERENTIAL_PRIVACY OPTIONS(epsilon = E, delta = D, ...)",
    ),
    "one-dp-select": Rule(
        "has a differentially private SELECT where there can be no other one",
        "ask it alone; of tables without budgets per record, beside others in FROM or UNION ALL",
    ),
    "not-supported": Rule(
        "uses a construct that is not on the list of allowed ones",
        "rewrite it with SELECT, FROM, JOIN ... ON, WHERE, GROUP BY, UNION ALL and subqueries",
    ),
    "function": Rule(
        "uses a function that is not on the list of allowed ones",
        "use another function, another part of a time, or CAST to another type",
    ),
    "cast": Rule(
        "casts between two types that GoogleSQL has no cast for, or that has no exact form",
        "write CAST to STRING or INT64 between them",
    ),
    "time-zone": Rule(
        "names a time zone that is not known, or where it has no exact form",
        "write DATE(t, 'Europe/Paris') or EXTRACT(HOUR FROM t AT TIME ZONE 'Europe/Paris') of a "
        "TIMESTAMP, or leave it out: times are in UTC; a column of CSV or JSON Lines that a table "
        "declares as DATETIME or DATE has the clock of its files",
    ),
    "unknown-table": Rule(
        "names a table that the data set does not have",
        "name a table of the data set, without a prefix, or add [table.NAME]",
    ),
    "unknown-column": Rule(
        "names a column that no table of this FROM has", "use a column of these tables"
    ),
    "ambiguous-column": Rule(
        "names a column that several tables of this FROM have", "write TABLE.COLUMN"
    ),
    "duplicate-column": Rule(
        "gives two columns of a relation one name", "give each column a name of its own with AS"
    ),
    "from": Rule("has no FROM", "name the private relation after FROM"),
    # Options.
    "option-unknown": Rule("has an option that is not known", "leave it out"),
    "option-twice": Rule("gives an option twice", "give it once"),
    "epsilon": Rule("needs epsilon, a number above 0 and at most 1000", "write epsilon = 1"),
    "within": Rule(
        "needs within, a number above 0, in place of epsilon, where it has a COUNT; or within => W "
        "in a COUNT or a SUM",
        "write OPTIONS(within = 50, delta = 1e-9), or SUM(x, contribution_bounds_per_group => "
        "(0, 9), within => 50)",
    ),
    "within-bounds": Rule(
        "gives within to a function whose bounds the rows decide, or to neither a COUNT nor a SUM",
        "write COUNT(*, contribution_bounds_per_group => (0, 9)), or epsilon",
    ),
    "within-reach": Rule(
        "asks for an interval that no epsilon below 1000 reaches", "write a larger within"
    ),
    "delta": Rule("needs delta, a number above 0 and below 1", "write delta = 1e-9"),
    "large-delta": Rule(
        f"has a delta that {TOO_LARGE}", fix_of("allow_large_delta = TRUE"), privacy=True
    ),
    "allow-large-delta": Rule(
        "has allow_large_delta that is neither TRUE nor FALSE", "write allow_large_delta = TRUE"
    ),
    "max-groups": Rule(
        "needs max_groups_contributed, a whole number from 1 to 4096, where it has GROUP BY",
        "write max_groups_contributed = 32, or contribution_norm",
        privacy=True,
    ),
    "max-rows": Rule(
        "has max_rows_contributed that is no whole number from 1 to 1000",
        "write max_rows_contributed = 5",
        privacy=True,
    ),
    "min-units": Rule(
        "has min_privacy_units_per_group that is no whole number from 1 to 4194304, or has "
        "it with public groups",
        "write min_privacy_units_per_group = 10 and select groups by thresholds",
    ),
    "norm": Rule(
        "has contribution_norm that is not from 1e-60 to 1e60, is not given for every function "
        "that counts or sums, or stands with another function, or with geometric noise where "
        "groups are selected",
        "give contribution_norm once in OPTIONS, for COUNT and SUM, without mechanism = geometric",
        privacy=True,
    ),
    "mechanism": Rule(
        "has a mechanism that is not known", "write mechanism = auto, gaussian or geometric"
    ),
    "optimise": Rule(
        "has an unknown value of optimise",
        "write optimise = limit (compare at a share of the account's limit) or optimise = answer "
        "(compare this answer alone)",
    ),
    "selection": Rule(
        "has a group_selection_strategy that is not known",
        "write group_selection_strategy = THRESHOLDS or PUBLIC_GROUPS, or omit it",
    ),
    "unit-column": Rule(
        f"has a privacy_unit_column that is not {_UNIT} of the relation after FROM",
        "omit the option: the project file says which column is the unit",
        privacy=True,
    ),
    # The differentially private select list.
    "dp-function-outside": Rule(
        "uses a private function outside of the differentially private SELECT",
        "use it in its select list, HAVING or ORDER BY",
        privacy=True,
    ),
    "no-function": Rule(
        "selects no private function and no groups",
        "add a function, such as COUNT(*) AS n, to the select list, or GROUP BY columns",
    ),
    "not-grouped": Rule(
        "selects a column that is neither grouped by nor inside a private function",
        "add it to GROUP BY or put it into a function",
        privacy=True,
    ),
    "dp-aggregate": Rule(
        "uses an aggregate that has no private form here",
        "use COUNT, SUM, AVG, VAR, STDDEV, MIN, MAX, MEDIAN, PERCENTILE_CONT, NTILE or "
        "APPROX_QUANTILES",
        privacy=True,
    ),
    "nested-aggregate": Rule(
        "has an aggregate inside another",
        "aggregate per unit in a subquery that groups by the unit",
        privacy=True,
    ),
    "arguments": Rule(
        "gives a private function other arguments than it takes",
        "write FUNCTION(expression, contribution_bounds_per_group => (low, high))",
    ),
    "numbers": Rule(
        "gives a function of numbers an argument that holds none",
        "name a column of numbers, or write CAST(x AS FLOAT64); its types are in the project file",
    ),
    "number-signs": Rule(
        "casts text to a number, and the table declares signs of numbers, which CAST does not know",
        'declare it in the table: columns = { x = "FLOAT64" }, and name x without CAST',
    ),
    "bounds": Rule(
        "has contribution bounds that are not two numbers (0, or 1e-60 to 1e60 in size), low below "
        "high, or are given twice",
        "write contribution_bounds_per_group => (0, 10)",
    ),
    "count-bounds": Rule("has bounds of a count that are not whole numbers", "write (0, 10)"),
    "report": Rule(
        "asks for a report in another format than JSON and PROTO, which give the same JSON",
        "write report_format => 'JSON', or WITH REPORT for columns",
    ),
    "quantile": Rule(
        "asks for a quantile that is not a number from 0 to 1, or for more than 999 parts",
        "write PERCENTILE_CONT(x, 0.5) or APPROX_QUANTILES(x, 4)",
    ),
    "group-by-unit": Rule(
        "groups the answer by the privacy unit",
        "group by a public attribute, or aggregate per unit in a subquery",
        privacy=True,
    ),
    "group-type": Rule(
        "groups by, or removes duplicates of, a column whose type is a float or is not known",
        "CAST it to STRING, INT64, NUMERIC, DATE or TIMESTAMP",
        privacy=True,
    ),
    "group-constant": Rule("groups by a constant, which is no group", "remove it from GROUP BY"),
    "public-filter": Rule(
        "filters public groups in WHERE, which is about the private rows that meet them",
        "write the condition inside SELECT DISTINCT, or about the private table's column",
    ),
    "public-groups": Rule(
        "asks for PUBLIC_GROUPS without one outer join that keeps a SELECT DISTINCT over public "
        "tables, by plain column equality, with exactly its columns in GROUP BY",
        "write FROM private RIGHT JOIN (SELECT DISTINCT g FROM public_table) AS p "
        "ON private.g = p.g GROUP BY p.g",
        privacy=True,
    ),
    # Ownership of rows: Table 4.3.
    "no-private-table": Rule(
        "has only public tables in its private relation",
        "join a private table; public tables alone need no privacy: ask DuckDB directly",
    ),
    "private-outside": Rule(
        "reads a private table outside of the differentially private SELECT",
        "join only public tables with the released answer",
        privacy=True,
    ),
    "unit-not-selected": Rule(
        f"leaves out {_UNIT} of a private relation",
        "select the unit's column, unchanged, in the subquery",
        privacy=True,
    ),
    "group-without-unit": Rule(
        f"groups private rows without {_UNIT}",
        "add the unit's column, unchanged, to GROUP BY of the subquery",
        privacy=True,
    ),
    "join-without-unit": Rule(
        "joins two private relations without equating their units",
        "write JOIN ... ON a.unit = b.unit AND ... (or the declared key) with plain columns",
        privacy=True,
    ),
    "outer-join-public": Rule(
        "keeps rows of a public relation that no unit owns",
        "make the private relation the one whose rows an outer join keeps",
        privacy=True,
    ),
    "join-kind": Rule(
        "uses a kind of join that is not supported",
        "write JOIN, LEFT JOIN, RIGHT JOIN or FULL JOIN with ON or USING",
    ),
    "set-operation-mixed": Rule(
        "combines private and public relations in a set operation",
        "combine relations of one kind",
        privacy=True,
    ),
    "set-operation-unit": Rule(
        f"has {_UNIT} at different places of the parts of a set operation",
        "select the unit's column at the same place in every part",
        privacy=True,
    ),
    "set-operation-columns": Rule(
        "combines relations of different numbers or types of columns",
        "select the same columns in every part",
    ),
    "subquery-expression": Rule(
        "uses a subquery at a place, or in a form, that has no join which means the same",
        "join the relation instead: JOIN (SELECT DISTINCT ...) AS s ON ...",
        privacy=True,
    ),
    "limit": Rule(
        "uses LIMIT or OFFSET before noise is added: which rows it keeps depends on other units",
        "use LIMIT on the answer, outside of the private relation",
        privacy=True,
    ),
    "sample": Rule(
        "samples rows of a table: which rows it keeps depends on other units",
        "omit TABLESAMPLE",
        privacy=True,
    ),
    "window": Rule(
        "uses a window function in the private SELECT, with groups, or over rows of several units",
        "write it in a subquery: OVER (PARTITION BY unit, ... ORDER BY ...), or on the answer",
        privacy=True,
    ),
    "window-order": Rule(
        "has a window without the ORDER BY that decides its value",
        "write OVER (PARTITION BY unit ORDER BY column)",
    ),
    "window-frame": Rule(
        "has a window whose size or default a row could make fail",
        "write ROWS and LAG with numbers of rows, and a default of the value's type, not NUMERIC",
    ),
    "window-sum": Rule(
        "adds numbers with fractions in a window, whose sum depends on their order",
        "add whole numbers, or write SUM in a subquery that groups by the unit",
    ),
    "nondeterministic": Rule(
        "uses a function whose value is not determined by the row",
        "use a literal or a column instead",
        privacy=True,
    ),
    "grouping-sets": Rule(
        "uses GROUP BY ALL; or ROLLUP, CUBE or GROUPING SETS where rows are read, with HAVING or "
        "LIMIT, of more than 16 sets, or of PUBLIC_GROUPS with other functions than COUNT and SUM",
        "write GROUP BY ROLLUP(..) of columns in the differentially private SELECT, conditions "
        "around it",
        privacy=True,
    ),
    "recursive": Rule("uses WITH RECURSIVE", "write the steps as subqueries", privacy=True),
    "aggregate-place": Rule(
        "uses an aggregate outside of a select list or HAVING, or beside columns not grouped by",
        "group by the columns beside it",
    ),
    "inner-aggregate": Rule(
        "uses an aggregate that has no exact, order-free form here",
        "use COUNT, SUM, AVG, MIN or MAX; in a subquery also COUNTIF, LOGICAL_AND or LOGICAL_OR",
        privacy=True,
    ),
    # Statements that are streams.
    "stream-option": Rule(
        "has an option that a stream has no meaning for: max_groups_contributed, "
        "contribution_norm, public groups, mechanism or optimise",
        "write max_rows_contributed, the most rows of a unit that count in all groups together; "
        "public keys stand in public_keys of the job",
        privacy=True,
    ),
    "stream-contributions": Rule(
        "needs max_rows_contributed, the most rows of a unit that count in all groups together",
        "write max_rows_contributed = 32, or contributions in the job",
        privacy=True,
    ),
    "stream-rows": Rule(
        "is more than filtered rows of the stream: it groups, aggregates, removes duplicates or "
        "combines relations",
        "filter and compute row by row with SELECT, FROM and WHERE; aggregate in the private "
        "SELECT alone",
        privacy=True,
    ),
    "stream-join": Rule(
        "joins a stream with something that is not a public table of its job",
        "join tables of the project file with public = true by all of their key_columns",
        privacy=True,
    ),
    "stream-look-up": Rule(
        "joins a public table so that a row could meet several of its rows, or none",
        "write FROM stream JOIN or LEFT JOIN table ON stream.column = table.column for all columns "
        "of the table's declared key, plain columns of one type and no floats",
        privacy=True,
    ),
    "stream-name": Rule(
        "gives a column the name of the stream's unit, event time, stamp or record id",
        "name it otherwise with AS",
    ),
    "stream-function": Rule(
        "uses a function that has no running form",
        "use COUNT(*), SUM, AVG and COUNT(DISTINCT unit); filter NULL with WHERE",
    ),
    "stream-bounds": Rule(
        "has no bounds of a SUM or AVG, which a stream must know before its first row, or has "
        "bounds or a norm of a count",
        "write SUM(x, contribution_bounds_per_row => (0, 1)); counts are bounded by "
        "max_rows_contributed",
        privacy=True,
    ),
    "stream-answer": Rule(
        "works on the answer of a stream, or selects anything but its group columns and functions",
        "select GROUP BY columns and functions only; compute on the releases, each of which has "
        "its sd",
    ),
    "stream-groups": Rule(
        "groups a stream by no column, by more than 8, or by one that is not STRING, INT64, BOOL "
        "or BYTES",
        "write GROUP BY with 1 to 8 columns, others as CAST(column AS STRING)",
    ),
    "lateral": Rule(
        "uses UNNEST, LATERAL, PIVOT or a table function", "use tables and subqueries only"
    ),
}


class Position(NamedTuple):
    """The position at which a part of a statement begins, both counted from 1."""

    line: int
    column: int


_START = Position(1, 1)
#: Characters of a name that an error prints.
_LONGEST = 64


def position(node: "exp.Expr") -> Position:
    """Return the position of a node: its first known token, or that of its surroundings."""
    around: exp.Expr | None = node
    while around is not None:
        positions = [n.meta for n in around.walk() if "line" in n.meta]
        if positions:
            first = min(positions, key=lambda meta: meta["start"])
            return Position(first["line"], first["col"] - (first["end"] - first["start"]))
        around = around.parent
    return _START


def position_in(text: str, offset: int) -> Position:
    """Return the position of a character of a text."""
    return Position(text.count("\n", 0, offset) + 1, offset - text.rfind("\n", 0, offset))


class _RefusalError(DpstreamError):
    """An error of a rule, by its arguments of `refusal`."""

    code: str
    position: Position
    subject: tuple[str, tuple[str, ...]]

    def __reduce__(self) -> tuple[Any, ...]:
        return refusal, (self.code, self.position, *self.subject)


class StatementError(_RefusalError, UsageError):
    """Signals that the statement is not usable as written (exit 2)."""


class StatementPrivacyError(_RefusalError, PolicyError):
    """Signals that the statement has no private answer as written (exit 3)."""


def refusal(
    code: str, at: Position = _START, name: str = "", choices: Iterable[str] = ()
) -> DpstreamError:
    """Return the error of a rule, to be raised.

    Args:
        code: one of `RULES`.
        at: where the statement breaks it.
        name: the name in the statement that breaks it; never a literal.
        choices: the names that could stand there; without any the rule's own fix is printed.
    """
    rule, choices = RULES[code], tuple(choices)
    kind = StatementPrivacyError if rule.privacy else StatementError
    field = f"statement, line {at.line}, column {at.column}"
    text = f"{rule.text}: {name[:_LONGEST]!r}" if name else rule.text
    error = kind(field, f"{text} [{code}]", closest(name, choices) if choices else rule.fix)
    error.code, error.position, error.subject = code, at, (name, choices)
    return error

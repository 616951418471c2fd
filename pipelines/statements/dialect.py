"""The dialect: GoogleSQL with both spellings of a differentially private SELECT.

* ``SELECT WITH DIFFERENTIAL_PRIVACY OPTIONS(name = value, ...)`` with named arguments
  (``contribution_bounds_per_group => (0, 10)``), and
* ``SELECT WITH ANONYMIZATION OPTIONS(...)`` with ``ANON_*`` functions, ``CLAMPED BETWEEN``.

It round-trips: the text generated from a tree parses to an equal tree.  A function becomes a
`Private` node if its spelling says so (an ``ANON_`` name, a private argument, or a name that has
no other meaning here); ``statement`` makes one of the plain aggregates of a private select list.
"""

import logging
from collections.abc import Callable
from typing import Any, ClassVar

from sqlglot import exp
from sqlglot.dialects.bigquery import BigQuery
from sqlglot.generators.bigquery import BigQueryGenerator
from sqlglot.parsers.bigquery import BigQueryParser
from sqlglot.tokens import Token, TokenType

#: Its warnings quote the statement.
logging.getLogger("sqlglot").disabled = True

#: Names that always mean a private function.
ALWAYS = (
    "VAR",
    "VARIANCE",
    "VAR_POP",
    "STDDEV",
    "STDDEV_POP",
    "MEDIAN",
    "NTILE",
    "PERCENTILE",
    "PERCENTILE_CONT",
    "APPROX_QUANTILES",
    "QUANTILES",
)
#: Names that mean one with a private argument.
SOMETIMES = ("COUNT", "COUNTIF", "SUM", "AVG", "MIN", "MAX")
ANONYMIZED = tuple(f"ANON_{name}" for name in (*ALWAYS, *SOMETIMES) if name != "COUNTIF")


class PrivacyOptions(exp.Expression):
    """``WITH DIFFERENTIAL_PRIVACY OPTIONS(...)``: ``this`` is the spelling (a Var)."""

    arg_types: ClassVar[dict[str, bool]] = {"this": True, "expressions": False}


class Private(exp.Expression, exp.Func):
    """A private function: ``this`` is its name (a Var), ``expressions`` its arguments."""

    arg_types: ClassVar[dict[str, bool]] = {"this": True, "expressions": False}
    is_var_len_args = True


class Clamped(exp.Expression):
    """The expression ``this CLAMPED BETWEEN low AND high``."""

    arg_types: ClassVar[dict[str, bool]] = {"this": True, "low": True, "high": True}


class WithReport(exp.Expression):
    """The expression ``this WITH REPORT`` or ``this WITH REPORT(FORMAT = format)``."""

    arg_types: ClassVar[dict[str, bool]] = {"this": True, "format": False}


#: Nodes that stand in a private function only.
PRIVATE_ARGUMENTS = (exp.Kwarg, Clamped, WithReport)


def _always(name: str) -> Callable[[list[Any]], exp.Expr]:
    return lambda args: Private(this=exp.var(name), expressions=args)


def _sometimes(name: str, plain: Callable[..., exp.Expr]) -> Callable[[list[Any]], exp.Expr]:
    def build(args: list[Any]) -> exp.Expr:
        if any(isinstance(arg, PRIVATE_ARGUMENTS) for arg in args):
            return Private(this=exp.var(name), expressions=args)
        return plain(args)

    return build


class DpParser(BigQueryParser):
    """Parses the constructs that GoogleSQL's own parser lacks."""

    FUNCTIONS: ClassVar = {
        **BigQueryParser.FUNCTIONS,
        **{name: _always(name) for name in (*ALWAYS, *ANONYMIZED)},
        **{name: _sometimes(name, BigQueryParser.FUNCTIONS[name]) for name in SOMETIMES},
    }
    #: None of these may take a private function's arguments away from it.
    FUNCTION_PARSERS: ClassVar = {
        name: parse
        for name, parse in BigQueryParser.FUNCTION_PARSERS.items()
        if name not in (*ALWAYS, *SOMETIMES)
    }

    def _parse_column(self) -> exp.Expr | None:
        """Parse a column; a quoted name with dots is one name, where BigQuery takes it apart."""
        column: exp.Expr | None = super(BigQueryParser, self)._parse_column()
        return column

    def _parse_hint(self) -> exp.Expr | None:  # called right after SELECT
        if not self._match_text_seq("WITH"):
            return super()._parse_hint()
        if not self._match_texts(("DIFFERENTIAL_PRIVACY", "ANONYMIZATION")):
            self.raise_error("Expected DIFFERENTIAL_PRIVACY or ANONYMIZATION")
        spelling = exp.var(self._prev.text.upper()).update_positions(self._prev)
        options: list[Any] = []
        if self._match_text_seq("OPTIONS"):
            self._match_l_paren()
            if self._curr.token_type != TokenType.R_PAREN:
                options = self._parse_csv(self._parse_option)
            self._match_r_paren()
        return PrivacyOptions(this=spelling, expressions=options)

    def _parse_option(self) -> exp.Expr | None:
        self._advance()
        name = self._at(exp.var(self._prev.text.lower()), self._prev)
        if not self._match(TokenType.EQ):
            self.raise_error("Expected =")
        if self._match(TokenType.LIMIT):  # a word of the option optimise
            word = exp.var(self._prev.text).update_positions(self._prev)
            return exp.PropertyEQ(this=name, expression=word)
        value = self._parse_unary()
        if isinstance(value, exp.Array):  # a list of names
            value = exp.Tuple(expressions=value.expressions)
        return exp.PropertyEQ(this=name, expression=value)

    def _parse_lambda(self, alias: bool = False) -> exp.Expr | None:
        first = self._curr
        this = self._distinct() or super()._parse_lambda(alias=alias)
        if isinstance(this, exp.Kwarg):
            self._at(this.this, first)
        if this is not None and self._match_text_seq("CLAMPED", "BETWEEN"):
            low = self._parse_unary()
            if not self._match(TokenType.AND):
                self.raise_error("Expected AND")
            this = Clamped(this=this, low=low, high=self._parse_unary())
        if this is not None and self._match_text_seq("WITH", "REPORT"):
            this = WithReport(this=this, format=self._report_format())
        return this

    def _report_format(self) -> exp.Expr | None:
        if not self._match(TokenType.L_PAREN):
            return None
        if not self._match_text_seq("FORMAT") or not self._match(TokenType.EQ):
            self.raise_error("Expected FORMAT =")
        self._advance()
        name = self._at(exp.var(self._prev.text.upper()), self._prev)
        self._match_r_paren()
        return name

    def _at(self, name: exp.Expr, token: Token) -> exp.Expr:
        """Give a name its place; a literal is none, because errors repeat names."""
        kind = token.token_type
        first = self.sql[token.start]
        if kind.name.endswith("STRING") or not (first == "`" or first.isidentifier()):
            self.raise_error("Expected a name", token)
        return name.update_positions(token)

    def _distinct(self) -> exp.Expr | None:
        """DISTINCT and what it is of, up to a named argument."""
        if not self._match(TokenType.DISTINCT):
            return None
        expressions = [self._parse_disjunction()]
        while self._curr.token_type == TokenType.COMMA and not self._named_next():
            self._advance()
            expressions.append(self._parse_disjunction())
        return exp.Distinct(expressions=expressions)

    def _named_next(self) -> bool:
        after = self._index + 2
        return bool(
            after < len(self._tokens) and self._tokens[after].token_type == TokenType.FARROW
        )


def _options_sql(generator: Any, node: exp.Expr) -> str:
    given = ", ".join(
        f"{option.name} = {generator.sql(option, 'expression')}" for option in node.expressions
    )
    return f" WITH {node.name} OPTIONS({given})" if given else f" WITH {node.name}"


class DpGenerator(BigQueryGenerator):
    """Writes the constructs that `DpParser` reads."""

    #: BigQuery refuses NULLS LAST in some windows; without it two questions would have one text.
    NULL_ORDERING_SUPPORTED = True
    EXCEPT_INTERSECT_SUPPORT_ALL_CLAUSE = True

    TRANSFORMS: ClassVar = {
        **BigQueryGenerator.TRANSFORMS,
        PrivacyOptions: _options_sql,
        Private: lambda self, node: f"{node.name}({self.expressions(node, flat=True)})",
        Clamped: lambda self, node: (
            f"{self.sql(node, 'this')} CLAMPED BETWEEN {self.sql(node, 'low')}"
            f" AND {self.sql(node, 'high')}"
        ),
        WithReport: lambda self, node: (
            f"{self.sql(node, 'this')} WITH REPORT"
            + (f"(FORMAT = {node.text('format')})" if node.args.get("format") else "")
        ),
    }


class DpSql(BigQuery):
    """The dialect (sqlglot knows it as ``dpsql``)."""

    Parser = DpParser
    Generator = DpGenerator
    #: Types are found once, when all names are resolved.
    ANNOTATE_ALL_SCOPES: ClassVar = False
    #: Every column is named with its relation, so that a select item called like a table takes
    #: nothing away.
    PROJECTION_ALIASES_SHADOW_SOURCE_NAMES: ClassVar = False

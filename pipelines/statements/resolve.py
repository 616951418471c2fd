"""Name resolution: a text becomes one tree in which every column names its relation.

WITH parts are put in the place of their names first (they are deterministic, so that a part used
twice is the same relation twice), then sqlglot's ``qualify`` resolves names, ``*`` and USING.
Every column is checked again by `ownership`: qualify is trusted with no rule.
"""

from collections.abc import Mapping

from sqlglot import exp
from sqlglot.errors import SqlglotError
from sqlglot.optimizer.annotate_types import annotate_types
from sqlglot.optimizer.normalize_identifiers import normalize_identifiers
from sqlglot.optimizer.qualify_columns import qualify_columns, quote_identifiers
from sqlglot.optimizer.qualify_tables import qualify_tables
from sqlglot.schema import MappingSchema
from sqlglot.tokens import TokenType

from dpstream.accounting.errors import instance
from dpstream.pipelines.statements.allowed import (
    MAX_CHARACTERS,
    MAX_DEPTH,
    MAX_NODES,
    check_nodes,
    require,
)
from dpstream.pipelines.statements.dialect import DpSql
from dpstream.pipelines.statements.errors import Position, position, refusal

_DIALECT = DpSql()
_OPEN = (TokenType.L_PAREN, TokenType.CASE, TokenType.L_BRACKET)
_CLOSE = (TokenType.R_PAREN, TokenType.END, TokenType.R_BRACKET)


def parsed(text: str) -> exp.Query:
    """Return the tree of one statement, of allowed nodes only.

    Raises:
        DpstreamError: it is none.
    """
    if len(text) > MAX_CHARACTERS:
        raise refusal("too-large")
    try:
        tokens = _DIALECT.tokenize(text)
        _check_tokens(tokens)
        trees = [tree for tree in _DIALECT.parser().parse(tokens, text) if tree is not None]
        require(len(trees) == 1, "one-statement")
        [tree] = trees
        require(isinstance(tree, exp.Query), "select-only")
        check_nodes(tree)
    except SqlglotError as error:
        raise refusal("syntax", _where(error)) from None
    except RecursionError:
        raise refusal("too-large") from None
    except (AttributeError, TypeError, ValueError, IndexError, KeyError, AssertionError):
        # The parser met something that it does not expect: it never passes on what.
        raise refusal("syntax") from None
    return instance(tree, exp.Query)


def _check_tokens(tokens: list) -> None:  # type: ignore[type-arg]
    starts = (TokenType.SELECT, TokenType.WITH, TokenType.L_PAREN)
    require(tokens, "one-statement")
    if tokens[0].token_type not in starts:
        raise refusal("select-only", Position(tokens[0].line, 1))
    if len(tokens) > MAX_NODES:
        raise refusal("too-large")
    depth = 0
    for token in tokens:
        depth += (token.token_type in _OPEN) - (token.token_type in _CLOSE)
        if depth > MAX_DEPTH:
            raise refusal("too-large", Position(token.line, token.col))


def _where(error: SqlglotError) -> Position:
    details = getattr(error, "errors", None) or [{}]
    return Position(details[0].get("line") or 1, details[0].get("col") or 1)


def inlined(tree: exp.Query) -> exp.Query:
    """Return the tree with the queries of its WITH parts in place of their names.

    Raises:
        DpstreamError: it grows too large, or is recursive.
    """
    tree = normalize_identifiers(tree, dialect=_DIALECT)
    size = [sum(1 for _ in tree.walk())]
    _inline(tree, {}, size)
    return tree


def _inline(node: exp.Expr, definitions: Mapping[str, exp.Expr], size: list[int]) -> None:
    with_ = node.args.get("with_")
    if with_ is not None:
        definitions = dict(definitions)
        for part in with_.expressions:
            require(part.args.get("alias") is not None, "syntax", part)
            _inline(part.this, definitions, size)
            definitions[part.alias] = part.this  # type: ignore[index]
        node.set("with_", None)
    for child in list(node.iter_expressions()):
        if isinstance(child, exp.Table) and child.name in definitions:
            query = definitions[child.name].copy()
            size[0] += sum(1 for _ in query.walk())
            require(size[0] <= MAX_NODES, "too-large", child)
            alias = exp.TableAlias(this=exp.to_identifier(child.alias_or_name))
            alias.this.meta.update(child.this.meta)
            child.replace(exp.Subquery(this=query, alias=alias))
        else:
            _inline(child, definitions, size)


def qualified(tree: exp.Query, schema: Mapping[str, Mapping[str, str]]) -> exp.Query:
    """Return the tree with every column named by its relation, and types where they are known.

    Args:
        tree: without WITH.
        schema: of each table the columns with their types; nothing else exists.

    Raises:
        DpstreamError: a name is not known or not unique.
    """
    for table in tree.find_all(exp.Table):
        require(table.name in schema, "unknown-table", table)
    plain = {table: dict(columns) for table, columns in schema.items()}
    mapping = MappingSchema(plain, dialect=_DIALECT, normalize=False)
    try:
        tree = qualify_tables(tree, dialect=_DIALECT)
        tree = qualify_columns(tree, mapping)
        tree = annotate_types(tree, schema=mapping, dialect=_DIALECT)
        tree = quote_identifiers(tree, dialect=_DIALECT)
    except SqlglotError:
        raise refusal("unknown-column", _unresolved(tree, schema)) from None
    except RecursionError:
        raise refusal("too-large") from None
    except (AttributeError, TypeError, ValueError, IndexError, KeyError, AssertionError):
        raise refusal("syntax") from None
    return tree


def _unresolved(tree: exp.Expr, schema: Mapping[str, Mapping[str, str]]) -> Position:
    """The first column whose name no table has, or the first without a relation."""
    names = {name for columns in schema.values() for name in columns}
    columns = list(tree.find_all(exp.Column, bfs=False))
    strange = [c for c in columns if c.name not in names] or [c for c in columns if not c.table]
    return position(strange[0]) if strange else Position(1, 1)

"""Expressions of DuckDB's, put together from nodes of GoogleSQL."""

from collections.abc import Callable

from sqlglot import exp

FLOATS = (exp.DType.DOUBLE, exp.DType.FLOAT)
DECIMALS = (exp.DType.DECIMAL, exp.DType.BIGDECIMAL)
#: How a comparison is written.
SIGNS: dict[type[exp.Expr], str] = {
    exp.EQ: "=",
    exp.NEQ: "<>",
    exp.LT: "<",
    exp.LTE: "<=",
    exp.GT: ">",
    exp.GTE: ">=",
}


def duckdb(text: str, **parts: exp.Expr) -> exp.Expr:
    """An expression of DuckDB's with parts put in."""
    tree = exp.maybe_parse(text, dialect="duckdb")
    return exp.replace_placeholders(tree, **parts).copy()  # no node stands in two places


def decimal() -> exp.DataType:
    """The type that decimals have where two of them meet."""
    return exp.DataType.build("DECIMAL(38, 9)", dialect="duckdb")


def kind_of(node: exp.Expr) -> exp.DType | None:
    """The type of a node as far as it is known."""
    return None if node.type is None else node.type.this


def is_literal(node: exp.Expr) -> bool:
    """A number or text as it is written, with its sign."""
    return isinstance(node.this if isinstance(node, exp.Neg) else node, exp.Literal)


def once(form: str, **parts: exp.Expr) -> exp.Expr:
    """A form that names its parts (``it_.a``, ...) as often as it likes; each is evaluated once."""
    fields = ", ".join(f"'{name}': :{name}" for name in parts)
    return duckdb(f"LIST_TRANSFORM([{{{fields}}}], lambda it_: {form})[1]", **parts)


def named(make: Callable[[dict[str, str]], str], parts: dict[str, exp.Expr]) -> exp.Expr:
    """A form by the names of its parts: themselves if they are short."""
    if all(isinstance(of, exp.Column) or is_literal(of) for of in parts.values()):
        return duckdb(make({name: f":{name}" for name in parts}), **parts)
    return once(make({name: f"it_.{name}" for name in parts}), **parts)

"""What compares, in DuckDB's words: NaN is not equal to, above or below anything.

DuckDB's NaN equals itself and is above all numbers.  Each form names its operands once, or they
are columns (`forms`).
"""

from collections.abc import Callable
from typing import Any

from sqlglot import exp

from dpstream.pipelines.statements.expressions import FLOATS, SIGNS, is_literal, kind_of, named


def _compared(node: exp.Expr) -> exp.Expr:
    """DuckDB's NaN equals itself and is above all numbers."""
    sides = {"a": node.left, "b": node.right}
    floats = [s for s, of in sides.items() if kind_of(of) in FLOATS and not is_literal(of)]
    if not floats:
        return node
    otherwise = "TRUE" if isinstance(node, exp.NEQ) else "FALSE"
    sign = SIGNS[type(node)]

    def form(names: dict[str, str]) -> str:
        absent = _unlike(names["a"], names["b"], "a" in floats, "b" in floats)
        return f"CASE WHEN {absent} THEN {otherwise} ELSE {names['a']} {sign} {names['b']} END"

    return named(form, sides)


def _unlike(a: str, b: str, *floats: bool) -> str:
    """Whether one of two names, of which some are floats, is NaN and the other is there."""
    sides = [pair for pair, is_float in zip(((a, b), (b, a)), floats, strict=True) if is_float]
    return " OR ".join(f"({_nan(x)} AND NOT {y} IS NULL)" for x, y in sides) or "FALSE"


def _nan(name: str) -> str:
    return f"ISNAN(TRY_CAST({name} AS DOUBLE))"


def _may_be_nan(node: exp.Expr) -> bool:
    return kind_of(node) in FLOATS and not is_literal(node)


def _within(node: exp.Expr) -> exp.Expr:
    """IN: DuckDB finds NaN among others."""
    if not (_may_be_nan(node.this) and any(map(_may_be_nan, node.expressions))):
        return node
    parts = {f"e{i}": of for i, of in enumerate(node.expressions)}

    def form(names: dict[str, str]) -> str:
        x, others = names["x"], [names[name] for name in parts]
        null = " OR ".join(f"{of} IS NULL" for of in others)
        return (
            f"CASE WHEN {_nan(x)} THEN CASE WHEN {null} THEN NULL ELSE FALSE END "
            f"ELSE {x} IN ({', '.join(others)}) END"
        )

    return named(form, {"x": node.this, **parts})


def _between(node: exp.Expr) -> exp.Expr:
    parts = {"x": node.this, "l": node.args["low"], "h": node.args["high"]}
    may = {name: _may_be_nan(of) for name, of in parts.items()}
    if not any(may.values()):
        return node

    def side(names: dict[str, str], end: str, sign: str) -> str:
        x, of = names["x"], names[end]
        return f"CASE WHEN {_unlike(x, of, may['x'], may[end])} THEN FALSE ELSE {x} {sign} {of} END"

    def form(names: dict[str, str]) -> str:
        return f"({side(names, 'l', '>=')}) AND ({side(names, 'h', '<=')})"

    return exp.Paren(this=named(form, parts))


def _null_if(node: exp.Expr) -> exp.Expr:
    if not (_may_be_nan(node.this) and _may_be_nan(node.expression)):
        return node
    return named(
        lambda names: (
            f"CASE WHEN {_nan(names['a'])} THEN {names['a']} "
            f"ELSE NULLIF({names['a']}, {names['b']}) END"
        ),
        {"a": node.this, "b": node.expression},
    )


def _case(node: exp.Expr) -> exp.Expr:
    """CASE with an operand: the number of the first that is equal, and CASE of that."""
    of, whens = node.this, node.args["ifs"]
    if of is None or not (_may_be_nan(of) and any(_may_be_nan(when.this) for when in whens)):
        return node
    parts = {f"w{i}": when.this for i, when in enumerate(whens)}

    def form(names: dict[str, str]) -> str:
        tests = (f"WHEN {names['x']} = {names[f'w{i}']} THEN {i}" for i in range(len(whens)))
        return f"CASE WHEN {_nan(names['x'])} THEN -1 {' '.join(tests)} ELSE -1 END"

    number = named(form, {"x": of, **parts})
    ifs = [
        exp.If(this=exp.Literal.number(i), true=when.args["true"]) for i, when in enumerate(whens)
    ]
    return exp.Case(this=number, ifs=ifs, default=node.args.get("default"))


def _extreme(node: exp.Expr) -> exp.Expr:
    """LEAST and GREATEST: DuckDB leaves NULL out, and takes NaN for the largest of all."""
    operands = [node.this, *node.expressions]
    parts = {f"p{i}": of for i, of in enumerate(operands)}
    floats = [name for name, of in parts.items() if _may_be_nan(of)]
    name = "LEAST" if isinstance(node, exp.Least) else "GREATEST"

    def form(names: dict[str, str]) -> str:
        null = " OR ".join(f"{names[part]} IS NULL" for part in parts)
        nan = " OR ".join(_nan(names[part]) for part in floats)
        absent = f"WHEN {nan} THEN CAST('nan' AS DOUBLE) " if floats else ""
        return f"CASE WHEN {null} THEN NULL {absent}ELSE {name}({', '.join(names.values())}) END"

    return named(form, parts)


#: By the nodes that have one.
FORMS: dict[type[exp.Expr], Callable[[Any], exp.Expr]] = {
    **dict.fromkeys(SIGNS, _compared),
    exp.In: _within,
    exp.Between: _between,
    exp.Nullif: _null_if,
    exp.Case: _case,
    exp.Least: _extreme,
    exp.Greatest: _extreme,
}

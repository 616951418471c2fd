"""Texts in DuckDB's words: bounded before they are made, and with GoogleSQL's ends.

How much memory is used would tell of a row, so what puts texts together is NULL beyond `MAX_TEXT`
bytes, and is not made before.  Each form names its operands once (`forms`).
"""

from collections.abc import Callable
from typing import Any

from sqlglot import exp

from dpstream.pipelines.statements.expressions import kind_of, once

#: Bytes of a text that is put together of others.
MAX_TEXT = 65_536
_BYTES = (exp.DType.VARBINARY, exp.DType.BINARY)


def _joined(node: exp.Expr) -> exp.Expr:
    """CONCAT and ``||``."""
    parts = [node.left, node.right] if isinstance(node, exp.DPipe) else node.expressions
    if len(parts) == 1:
        return parts[0]
    names = {f"p{i}": part for i, part in enumerate(parts)}
    size = "OCTET_LENGTH" if any(kind_of(part) in _BYTES for part in parts) else "STRLEN"
    long = " + ".join(f"{size}(it_.{name})" for name in names)
    concatenation = " || ".join(f"it_.{name}" for name in names)
    return once(f"CASE WHEN {long} <= {MAX_TEXT} THEN {concatenation} END", **names)


def _replaced(node: exp.Expr) -> exp.Expr:
    parts = {"a": node.this, "b": node.expression, "c": node.args["replacement"]}
    times = "(STRLEN(it_.a) - STRLEN(REPLACE(it_.a, it_.b, ''))) // STRLEN(it_.b)"
    return once(
        f"CASE WHEN STRLEN(it_.b) = 0 AND STRLEN(it_.c) >= 0 THEN it_.a "
        f"WHEN STRLEN(it_.a) + {times} * (STRLEN(it_.c) - STRLEN(it_.b)) <= {MAX_TEXT} "
        f"THEN REPLACE(it_.a, it_.b, it_.c) END",
        **parts,
    )


def _alike(node: exp.Expr) -> exp.Expr:
    """A pattern may not end within an escape: DuckDB fails on that, also under TRY."""
    of, pattern = node.this, node.expression
    if isinstance(pattern, exp.Literal) and "\\" not in pattern.name:
        return node
    open_ = "(LENGTH(it_.p) - LENGTH(RTRIM(it_.p, '\\'))) % 2 = 1"
    pattern_text = f"CASE WHEN {open_} THEN NULL ELSE it_.p END"
    return once(f"it_.s LIKE ({pattern_text}) ESCAPE '\\'", s=of, p=pattern)


def _part(node: exp.Expr) -> exp.Expr:
    """SUBSTR."""
    start, length = node.args.get("start"), node.args.get("length")
    if start is None:
        return node
    plain = isinstance(start, exp.Literal) and start.is_int and int(start.name) > 0
    if plain and (length is None or isinstance(length, exp.Literal)):
        return node
    parts = {"s": node.this, "p": start} | ({} if length is None else {"n": length})
    begin = "CASE WHEN it_.p = 0 OR it_.p < -LENGTH(it_.s) THEN 1 ELSE it_.p END"
    if length is None:
        return once(f"SUBSTRING(it_.s, {begin})", **parts)
    return once(f"CASE WHEN it_.n >= 0 THEN SUBSTRING(it_.s, {begin}, it_.n) END", **parts)


def _end(node: exp.Expr) -> exp.Expr:
    """LEFT and RIGHT."""
    if isinstance(node.expression, exp.Literal):
        return node
    name = "LEFT" if isinstance(node, exp.Left) else "RIGHT"
    form = f"CASE WHEN it_.n >= 0 THEN {name}(it_.s, it_.n) END"
    return once(form, s=node.this, n=node.expression)


#: By the nodes that have one.
FORMS: dict[type[exp.Expr], Callable[[Any], exp.Expr]] = {
    exp.Concat: _joined,
    exp.DPipe: _joined,
    exp.Replace: _replaced,
    exp.Like: _alike,
    exp.Substring: _part,
    exp.Left: _end,
    exp.Right: _end,
}

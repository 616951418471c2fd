"""Refusals of a statement: where it stands, which rule it breaks and a fix that works.

Every text is a constant of this file.  Nothing of the statement but a line and a column enters
an error, so that no literal (which may be somebody's name or number) is ever shown or logged.
The libraries below quote the statement in their own errors; those are never passed on.
"""

from typing import TYPE_CHECKING, Any, NamedTuple

from dpstream.accounting.errors import DpstreamError, PolicyError, UsageError
from dpstream.pipelines.statements.rules import RULES

if TYPE_CHECKING:
    from sqlglot import exp


class Position(NamedTuple):
    """Where a part of a statement begins, both counted from 1."""

    line: int
    column: int


_START = Position(1, 1)


def position(node: "exp.Expr") -> Position:
    """Where a node stands: its own first token that is known, or that of what surrounds it."""
    around: exp.Expr | None = node
    while around is not None:
        positions = [n.meta for n in around.walk() if "line" in n.meta]
        if positions:
            first = min(positions, key=lambda meta: meta["start"])
            return Position(first["line"], first["col"] - (first["end"] - first["start"]))
        around = around.parent
    return Position(1, 1)


class StatementError(UsageError):
    """The statement is not usable as written (exit 2)."""

    code: str
    position: Position

    def __reduce__(self) -> tuple[Any, ...]:
        return refusal, (self.code, self.position)


class StatementPrivacyError(PolicyError):
    """The statement has no private answer as written (exit 3)."""

    code: str
    position: Position

    def __reduce__(self) -> tuple[Any, ...]:
        return refusal, (self.code, self.position)


def refusal(code: str, at: Position = _START) -> DpstreamError:
    """The error of a rule, to be raised.

    Args:
        code: one of `rules.RULES`.
        at: where the statement breaks it.
    """
    rule = RULES[code]
    kind = StatementPrivacyError if rule.privacy else StatementError
    field = f"statement, line {at.line}, column {at.column}"
    error = kind(field, f"{rule.text} [{code}]", rule.fix)
    error.code, error.position = code, at
    return error

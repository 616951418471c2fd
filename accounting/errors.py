"""Errors with a code, a field, a rule and a fix; they never carry a value of a record.

Every refusal a person can meet is one of these classes.  The text is built from public
parts only: the name of a field of the job, the rule it broke and what to do about it.
"""

import difflib
from collections.abc import Iterable
from typing import TypeVar

Value = TypeVar("Value")
#: Characters of an unknown name that are compared, and names that a message lists.
_COMPARED, _LISTED = 100, 50


#: What begins a run anew, for the fix of an error.
NEW_RUN = "begin a new run, which is charged again: `dpstream run JOB --fresh`"


class DpstreamError(Exception):
    """Base of all coded errors.

    Args:
        field: the public name of what is wrong (``budget.epsilon``, ``table.unit_column``).
        rule: the rule that is not met, in words.
        fix: what the reader can do about it.
    """

    exit_code = 4
    kind = "failed"

    def __init__(self, field: str, rule: str, fix: str) -> None:
        self.field, self.rule, self.fix = field, rule, fix
        super().__init__(f"{field}: {rule}. Fix: {fix}.")

    def __reduce__(self) -> tuple[type, tuple[str, str, str]]:
        return type(self), (self.field, self.rule, self.fix)

    def as_dict(self) -> dict[str, str | int]:
        """Return the error for machines (``--json``)."""
        return {
            "error": self.kind,
            "exit_code": self.exit_code,
            "field": self.field,
            "rule": self.rule,
            "fix": self.fix,
        }


class UsageError(DpstreamError):
    """Correct what you wrote: a flag, the project file, or a file or secret that it names is wrong,
    absent or open to others, or a new name is taken (exit 2)."""

    exit_code = 2
    kind = "usage"


class PolicyError(DpstreamError):
    """Well-formed, but privacy, the limit, or what an account, a store or a sink holds forbids it
    (exit 3)."""

    exit_code = 3
    kind = "refused"


class RunError(DpstreamError):
    """The machine, a file system, a service or a runner failed; never caused by data (exit 4)."""


def refuse_first(*guards: tuple[object, DpstreamError]) -> None:
    """Refuse by the first of some guards that applies.

    Args:
        guards: (whether it applies, the refusal), in the order in which they are looked at.

    Raises:
        DpstreamError: one applies.
    """
    for applies, refusal in guards:
        if applies:
            raise refusal


def nearest(name: str, candidates: Iterable[str], cutoff: float = 0.6) -> str:
    """Return ``did you mean 'x'? `` for a name that resembles a candidate, else nothing."""
    near = difflib.get_close_matches(name[:_COMPARED], candidates, 1, cutoff)
    return f"did you mean '{near[0]}'? " if near else ""


def closest(name: str, candidates: Iterable[str]) -> str:
    """Return ``did you mean 'x'? known here: ...`` for an unknown name."""
    names = sorted(candidates)
    more = f", and {len(names) - _LISTED:,} more" if len(names) > _LISTED else ""
    return f"{nearest(name, names)}known here: {', '.join(names[:_LISTED]) or 'none'}{more}"


def column_list(names: Iterable[str]) -> str:
    """Return names of columns to choose from, in order; quoted where they are no plain words.

    Long names and those that cannot be printed are left out, and all but the first ones.
    """
    plain = [n for n in names if n.isprintable() and 0 < len(n) <= _COMPARED]
    more = ", ..." if len(plain) > _LISTED else ""
    return ", ".join(n if n.isidentifier() else repr(n) for n in plain[:_LISTED]) + more


class AccountWarning(UserWarning):
    """Warns whoever charges an account; issued by the Python interface."""


class InvariantError(AssertionError):
    """Signals that the program is in a state that its own rules exclude.

    It stands where Python's ``assert`` would, which ``python -O`` drops.  It has no code, so that
    it is treated as an error that nobody foresaw: its traceback goes to the private log.

    Args:
        rule: what does not hold, in public words.
    """


def required(value: Value | None, rule: str) -> Value:
    """Return a value that the program's own rules guarantee to be there.

    Raises:
        InvariantError: it is ``None``.
    """
    if value is None:
        raise InvariantError(rule)
    return value


def instance(value: object, kind: type[Value]) -> Value:
    """Return a value that the program's own rules guarantee to be of a kind.

    Raises:
        InvariantError: it is of another.
    """
    if not isinstance(value, kind):
        raise InvariantError(f"{type(value).__name__} is no {kind.__name__}")
    return value

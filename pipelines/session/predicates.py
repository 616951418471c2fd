"""STUB (signatures only)."""

from typing import Literal, Protocol

from dpstream.accounting.arrays import Int64
from dpstream.accounting.regions.space import Space
from dpstream.accounting.regions.spent import Spent


class Views(Protocol):
    """What predicates on consumption are resolved with (`state.ledger.regions.Views`)."""

    def spent(self, kind: Literal["epsilon", "rho"]) -> Spent:
        """What every point has spent."""


class Predicate:
    """A checked predicate.

    Attributes:
        kinds: of budgets whose consumption it speaks of.
    """

    kinds: frozenset[Literal["epsilon", "rho"]]

    def boxes(self, views: Views | None = None) -> Int64:
        """(m, d, 2) the points where it is true, as disjoint boxes (perhaps none).

        Args:
            views: needed if ``kinds`` are any.

        Raises:
            UsageError: more boxes than one query may have.
        """
        raise NotImplementedError


def predicate_of(text: str, space: Space) -> Predicate:
    """The predicate of a text; an empty one is true everywhere.

    Raises:
        UsageError: it is none; says where and what to write, never a value.
    """
    raise NotImplementedError


def boxes_of(text: str, space: Space, views: Views | None = None) -> Int64:
    """``predicate_of(text, space).boxes(views)``."""
    return predicate_of(text, space).boxes(views)

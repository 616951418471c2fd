"""Calls that fail once, before or after they took effect."""

from typing import Any
from unittest import mock


class FailureError(Exception):
    """A failure of the machine."""


class FailOnce:
    """Wraps functions; the nth call of all fails, before or after it took effect.

    A call that fails by itself, and is tried otherwise, has no effect that another failure could
    come after: it is not counted there.

    Attributes:
        commits: calls that made something durable.
    """

    def __init__(self, nth: int, after: bool) -> None:
        self.left, self.after, self.commits = nth, after, 0

    def wrap(self, owner: Any, name: str) -> Any:
        real = getattr(owner, name)

        def call(*args: Any, **options: Any) -> Any:
            self.left -= not self.after
            if self.left == 0 and not self.after:
                raise FailureError
            out = real(*args, **options)
            self.commits += name.startswith("commit") and not name.endswith("releases")
            self.left -= self.after
            if self.left == 0 and self.after:
                raise FailureError
            return out

        return mock.patch.object(owner, name, call)

    @property
    def failed(self) -> bool:
        return self.left <= 0

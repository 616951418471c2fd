"""An object whose own ``close`` is called at the end of a ``with`` block."""

from abc import ABC, abstractmethod
from types import TracebackType
from typing import Self


class Closing(ABC):
    """A context whose end calls ``close``, whether the block succeeds or fails."""

    @abstractmethod
    def close(self) -> None:
        """Release what the object holds; a second call has no effect."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

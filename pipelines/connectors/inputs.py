"""What a run needs to know of its source, whatever kind it is."""

from abc import ABC, abstractmethod
from typing import Any

from dpstream.pipelines.connectors.backpressure import Backpressure
from dpstream.pipelines.jobs.job import Job


class Input(ABC):
    """A job's source.

    Attributes:
        bounded: whether all of it is there when the run begins.
    """

    bounded = False

    def __init__(self, job: Job) -> None:
        self.job = job

    @abstractmethod
    def identity(self) -> list[bytes]:
        """Parts that tell this input from others: a store goes on with no other.

        Raises:
            UsageError, RunError: there is no such source, or it cannot be reached.
        """

    @abstractmethod
    def read(self, begin: int = 0, backpressure: Backpressure | None = None) -> Any:
        """A transform from ``PBegin`` to the outputs ``records`` and ``dead_letter``.

        Batches of ``records`` have the columns ``job.columns`` and say in their schema's metadata
        where their first row stands (see `pipelines.connectors.files.source`).  A transform whose
        elements have watermarks of their own also offers ``as_one()``: the same reader as a single
        element with a single watermark, for engines that keep no more than one.

        Args:
            begin: records with stamps (micros) before it are not needed any more.
            backpressure: keeps a source without end from running ahead of the releases.
        """

    def state(self) -> Any:
        """What must be the same before and after a run (``None`` where nothing can be said)."""
        return None

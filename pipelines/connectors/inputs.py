"""What a run needs to know of its source, whatever kind it is."""

from abc import ABC, abstractmethod
from typing import Any

from typing_extensions import override

from dpstream.accounting.errors import UsageError
from dpstream.pipelines.connectors.backpressure import Brake
from dpstream.pipelines.connectors.files.input_manifest import fingerprint_parts, stamps
from dpstream.pipelines.connectors.files.source import ReadFiles
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
    def read(self, begin: int = 0, brake: Brake | None = None, spread: bool = True) -> Any:
        """A transform from ``PBegin`` to the outputs ``records`` and ``dead_letter``.

        Batches of ``records`` have the columns ``job.columns`` and say in their schema's metadata
        where their first row stands (see `pipelines.connectors.files.source`).

        Args:
            begin: records with stamps (micros) before it are not needed any more.
            brake: keeps a source without end from running ahead of the releases.
            spread: it may be read by several workers, each with a watermark of its own.
        """

    def state(self) -> Any:
        """What must be the same before and after a run (``None`` where nothing can be said)."""
        return None


class FilesInput(Input):
    """Files that are all there."""

    bounded = True

    @override
    def identity(self) -> list[bytes]:
        return [
            f"{n}\0{size}\0{digest}".encode() for n, size, digest in fingerprint_parts(self.job)
        ]

    @override
    def read(self, begin: int = 0, brake: Brake | None = None, spread: bool = True) -> Any:
        return ReadFiles(self.job)

    @override
    def state(self) -> Any:
        return stamps(self.job)


def input_of(job: Job) -> Input:
    """The input of a job by its kind.

    Raises:
        UsageError: the source cannot be used as the job says, or its package is missing.
    """
    if job.source.kind == "kafka":
        try:
            from dpstream.pipelines.connectors.kafka.source import KafkaInput
        except ModuleNotFoundError:
            raise UsageError(
                "source.kind", "'kafka' needs Kafka's client", "pip install 'dpstream[kafka]'"
            ) from None
        return KafkaInput(job)
    if job.source.kind == "folder":
        from dpstream.pipelines.connectors.folder.source import FolderInput

        return FolderInput(job)
    if job.source.kind == "pubsub":
        from dpstream.pipelines.connectors.pubsub.source import PubSubInput

        return PubSubInput(job)
    return FilesInput(job)

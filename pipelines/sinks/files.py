"""The sink of files: a folder with one file per release and the manifest beside them.

``run.json`` names the run, ``run-epoch-1.json`` a further epoch of it; the set of published
releases is the listing of the folder.  A file is made whole or not at all, so it is its own seal.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
import pyarrow as pa
from typing_extensions import override

from accounting.errors import PolicyError, RunError
from pipelines.jobs.tables import SinkKind
from pipelines.sinks import write as sinks
from pipelines.sinks.formats import encode, put_once, release_files, remove_drafts, same_content
from pipelines.sinks.sink import Manifest, Name, Published, Sink


class FileSink(Sink):
    """Files below a folder.

    Args:
        folder: where they are.
        kind: ``parquet``, ``csv`` or ``jsonl``.
    """

    field, another = "sink.path", "an empty folder"

    def __init__(self, folder: str | Path, kind: SinkKind) -> None:
        self.folder, self.kind = Path(folder), kind

    @property
    @override
    def place(self) -> str:
        return str(self.folder)

    @property
    @override
    def words(self) -> str:
        return f"{self.kind} files below {self.folder}"

    @override
    def prepare(self, restoring: bool = False) -> None:
        """Folders are made when the first file is; nothing is refused."""
        remove_drafts(self.folder)

    @override
    def used(self) -> bool:
        return bool(_manifest_files(self.folder)) or any(release_files(self.folder))

    @override
    def manifests(self) -> list[Manifest | None]:
        return [_read(path) for path in _manifest_files(self.folder)]

    @override
    def put_manifest(self, manifest: Manifest) -> None:
        data = msgspec.json.format(msgspec.json.encode(manifest), indent=2) + b"\n"
        try:
            put_once(manifest_path(self.folder, manifest.epoch), data)
        except OSError:
            raise RunError("sink.path", "cannot be written", "check disk and permissions") from None

    @override
    def published(self) -> Iterator[Published]:
        for path in release_files(self.folder):
            numbers = [part.rpartition("-")[2] for part in (path.parent.name, path.stem)]
            if not all(n.isdecimal() for n in numbers):
                raise PolicyError(
                    "sink.path",
                    "holds a file that is no release of this run",
                    "use an empty folder",
                )
            yield Published(int(numbers[0]), int(numbers[1]), path)

    @override
    def same(self, one: Published, batch: pa.RecordBatch) -> bool:
        kind = one.proof.suffix[1:]
        return same_content(one.proof, encode(batch, kind), kind)

    @override
    def holds(self, batch: pa.RecordBatch) -> bool:
        return sinks.compare_release(self.folder, self.kind, batch)

    @override
    def write(self, batches: Sequence[pa.RecordBatch], only_compare: bool = False) -> list[Name]:
        return sinks.write_releases(self.folder, self.kind, batches, only_compare)

    @override
    def close(self) -> None:
        """No client to let go of."""


def manifest_path(folder: Path, epoch: int = 0) -> Path:
    """Where the manifest of an epoch is."""
    return folder / ("run.json" if epoch == 0 else f"run-epoch-{epoch}.json")


def _manifest_files(folder: Path) -> list[Path]:
    return [*folder.glob("run.json"), *sorted(folder.glob("run-epoch-*.json"))]


def _read(path: Path) -> Manifest | None:
    try:
        return msgspec.json.decode(path.read_bytes(), type=Manifest)
    except (OSError, msgspec.MsgspecError):
        return None

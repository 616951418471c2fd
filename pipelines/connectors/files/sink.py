"""The sink of files: a folder with the releases and the manifest beside them.

``run.json`` names the run, ``run-epoch-1.json`` a further epoch of it.  ``guarantee.json`` (and
``guarantee-epoch-1.json``) is there before it, with the run's facts (`accounting.facts`), which
Parquet releases also have in their metadata.  The set of published
releases is the listing of the folder.  A file is made whole or not at all, so it is its own seal:
``window-000012/trigger-000005.parquet``, written once, never changed.  Names, order and bytes are
functions of the releases alone.  A file that was damaged since is written again, by whoever comes
to write the same release, or to compare it.

A release of several parts is a folder of that name with a file for each,
``window-000012/trigger-000005.parquet/part-000000-of-000040.parquet``.  Parts are written below a
hidden name, each like a release, and the folder gets its own name when all are there: they appear
together.  A writer that is cut off leaves the parts that it has written, and the next one compares
them and writes the others.

**Comparing.**  A release's file that is held against what the store committed is the same, damaged,
or another release.  Bytes decide where the library that writes them is of one version (Parquet
names it in ``created_by``; of text files the bytes always do), content where it is not.  A file
that differs is *damaged* when no run can have written it, or when it says what it should in other
bytes: it may be written again, for no published value changes by that.  Everything else may be
another release under this name, which must stay; damage that made one number of a text file another
number cannot be told from it.

No two Parquet files that say different things differ in one byte only: their pages hold checksums.
"""

import contextlib
import hashlib
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from enum import Enum
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from typing_extensions import override

from dpstream.accounting.errors import PolicyError, RunError, UsageError
from dpstream.accounting.facts import FACTS, PROGRAM
from dpstream.accounting.limits import SINK_FILES
from dpstream.accounting.places import matching_in
from dpstream.dp_transforms.batches import part_of
from dpstream.pipelines.connectors.sink import (
    Name,
    PublishedRelease,
    ReadableSink,
    RunManifest,
    name_of_release,
)
from dpstream.pipelines.formats.encodings import (
    ambiguous,
    encode,
    encode_all,
    name_of,
    part_files,
    release_files,
    release_paths,
    remove_drafts,
    table_of_text,
    unguarded,
)
from dpstream.pipelines.jobs.charging import folder_used
from dpstream.pipelines.jobs.job import Job
from dpstream.pipelines.project.job_section import SinkKind
from dpstream.state.disk_errors import file_errors
from dpstream.state.durable import (
    publish_folder,
    put_again,
    put_entries,
    put_once,
    sync_folders,
)

#: Files beside the releases: the manifest, and the facts of its run.
RUN, GUARANTEE = "run", "guarantee"
#: How the library names itself and its version.
_WRITER = re.compile(r"parquet-cpp-arrow version [0-9]+\.[0-9]+\.[0-9]+(-SNAPSHOT)?$")


class Verdict(Enum):
    """The relation of a file to a release."""

    SAME = "same"
    DAMAGED = "damaged"
    OTHER = "other"


def compare_file(existing: bytes, batch: pa.RecordBatch, kind: str, guard: bool = True) -> Verdict:
    """Return the relation of the bytes of a file to a committed release.

    Args:
        guard: how CSV is written now (see `encode`).  Written the other way it is the same, where
            that is clear: a sink that was begun before there was a guard goes on.
    """
    data = encode(batch, kind, guard)
    if existing == data:
        return Verdict.SAME
    if kind == "parquet":
        new, writer = _rows_of(data)
        # Whatever a library makes of damaged bytes: errors of its own, of texts, of memory.
        try:
            old, old_writer = _rows_of(existing)
        except Exception:
            return Verdict.DAMAGED
        if old_writer != writer and _WRITER.match(old_writer):
            same = _without_facts(old).equals(_without_facts(new), check_metadata=True)
            return Verdict.SAME if same else Verdict.OTHER
        if _of_another_program(existing, old.schema.metadata or {}, batch):
            return Verdict.SAME
        return Verdict.DAMAGED if old.equals(new) or _one_byte(existing, data) else Verdict.OTHER
    clear = kind == "csv" and not ambiguous(pa.Table.from_batches([batch]))
    if clear and existing == encode(batch, kind, not guard):
        return Verdict.SAME
    return _text(existing, batch, kind, guard)


def _without_facts(rows: pa.Table) -> pa.Table:
    metadata = dict(rows.schema.metadata or {})
    metadata.pop(FACTS.encode(), None)
    return rows.replace_schema_metadata(metadata)


def _of_another_program(
    existing: bytes, there: Mapping[bytes, bytes], batch: pa.RecordBatch
) -> bool:
    """Whether a file is the release with the facts that another version of this program states.

    Its bytes are those of the release with these facts, so that a damaged file is none.
    """
    facts = there.get(FACTS.encode())
    if facts is not None and f'"{PROGRAM}"'.encode() in facts:
        return False
    metadata = {**batch.schema.metadata, FACTS.encode(): facts}
    if facts is None:
        del metadata[FACTS.encode()]
    return existing == encode(batch.replace_schema_metadata(metadata), "parquet")


def _one_byte(old: bytes, new: bytes) -> bool:
    """Whether the two differ in one byte."""
    if len(old) != len(new):
        return False
    return int(np.count_nonzero(np.frombuffer(old, np.uint8) != np.frombuffer(new, np.uint8))) == 1


def _rows_of(data: bytes) -> tuple[pa.Table, str]:
    """(rows, the library that wrote them), after a check of the pages' checksums."""
    with pq.ParquetFile(pa.BufferReader(data), page_checksum_verification=True) as file:
        table = file.read()
        table.validate(full=True)
        return table, str(file.metadata.created_by)


def _text(existing: bytes, batch: pa.RecordBatch, kind: str, guard: bool) -> Verdict:
    try:
        old = table_of_text(existing, kind, batch.schema.remove_metadata())
        old.validate(full=True)
        old = unguarded(old) if guard and kind == "csv" else old
    except (pa.ArrowException, OSError, ValueError, LookupError):
        return Verdict.DAMAGED
    return Verdict.DAMAGED if old.equals(pa.Table.from_batches([batch])) else Verdict.OTHER


class FileSink(ReadableSink):
    """Files below a folder.

    Args:
        folder: where they are.
        kind: ``parquet``, ``csv`` or ``jsonl``.
        guard: whether CSV marks what a spreadsheet would compute; see `encode`.  What is there
            already is the same release either way.
    """

    field, another = "sink.path", "an empty folder"

    def __init__(self, folder: str | Path, kind: SinkKind, guard: bool = True) -> None:
        self.folder, self.kind, self.guard = Path(folder), kind, guard
        self.place, self.called = str(self.folder), f"{kind} files below"
        self._repairs = True

    @override
    def prepare(self, restoring: bool = False) -> None:
        """Remove drafts; folders are made with their first file, and nothing is refused."""
        self._repairs = not restoring
        remove_drafts(self.folder)

    @override
    def used(self) -> bool:
        return folder_used(self.folder)

    @override
    def manifests(self) -> list[RunManifest | None]:
        with file_errors("sink.path", "cannot be listed"):
            first, further = (
                matching_in(self.folder, name) for name in ("run.json", "run-epoch-*.json")
            )
        return [_read(path) for path in (*first, *sorted(further))]

    @override
    def put_manifest(self, manifest: RunManifest) -> None:
        run, guarantee = (manifest_path(self.folder, manifest.epoch, n) for n in (RUN, GUARANTEE))
        named = msgspec.structs.replace(manifest, facts={})
        with file_errors("sink.path", "cannot be written"):
            for path, content in ((guarantee, manifest.facts), (run, named)):
                put_once(path, msgspec.json.format(msgspec.json.encode(content), indent=2) + b"\n")

    @override
    def published(self) -> Iterator[PublishedRelease]:
        for path in release_paths(self.folder):
            window, trigger = name_of(path)
            # Nothing but the name that a release is given: the others are copies, or strangers.
            if path != self.folder / release_path(window, trigger, path.suffix[1:]):
                raise PolicyError(
                    "sink.path",
                    "holds a file that is no release of this run",
                    "use an empty folder",
                )
            yield PublishedRelease(window, trigger, path)

    @override
    def content(self) -> str | None:
        digest = hashlib.blake2b(digest_size=16)
        try:
            for path in release_files(self.folder):
                data = path.read_bytes()
                name = path.relative_to(self.folder).as_posix()
                digest.update(f"{name}\0{len(data)}\0".encode() + hashlib.blake2b(data).digest())
        except OSError:
            return None
        return digest.hexdigest()

    @override
    def same(self, one: PublishedRelease, batch: pa.RecordBatch) -> bool:
        with file_errors("sink.path", "cannot be compared"):
            return self._compared(_file_of(one.proof, batch), batch, self._repairs)

    @override
    def holds(self, batch: pa.RecordBatch) -> bool:
        path = _file_of(self._path(batch), batch)
        with file_errors("sink.path", "cannot be read"):
            return path.exists() and self._verdict(path, batch) is Verdict.SAME

    @override
    def _write(self, batches: Sequence[pa.RecordBatch], only_compare: bool) -> list[Name]:
        """Their waits for the disk overlap, and each folder is synced once."""
        if only_compare:
            batches = [batch for batch in batches if _is_there(self._file(batch), batch)]
        with file_errors("sink.path", "cannot be written"):
            written = self._put(batches, only_compare)
            # Also of files that are there already: who made them may have died before this.
            sync_folders(written)
            if not only_compare:
                self._show({self._path(b): part_of(b)[1] for b in batches if part_of(b)[1] > 1})
            return [name_of_release(batch) for batch in batches if self._path(batch).exists()]

    @override
    def close(self) -> None:
        """Do nothing: there is no client to close."""

    def _path(self, batch: pa.RecordBatch) -> Path:
        return self.folder / release_path(*name_of_release(batch), self.kind)

    def _file(self, batch: pa.RecordBatch) -> Path:
        """The file of a release or part, where it is or is to be written."""
        path = self._path(batch)
        hidden = part_of(batch)[1] > 1 and not path.exists()
        return _file_of(_hidden(path) if hidden else path, batch)

    def _show(self, parts: Mapping[Path, int]) -> None:
        """Give the folders of releases their names, if all parts are there."""
        for path, count in parts.items():
            files = part_files(_hidden(path))
            if sum(f"-of-{count:06d}." in file.name for file in files) == count:
                if len(files) > count:
                    raise _another(*name_of(path))
                with contextlib.suppress(FileExistsError):  # by another writer, meanwhile
                    publish_folder(_hidden(path), path)
            if path.exists():
                sync_folders([path])

    def _verdict(self, path: Path, batch: pa.RecordBatch) -> Verdict:
        if path.is_dir():  # another number of parts
            return Verdict.OTHER
        if not path.exists():  # a part that is lost, or of another release
            return Verdict.OTHER if _is_among_others(path, batch) else Verdict.DAMAGED
        return compare_file(path.read_bytes(), batch, path.suffix[1:], self.guard)

    def _put(self, batches: Sequence[pa.RecordBatch], only_compare: bool) -> list[Path]:
        """The releases' files, those that are there compared first."""
        paths, missing = [self._file(batch) for batch in batches], []
        for path, batch in zip(paths, batches, strict=True):
            if _is_there(path, batch):
                self._check(path, batch, only_compare)
            else:
                missing.append((path, batch))
        for begin in range(0, len(missing), SINK_FILES):
            chunk = missing[begin : begin + SINK_FILES]
            data = encode_all([batch for _, batch in chunk], self.kind, self.guard)
            new = put_entries(
                [(path, of_one) for (path, _), of_one in zip(chunk, data, strict=True)]
            )
            for (path, batch), made in zip(chunk, new, strict=True):
                if not made:  # by another writer, meanwhile
                    self._check(path, batch, only_compare)
        return paths

    def _check(self, path: Path, batch: pa.RecordBatch, only_compare: bool) -> None:
        """Refuse a file that is another release's."""
        if not self._compared(path, batch, not only_compare):
            raise _another(*name_of_release(batch))

    def _compared(self, path: Path, batch: pa.RecordBatch, repairs: bool) -> bool:
        """Whether a file is this release's, once it was written again if it was damaged.

        Raises:
            RunError: it is damaged, and it is what a restored store must be compared with.
        """
        verdict = self._verdict(path, batch)
        if verdict is not Verdict.DAMAGED:
            return verdict is Verdict.SAME
        window, trigger = name_of_release(batch)
        name = f"release of window {window}, trigger {trigger}"
        if not repairs:
            raise RunError(
                "sink.file",
                f"the {name} is damaged, so a restored store cannot be compared with it",
                "bring back the file, or remove it: it is published again after the comparison",
            )
        put_again(path, encode(batch, path.suffix[1:], self.guard))
        sync_folders([path])
        print(f"The {name} was damaged in the sink; it is written again.", file=sys.stderr)
        return True


def _another(window: int, trigger: int) -> PolicyError:
    return PolicyError(
        "sink.path",
        f"holds another release of window {window}, trigger {trigger}",
        "a published value never changes: use the state that made it, or another folder; if"
        " the file was damaged, remove it and run again",
    )


def open_sink(job: Job, run_id: str | None) -> FileSink:
    """Return the sink of a job."""
    return FileSink(job.sink.path, job.sink.kind, job.sink.guarded)


def release_path(window: int, trigger: int, kind: str) -> Path:
    """Name of a release below the sink's folder."""
    return Path(f"window-{window:06d}") / f"trigger-{trigger:06d}.{kind}"


def _file_of(release: Path, batch: pa.RecordBatch) -> Path:
    """The file of a release, or of a part of it, by the path of the release."""
    number, count = part_of(batch)
    if count == 1 or release.is_file():
        return release
    return release / f"part-{number:06d}-of-{count:06d}{release.suffix}"


def _is_among_others(path: Path, batch: pa.RecordBatch) -> bool:
    """Whether a part's folder holds parts of a release that has another number of them."""
    _, count = part_of(batch)
    files = part_files(path.parent) if count > 1 and path.parent.is_dir() else []
    return any(f"-of-{count:06d}." not in file.name for file in files)


def _is_there(path: Path, batch: pa.RecordBatch) -> bool:
    """Whether a release, or part, must be compared with what is there."""
    return path.exists() or _is_among_others(path, batch)


def _hidden(release: Path) -> Path:
    """Where parts are until all are there."""
    return release.with_name(f".{release.name}")


def manifest_path(folder: Path, epoch: int = 0, name: str = RUN) -> Path:
    """Return the path of the manifest of an epoch, or of its facts (``GUARANTEE``)."""
    return folder / (f"{name}.json" if epoch == 0 else f"{name}-epoch-{epoch}.json")


def facts_in(folder: Path) -> dict[str, Any]:
    """Return the facts of the run whose releases are in a folder, of its last epoch.

    Raises:
        UsageError: nothing was released there.
        RunError: a file cannot be read.
    """
    manifests = FileSink(folder, "parquet").manifests()
    last = max((manifest.epoch for manifest in manifests if manifest is not None), default=0)
    path = manifest_path(folder, last, GUARANTEE)
    if not path.exists():
        raise UsageError(
            "sink.path", f"has no {path.name}: nothing was released", "run `dpstream run JOB` first"
        )
    with file_errors("sink.path", "cannot be read"):
        facts: dict[str, Any] = msgspec.json.decode(path.read_bytes())
    return facts


def _read(path: Path) -> RunManifest | None:
    with file_errors("sink.path", "cannot be read"):
        data = path.read_bytes()
    try:
        return msgspec.json.decode(data, type=RunManifest)
    except (UnicodeDecodeError, msgspec.MsgspecError):
        return None

"""Reads the records of the first hours, batch by batch, into histograms.

Ingest is the stream's own: the same canonical form, dead letters and positions.  A timeline
that ends with the first hours excludes later event times; the tally excludes later stamps.  What is
counted of a record is a function of that record alone.

Proxy data must not be the job's own: exact figures of the job's own records are a release without
noise and without a charge.  Uncompressed contents are compared: copies and links have other names,
and a copy may be compressed.  Messages of a broker and objects of a remote store cannot be
compared:
there the data steward is responsible for using other data.
"""

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from dpstream.accounting.arrays import Int64
from dpstream.accounting.errors import PolicyError, UsageError
from dpstream.dp_transforms.noise.prf import KeyRing
from dpstream.dp_transforms.tuning import Tally
from dpstream.pipelines.connectors.files.source import canonical_records, named_by
from dpstream.pipelines.connectors.input_files import manifest
from dpstream.pipelines.formats.compression import (
    HEAD_BYTES,
    BrokenFileError,
    codec_of,
    plain_by_name,
)
from dpstream.pipelines.formats.lines import BLOCK_BYTES
from dpstream.pipelines.formats.rows import unreadable
from dpstream.pipelines.jobs.job import Job
from dpstream.pipelines.tuning.ask import CheckedRequest
from dpstream.state.disk_errors import file_error

Content = tuple[int, bytes]


def tally(tuning: CheckedRequest, job: Job, ring: KeyRing, name: tuple[bytes, ...]) -> list[Int64]:
    """Return exact histograms of the first hours of ``job``'s input: PRIVATE, for ``noisy`` only.

    Args:
        job: the job whose files are read; the timeline of its plan starts with the first hours.
        name: the run's name, for the sampling keys.

    Raises:
        UsageError: there is no file, or a column is missing.
        RunError: the operating system cannot read a file.
    """
    line = job.plan.timeline
    ends = msgspec.structs.replace(line, end=line.start + tuning.question.first)
    plan = msgspec.structs.replace(job.plan, timeline=ends)
    counted = Tally(plan, ring, name, tuning.design.histograms, tuning.question.values_per_unit)
    for records in canonical_records(job, plan, ring):
        counted.add(records)
    return counted.counts()


def refuse_own_data(job: Job, proxy: Job) -> None:
    """Refuse proxy data with a file of the job's source.

    Raises:
        PolicyError: a file is the same.
        RunError: a file cannot be read.
    """
    with named_by("--proxy"):
        given = set(_contents(proxy))
    try:
        own = _in_folder(job, given) if job.source.unbounded else _contents(job)
        overlap = any(content in given for content in own)
    except UsageError:
        return  # the stream's files are not there yet
    except OSError as error:
        raise file_error("table.path", "cannot be read", error) from None
    if overlap:
        raise PolicyError(
            "--proxy",
            "holds a file of the job's own source: its exact figures would be an uncharged release",
            "give data of other units, or choose privately with --first and --epsilon",
        )


def _contents(job: Job) -> Iterator[Content]:
    """Yield the content digest of every file of a bounded source."""
    for file in manifest(job):
        try:
            yield content_of(file.path, job.source.kind)
        except OSError:
            raise unreadable(file.partition) from None


def _in_folder(job: Job, given: set[Content]) -> Iterator[Content]:
    """Yield content digests of files of a growing folder; of other sizes only compressed files."""
    if job.source.kind != "folder" or "://" in job.source.path:
        return
    sizes, kind = {size for size, _ in given}, str(job.source.format)
    for path in (p for p in Path(job.source.path).rglob("*") if p.is_file()):
        if path.stat().st_size in sizes or _is_packed(path):
            yield content_of(str(path), kind)


def _is_packed(path: Path) -> bool:
    with open(path, "rb", buffering=0) as raw:
        return codec_of(raw.read(HEAD_BYTES), path.name) is not None


def content_of(path: str, kind: str) -> Content:
    """Return size and BLAKE2b-128 digest of a file; for a compressed text, those of the text.

    Raises:
        OSError: the file cannot be read.
    """
    with open(path, "rb") as raw:
        if kind != "parquet":
            try:
                stream, size, digest = plain_by_name(raw, path, kind), 0, _digest()
                while block := stream.read(BLOCK_BYTES):
                    size += len(block)
                    digest.update(block)
                return size, digest.digest()
            except BrokenFileError:
                raw.seek(0)
        content_digest = hashlib.file_digest(raw, _digest)
        return raw.tell(), content_digest.digest()


def _digest() -> Any:
    return hashlib.blake2b(digest_size=16)

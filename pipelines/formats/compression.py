"""Compressed text files: gzip, bzip2 and zstd, recognised by their first bytes.

A compressed file is one whole: members or frames that follow each other are read as one text, and
a file that is cut off, damaged or followed by other bytes is `BrokenFileError` where that shows.
Where files are all there before the run, `checked_codec` reads each compressed one to its end and
refuses what is not whole before anything is charged.

The first bytes of a CSV file are its header's, and a name that ends in ``.gz`` is the file's: both
may decide how the file is read.  The first bytes of any other JSON Lines file are a row's, and no
row may decide how others are read, or that they are not.  So such a file is unpacked only if all of
it can be, which no row among others can bring about; where it cannot be, and begins as text does,
it is text, and that row is malformed.
"""

import codecs
import functools
import os
import re
from typing import Any, BinaryIO, cast

import pyarrow as pa
from typing_extensions import override

from dpstream.accounting.errors import UsageError
from dpstream.accounting.places import is_packed_name
from dpstream.pipelines.formats.dialect import FromBeginning
from dpstream.pipelines.formats.texts import BLOCK_BYTES, BrokenFileError

#: Bytes at a file's beginning that are characters in text, and almost surely not in what is packed.
TEXT_BYTES = 4_096
#: Bytes that tell a compression; more than the longest magic number.
HEAD_BYTES = 16
#: Text that is unpacked at once: at most so much is lost before the place where a file breaks off.
CHUNK_BYTES = 1 << 16
#: Magic numbers of what is read, by Arrow's names of the codecs.
_READ = {
    "gzip": re.compile(rb"\x1f\x8b"),
    "bz2": re.compile(rb"BZh[1-9](?:1AY&SY|\x17\x72\x45\x38\x50\x90)"),
    "zstd": re.compile(rb"\x28\xb5\x2f\xfd|[\x50-\x5f]\x2a\x4d\x18"),
}
#: Of what is not: xz, zip, lz4 (two forms), snappy's frames, 7z, rar, compress, lzip.
_FOREIGN = re.compile(
    rb"\xfd7zXZ\x00|PK(?:\x03\x04|\x05\x06|\x07\x08)|\x04\x22\x4d\x18|\x02\x21\x4c\x18|"
    rb"\xff\x06\x00\x00sNaPpY|7z\xbc\xaf\x27\x1c|Rar!\x1a\x07|\x1f[\x9d\xa0]|LZIP\x01"
)
FOREIGN = "foreign"


def codec_of(head: bytes, name: str) -> str | None:
    """Return the compression of a file: Arrow's name, `FOREIGN`, or ``None`` without one.

    Args:
        head: the file's first `HEAD_BYTES` bytes.
        name: one that names a compressed file must be one.
    """
    for codec, magic in _READ.items():
        if magic.match(head):
            return codec
    return FOREIGN if _FOREIGN.match(head) or is_packed_name(name) else None


class Unpacked(FromBeginning):
    """The text of a compressed file, read from its beginning, in bounded memory.

    Args:
        raw: the file, at its beginning; who opened it closes it.
        codec: see `codec_of`.
    """

    def __init__(self, raw: BinaryIO, codec: str) -> None:
        self._codec = codec
        super().__init__(raw)

    @override
    def _begin(self) -> None:
        self._broken = self._codec == FOREIGN
        self._stream: Any = None
        if not self._broken:
            lent = pa.PythonFile(_Lent(self._raw), "r")
            self._stream = pa.CompressedInputStream(lent, self._codec)

    @override
    def read(self, size: int = -1) -> bytes:
        """Return at most ``size`` bytes; none at the end.

        Raises:
            OSError: the system failed.
            BrokenFileError: here the file breaks off; what comes before was given.
        """
        chunks, left = list[bytes](), size if size >= 0 else 1 << 62
        while left and not self._broken:
            try:
                chunk = self._stream.read(min(left, CHUNK_BYTES))
            except OSError as error:
                if error.errno is not None:
                    raise
                self._broken = True
                break
            if not chunk:
                break
            chunks.append(chunk)
            left -= len(chunk)
        if self._broken and not chunks:
            raise BrokenFileError
        return b"".join(chunks)

    @override
    def readinto(self, buffer: Any) -> int:
        """Read into the buffer of a reader, like ``read``."""
        data = self.read(len(buffer))
        buffer[: len(data)] = data
        return len(data)


class _Lent:
    """A file that its reader must not close."""

    closed = False

    def __init__(self, raw: BinaryIO) -> None:
        self.read = raw.read

    def close(self) -> None:
        """It is another's."""


def plain(raw: BinaryIO, codec: str | None) -> BinaryIO:
    """Return the text of an open file at its beginning."""
    return raw if codec is None else cast(BinaryIO, Unpacked(raw, codec))


def plain_by_name(raw: BinaryIO, name: str, kind: str) -> BinaryIO:
    """Return the text of an open file that nobody has checked.

    Args:
        raw: at its beginning.
        name: of the file.
        kind: ``csv`` or ``jsonl``.
    """
    codec = _look(raw, name)
    if codec is not None and kind == "jsonl" and not is_packed_name(name):
        codec = codec if is_complete(raw, codec) else None
        raw.seek(0)
    return plain(raw, codec)


def _look(raw: BinaryIO, name: str) -> str | None:
    """``codec_of`` of an open file, which stays at its beginning."""
    codec = codec_of(raw.read(HEAD_BYTES), name)
    raw.seek(0)
    return codec


def is_complete(raw: BinaryIO, codec: str) -> bool:
    """Return whether a compressed file can be unpacked to its end.

    Raises:
        OSError: the system failed.
    """
    stream = Unpacked(raw, codec)
    try:
        while stream.read(BLOCK_BYTES):
            pass
    except BrokenFileError:
        return False
    return True


def _is_text(raw: BinaryIO) -> bool:
    """Whether an open file begins with whole characters; it stays at its beginning."""
    head = raw.read(TEXT_BYTES)
    raw.seek(0)
    try:
        # A character that the limit cuts off is no fault.
        codecs.getincrementaldecoder("utf-8")().decode(head, final=len(head) < TEXT_BYTES)
    except UnicodeDecodeError:
        return False
    return True


def checked_codec(raw: BinaryIO, path: str, kind: str, field: str, subject: str) -> str | None:
    """Refuse a text file that would be read as nothing, or not to its end.

    Args:
        raw: the file, open at its beginning, where it stays.
        path: of the file.
        kind: ``csv`` or ``jsonl``.
        field: what names the file, for the error; ``subject``: the file, in words.

    Returns:
        How it is compressed, ``None`` where it is not.

    Raises:
        UsageError: it is compressed in another way, or is not whole.
        OSError: it cannot be read.
    """
    codec = _look(raw, path)
    # Only a row has such a first line there, whoever wrote it: it must not stop all others.
    a_row = kind == "jsonl" and not is_packed_name(path) and codec is not None and _is_text(raw)
    if codec == FOREIGN and not a_row:
        raise UsageError(
            field,
            f"{subject} is, or is named, compressed, but with none of gzip, bzip2 and zstd",
            "unpack it, or compress it with one of these",
        )
    if codec is not None:
        status = os.fstat(raw.fileno())
        if not _is_complete_file(path, codec, status.st_size, status.st_mtime_ns):
            if a_row:
                return None
            raise UsageError(
                field,
                f"{subject} is no whole {codec} file: cut off, damaged, or other bytes follow",
                "make it again, or take it away",
            )
    return codec


def refuse_packed_parquet(path: str, field: str, subject: str) -> None:
    """Refuse a file that is no Parquet, and say whether it was compressed as a whole.

    Raises:
        UsageError: it is compressed.
        OSError: it cannot be read.
    """
    with open(path, "rb", buffering=0) as raw:
        if codec_of(raw.read(HEAD_BYTES), path) is not None:
            raise UsageError(
                field,
                f"{subject} is, or is named, compressed as a whole; Parquet is compressed inside",
                "unpack it",
            )


@functools.lru_cache(maxsize=1 << 16)
def _is_complete_file(path: str, codec: str, size: int, changed: int) -> bool:
    """``is_complete`` of a file on disk, once for as long as it does not change."""
    with open(path, "rb") as raw:
        return is_complete(raw, codec)

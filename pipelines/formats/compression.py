"""Packed text files: gzip, bzip2, zstd and xz, recognised by their first bytes, zip by its name
too, and arrays of JSON.

A compressed file is one whole: members or frames that follow each other are read as one text, and
a file that is cut off, damaged or followed by other bytes is `BrokenFileError` where that shows.
Where files are all there before the run, `checked_codec` reads each compressed one to its end and
refuses what is not whole before anything is charged.

The first bytes of a CSV file are its header's, and a name that ends in ``.gz`` is the file's: both
may decide how the file is read.  The first bytes of any other JSON Lines file are a row's, and no
row may decide how others are read, or that they are not.  So such a file is unpacked only if all of
it can be, which no row among others can bring about; where it cannot be, and begins as text does,
it is text, and that row is malformed.  The bytes of a zip that are no member's may be anything, so
rows at both ends of a text could make it one: only a name that ends in ``.zip`` makes a zip.

An array of JSON is a container of its elements: each becomes a line.  Its writer has escaped what
is in a text, so that no row holds a bracket or a comma of the array (docs/promises/limits.md); a
file whose brackets do not match is not whole.
"""

import codecs
import functools
import lzma
import os
import re
import zipfile
from collections.abc import Iterator
from typing import Any, BinaryIO, cast

import numpy as np
import pyarrow as pa
from typing_extensions import override

from dpstream.accounting.errors import UsageError
from dpstream.accounting.places import is_packed_name
from dpstream.pipelines.formats.dialect import FromBeginning
from dpstream.pipelines.formats.lines import BLOCK_BYTES, BOM, BrokenFileError

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
    "xz": re.compile(rb"\xfd7zXZ\x00"),
}
#: Bytes that unpacking xz may take; `xz -9` takes 65 MiB.
_XZ_MEMORY = 256 << 20
_ZIP = re.compile(rb"PK\x03\x04")
#: Of what is not: zip under another name, lz4 (two forms), snappy, 7z, rar, compress, lzip.
_FOREIGN = re.compile(
    rb"PK(?:\x03\x04|\x05\x06|\x07\x08)|\x04\x22\x4d\x18|\x02\x21\x4c\x18|"
    rb"\xff\x06\x00\x00sNaPpY|7z\xbc\xaf\x27\x1c|Rar!\x1a\x07|\x1f[\x9d\xa0]|LZIP\x01"
)
FOREIGN = "foreign"
#: What else to do with JSON that is no list of objects; LIST is the name of its list.
LIST_INSIDE = (
    "; if one object holds the list, type in DuckDB: COPY (SELECT unnest(LIST, max_depth := 2) "
    "FROM 'FILE') TO 'data.parquet'"
)


def codec_of(head: bytes, name: str) -> str | None:
    """Return the compression of a file: Arrow's name, `FOREIGN`, or ``None`` without one.

    Args:
        head: the file's first `HEAD_BYTES` bytes.
        name: one that names a compressed file must be one.
    """
    if name.lower().endswith(".zip") and _ZIP.match(head):
        return "zip"
    for codec, magic in _READ.items():
        if magic.match(head):
            return codec
    return FOREIGN if _FOREIGN.match(head) or is_packed_name(name) else None


class Unpacked(FromBeginning):
    """The text of a compressed file, read from its beginning, in bounded memory.

    Args:
        raw: the file, at its beginning; who opened it closes it.
        codec: see `codec_of`; of an array of JSON ``array``.
    """

    def __init__(self, raw: BinaryIO, codec: str) -> None:
        self._codec = codec
        super().__init__(raw)

    @override
    def _begin(self) -> None:
        self._broken, self._rest = self._codec == FOREIGN, b""
        self._chunks = _UNPACKERS.get(self._codec, functools.partial(_by_arrow, self._codec))(
            self._raw
        )

    @override
    def read(self, size: int = -1) -> bytes:
        """Return at most ``size`` bytes; none at the end.

        Raises:
            OSError: the system failed.
            BrokenFileError: here the file breaks off; what comes before was given.
        """
        chunks, left = [self._rest], (size if size >= 0 else 1 << 62) - len(self._rest)
        while left > 0 and not self._broken:
            try:
                chunk = next(self._chunks, None)
            except Exception as error:
                if isinstance(error, MemoryError) or getattr(error, "errno", None) is not None:
                    raise
                self._broken = True
                break
            if chunk is None:
                break
            chunks.append(chunk)
            left -= len(chunk)
        data = b"".join(chunks)
        if self._broken and not data:
            raise BrokenFileError
        self._rest = data[size:] if left < 0 else b""
        return data[:size] if left < 0 else data

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


def _by_arrow(codec: str, raw: BinaryIO) -> Iterator[bytes]:
    stream = pa.CompressedInputStream(pa.PythonFile(_Lent(raw), "r"), codec)
    yield from iter(lambda: stream.read(CHUNK_BYTES), b"")


def _xz(raw: BinaryIO) -> Iterator[bytes]:
    data = raw.read(CHUNK_BYTES)
    while data:
        stream = lzma.LZMADecompressor(lzma.FORMAT_XZ, _XZ_MEMORY)
        while not stream.eof:
            if stream.needs_input and not data:
                raise BrokenFileError
            yield stream.decompress(data, CHUNK_BYTES)
            data = raw.read(CHUNK_BYTES) if stream.needs_input else b""
        data = stream.unused_data or raw.read(CHUNK_BYTES)


def _zip(raw: BinaryIO) -> Iterator[bytes]:
    archive = zipfile.ZipFile(raw)
    [member] = archive.infolist()
    with archive.open(member) as stream:
        yield from iter(lambda: stream.read(CHUNK_BYTES), b"")


def _elements(raw: BinaryIO) -> Iterator[bytes]:
    """The elements of an array of JSON, each on a line, without white space around them."""
    depth, in_text, escaped, frame, mark = 0, 0, 0, b"", BOM
    while data := raw.read(_ARRAY_BYTES):
        code, mark = np.frombuffer(data.removeprefix(mark), np.uint8), b""
        at = np.arange(len(code), dtype=np.int32)
        # Backslashes right before each byte: a quote behind an odd number of them is escaped.
        other = np.maximum.accumulate(np.where(code != 92, at, -1 - escaped))
        slashes = at - 1 - np.append(np.int32(-1 - escaped), other)[:-1]
        texts = in_text + np.cumsum((code == 34) & (slashes % 2 == 0), dtype=np.int32)
        is_text = texts % 2 == 1
        brackets = code | 32
        step = ((brackets == 123).astype(np.int32) - (brackets == 125)) * ~is_text  # [{ and ]}
        level = depth + np.cumsum(step, dtype=np.int32)
        is_blank = np.isin(code, _BLANK)
        is_frame = (level == 0) | (level == step)
        frame += code[is_frame & ~is_blank][:3].tobytes()
        if frame != b"[]"[: len(frame)]:
            raise BrokenFileError
        code = np.where(is_blank, np.uint8(32), code)
        code = np.where((code == 44) & (level == 1) & ~is_text, np.uint8(10), code)
        yield code[~(is_frame | (is_blank & ~is_text & (level == 1)))].tobytes()
        depth, in_text, escaped = level[-1], texts[-1] % 2, (at[-1] - other[-1]) % 2
    if frame != b"[]":
        raise BrokenFileError


#: Bytes of an array of JSON that are divided at once; white space of JSON.
_ARRAY_BYTES, _BLANK = 1 << 20, np.frombuffer(b" \t\r\n", np.uint8)
_UNPACKERS = {"xz": _xz, "zip": _zip, "array": _elements}


def plain(raw: BinaryIO, codec: str | None) -> BinaryIO:
    """Return the text of an open file at its beginning; codecs with ``+`` lie in each other."""
    for part in codec.split("+") if codec is not None else ():
        raw = cast(BinaryIO, Unpacked(raw, part))
    return raw


def plain_by_name(raw: BinaryIO, name: str, kind: str) -> BinaryIO:
    """Return the text of an open file that nobody has checked.

    Args:
        raw: at its beginning.
        name: of the file.
        kind: ``csv``, ``jsonl`` or ``json``.
    """
    codec = _look(raw, name, kind)
    if codec is not None and kind == "jsonl" and not is_packed_name(name):
        codec = codec if is_complete(raw, codec) else None
        raw.seek(0)
    return plain(raw, codec)


def _look(raw: BinaryIO, name: str, kind: str) -> str | None:
    """``codec_of`` of an open file, which stays at its beginning; ``json`` is an array."""
    codec = codec_of(raw.read(HEAD_BYTES), name)
    raw.seek(0)
    if kind == "json":
        return "array" if codec is None else f"{codec}+array"
    return codec


def is_complete(raw: BinaryIO, codec: str) -> bool:
    """Return whether a compressed file can be unpacked to its end.

    Raises:
        OSError: the system failed.
    """
    stream = plain(raw, codec)
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
        kind: ``csv``, ``jsonl`` or ``json``.
        field: what names the file, for the error; ``subject``: the file, in words.

    Returns:
        How it is compressed, ``None`` where it is not.

    Raises:
        UsageError: it is compressed in another way, or is not whole.
        OSError: it cannot be read.
    """
    codec = _look(raw, path, kind)
    # Only a row has such a first line there, whoever wrote it: it must not stop all others.
    a_row = kind == "jsonl" and not is_packed_name(path) and codec is not None and _is_text(raw)
    if codec is not None and codec.startswith(FOREIGN) and not a_row:
        raise UsageError(
            field,
            f"{subject} is, or is named, compressed, but not with gzip, bzip2, zstd, xz or zip",
            "unpack it, or compress it with one of these",
        )
    if codec is not None:
        status = os.fstat(raw.fileno())
        if not _is_complete_file(path, codec, status.st_size, status.st_mtime_ns):
            if a_row:
                return None
            forms = {"array": "JSON array", "zip": "one-member zip"}
            name = " with ".join(forms.get(part, part) for part in codec.split("+"))
            raise UsageError(
                field,
                f"{subject} is no whole {name} file: cut off, damaged, or other bytes follow",
                "make it again, or take it away"
                + f'; JSON with one object a line: format = "jsonl"{LIST_INSIDE}'
                * ("array" in codec),
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

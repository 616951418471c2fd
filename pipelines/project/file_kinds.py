"""The kind of a file, and whether it is compressed, from its name."""

from pathlib import PurePath
from typing import Literal

FileKind = Literal["parquet", "csv", "jsonl"]

ENDINGS: dict[str, FileKind] = {
    ".parquet": "parquet",
    ".pq": "parquet",
    ".csv": "csv",
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
}

#: Names of compressed files end so; the first of them are those that are read.
READ_SUFFIXES = (".gz", ".bz2", ".zst", ".zstd")
_SUFFIXES = (
    *READ_SUFFIXES,
    ".gzip",
    ".bzip2",
    ".xz",
    ".lzma",
    ".zip",
    ".lz4",
    ".snappy",
    ".7z",
    ".rar",
    ".br",
)


def is_packed_name(name: str) -> bool:
    """Return whether a file's name is that of a compressed file."""
    return PurePath(name).suffix.lower() in _SUFFIXES


def unpacked_name(name: str) -> str:
    """Return the name without its ending for compression."""
    return str(PurePath(name).with_suffix("")) if is_packed_name(name) else name


def file_kind(name: str) -> FileKind | None:
    """Return the kind of files by a name or pattern, perhaps compressed; ``None`` if unknown."""
    return ENDINGS.get(PurePath(unpacked_name(name)).suffix.lower())

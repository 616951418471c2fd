"""What the name of a file tells: its kind, and whether it is compressed."""

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
    """Whether a file is named as a compressed one."""
    return PurePath(name).suffix.lower() in _SUFFIXES


def unpacked_name(name: str) -> str:
    """The name without what says that the file is compressed."""
    return str(PurePath(name).with_suffix("")) if is_packed_name(name) else name


def file_kind(name: str) -> FileKind | None:
    """Kind of files that a name or a pattern tells, perhaps compressed; ``None``: no known one."""
    return ENDINGS.get(PurePath(unpacked_name(name)).suffix.lower())

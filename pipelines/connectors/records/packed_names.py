"""Names of compressed files; apart from their reading, which loads Arrow's functions."""

from pathlib import PurePath

#: Names of compressed files end so; the first of them are those that are read.
READ_SUFFIXES = (".gz", ".bz2", ".zst", ".zstd")
_SUFFIXES = (
    *READ_SUFFIXES, ".gzip", ".bzip2", ".xz", ".lzma", ".zip", ".lz4", ".snappy", ".7z", ".rar",
    ".br",
)  # fmt: skip


def is_packed_name(name: str) -> bool:
    """Whether a file is named as a compressed one."""
    return PurePath(name).suffix.lower() in _SUFFIXES


def unpacked_name(name: str) -> str:
    """The name without what says that the file is compressed."""
    return str(PurePath(name).with_suffix("")) if is_packed_name(name) else name

"""Golden texts: a test's text against its file, which ``REWRITE=1`` writes anew."""

import difflib
import hashlib
import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from dpstream.accounting.errors import DpstreamError

#: Rows and lines that are shown of what is longer; a digest covers the rest.
LINES = 12


def check(path: Path, text: str) -> None:
    """The text is the file's.

    Raises:
        AssertionError: it is not; ``REWRITE=1`` writes the file, and the diff tells what changed.
    """
    if os.environ.get("REWRITE"):
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    before = path.read_text() if path.exists() else ""
    changes = "\n".join(
        difflib.unified_diff(before.splitlines(), text.splitlines(), lineterm="", n=1)
    )
    assert text == before, f"differs from {path.name}; if meant, REWRITE=1 writes it\n{changes}"


def of_rows(rows: Iterable[Mapping[str, Any]]) -> str:
    """Rows, each figure with all its digits; a digest of all of them where not all are shown."""
    return of_lines([json.dumps(row, default=str) for row in rows])


def of_lines(lines: Sequence[str], most: int = LINES) -> str:
    """The first lines, and a digest of all."""
    text = "".join(f"{line}\n" for line in lines)
    if len(lines) <= most:
        return text
    head = "".join(f"{line}\n" for line in lines[:most])
    return f"{head}... {len(lines)} lines, {digest(text.encode())}\n"


def of_files(folder: Path, names: Iterable[str] = ()) -> str:
    """Number, size and digest of the files of each folder below one, of its own files one by one;
    the first lines of some."""
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    data = {path.relative_to(folder).as_posix(): path.read_bytes() for path in paths}
    groups: dict[str, dict[str, str]] = {}
    for name, content in data.items():
        groups.setdefault(name.rpartition("/")[0] or name, {})[name] = digest(content)
    lines = [
        f"{group}: {len(files)} of {sum(len(data[name]) for name in files)} bytes, "
        + digest(json.dumps(files).encode())
        for group, files in groups.items()
    ]
    texts = [of_lines(lines, len(lines))]
    for name in names:
        rows = data[name].decode().splitlines()
        texts.append(f"-- {name}\n" + of_lines(rows[:LINES]))
    return "".join(texts)


def of_cases(cases: Mapping[str, str]) -> str:
    """All cases of one kind, each below its name."""
    return "\n".join(f"== {name}\n{text}" for name, text in cases.items())


def of_refusals(calls: Mapping[str, Callable[[], object]]) -> str:
    """What each call is refused with, below its name: class, text and fix."""
    texts = {}
    for name, call in calls.items():
        try:
            call()
            texts[name] = "not refused\n"
        except DpstreamError as error:
            texts[name] = f"{type(error).__name__} {error}\n"
    return of_cases(texts)


def refusal(call: Callable[..., object], *args: Any, **given: Any) -> str:
    """Class and field of what a call is refused with; empty where it is not."""
    try:
        call(*args, **given)
    except DpstreamError as error:
        return f"{type(error).__name__} {error.field}"
    return ""


def digest(data: bytes) -> str:
    """128 bits."""
    return hashlib.blake2b(data, digest_size=16).hexdigest()

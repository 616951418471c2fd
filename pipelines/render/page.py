"""HTML pages: their templates, their mark, and files that only a newer page replaces.

In templates all texts are escaped but `Markup`, and what is missing is an error.
"""

from collections.abc import Sequence
from importlib import resources
from pathlib import Path

from jinja2 import Environment, FunctionLoader, StrictUndefined

from dpstream.accounting.errors import UsageError
from dpstream.accounting.figures import human, human_up, percent
from dpstream.state.disk_errors import file_errors
from dpstream.state.durable import PUBLIC, replacing


def pages() -> Environment:
    """Return the environment that finds templates by name; they may include each other."""
    environment = Environment(
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        loader=FunctionLoader(_text),
    )
    environment.filters.update(human=human, human_up=human_up, percent=percent)
    return environment


def _text(name: str) -> str:
    return resources.files("dpstream.pipelines").joinpath("templates", name).read_text("utf-8")


def mark_of(command: str) -> str:
    """Return the beginning of the pages that a command writes."""
    return f'<!doctype html>\n<html lang="en" data-made-by="dpstream {command}">'


def begins_with(path: Path, mark: str | bytes) -> bool:
    """Return whether a file begins with a mark; raises as ``open`` does."""
    start = mark.encode() if isinstance(mark, str) else mark
    with open(path, "rb") as file:
        return file.read(len(start)) == start


def ending_of(file: Path, endings: Sequence[str], option: str = "--out") -> str:
    """Return which of the endings (``html``) a file's name has, in upper or lower case.

    Raises:
        UsageError: it has another.
    """
    ending = file.suffix.lower().removeprefix(".")
    if ending not in endings:
        allowed = " or ".join(f".{each}" for each in endings)
        named = file.with_suffix(f".{endings[0]}") if file.name else f"page.{endings[0]}"
        fix = f"type {option} {named}"
        raise UsageError(option, f"must end in {allowed}, and {file.name} does not", fix)
    return ending


def write_own(out: Path, content: str | bytes, mark: str | bytes, mode: int = PUBLIC) -> None:
    """Write a page or a picture; replace an older one, never another file.

    Args:
        mark: how such files begin.
        mode: of the file, `state.durable.PUBLIC` or ``PRIVATE``.

    Raises:
        UsageError: another file is there.
        RunError: the file cannot be written.
    """
    with file_errors("--out", "cannot be written"):
        if out.exists() and not begins_with(out, mark):
            raise UsageError("--out", "exists and is another file", "choose another name")
        with replacing(out, mode) as draft:
            draft.write_bytes(content.encode() if isinstance(content, str) else content)

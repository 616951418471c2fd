"""HTML pages: one frame with a list of sections, and files that only a newer page replaces.

A page is a template that fills the frame `page.html.j2` with sections of texts, figures, tables and
charts (`parts.html.j2`).  All texts are escaped but `Markup`, and what is missing is an error.

**The one script** of a page and the data it shows are inside the page, and nothing else may run.
The script's digest stands in the page's Content-Security-Policy: a script that a key or a column
smuggled in would not run, nothing is loaded and nothing sent.  The data is JSON in which no mark of
HTML is left, and the script puts text into the page as text alone (Trusted Types, which the policy
requires, refuse anything else).
"""

import base64
import hashlib
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import Any

import msgspec
from jinja2 import Environment, FunctionLoader, StrictUndefined
from markupsafe import Markup

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


#: Marks that could end a script element or begin one, and the escapes JSON has for them.
_MARKS = str.maketrans(
    {"<": "\\u003c", ">": "\\u003e", "&": "\\u0026", "\u2028": "\\u2028", "\u2029": "\\u2029"}
)


def script_text() -> str:
    """Return the script's text: search, sort, CSV, tooltips; of a served page, looking again."""
    return _text("report.js")


def policy(script: bool = False, live: bool = False, images: bool = False) -> str:
    """Return a page's Content-Security-Policy.

    Args:
        script: the page has the script.
        live: a served page asks its own server whether there is something new.
        images: pictures of the page have pixels, which are inside the page.
    """
    rules = ["default-src 'none'", "style-src 'unsafe-inline'"]
    if script:
        digest = base64.b64encode(hashlib.sha256(script_text().encode()).digest()).decode()
        rules.append(f"script-src 'sha256-{digest}'")
    rules += ["base-uri 'none'", "form-action 'none'"]
    if script:
        rules += ["require-trusted-types-for 'script'", "trusted-types 'none'"]
    rules += ["connect-src 'self'"] if live else []
    return "; ".join(rules + (["img-src data:"] if images else []))


def embedded(value: Any) -> Markup:
    """Return JSON for a data element: no text of it can end the element."""
    return Markup(msgspec.json.encode(value).decode().translate(_MARKS))


def document(
    template: str,
    command: str,
    *,
    script: bool = False,
    live: str = "",
    images: bool = False,
    **values: Any,
) -> str:
    """Return a page: one self-contained HTML document.

    Args:
        template: fills the frame.
        command: which makes the page.
        script: whether the page has the script; images: see `policy`.
        live: of a served page, the state that it shows; it asks for a newer one.
        values: of the template; only `Markup` is not escaped.
    """
    return (
        pages()
        .get_template(template)
        .render(
            mark=Markup(mark_of(command)),
            policy=policy(script, bool(live), images),
            script=Markup(script_text()) if script else "",
            live=live,
            **values,
        )
    )


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


def require_own(out: Path, mark: str | bytes, option: str = "--out") -> None:
    """Refuse a path at which another file is; raises as `write_own` does."""
    with file_errors(option, "cannot be written"):
        # The beginning of a pipe or a terminal is not read, because that would wait for ever.
        if out.exists() and not ((out.is_file() or out.is_dir()) and begins_with(out, mark)):
            raise UsageError(option, "exists and is another file", "choose another name")


def write_own(
    out: Path,
    content: str | bytes,
    mark: str | bytes,
    mode: int = PUBLIC,
    option: str = "--out",
) -> None:
    """Write a page or a picture; replace an older one, never another file.

    Args:
        mark: how such files begin.
        mode: of the file, `state.durable.PUBLIC` or ``PRIVATE``.
        option: that names the file.

    Raises:
        UsageError: another file is there.
        RunError: the file cannot be written.
    """
    require_own(out, mark, option)
    with file_errors(option, "cannot be written"), replacing(out, mode) as draft:
        draft.write_bytes(content.encode() if isinstance(content, str) else content)

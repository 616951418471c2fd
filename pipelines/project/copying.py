"""Write a new job, copied from an existing one, at the end of the project file.

`dpstream choose --as NAME` and `sql --stream JOB --emit NAME` write one.  Its section keeps the
comments, and the rest of the file keeps every byte.  Two jobs cannot share a store, nor a folder,
topic or table of releases: the copy has a store in a file of its own name (also if the old one is a
database of Spanner, which holds one run), dead letters of its own name, and its releases beside the
old job's.

Inline tables of the project file that the program writes: ``{ name = value, other = value }``.

tomlkit adds a field to an inline table in the style of the text around it, for instance without a
space after the comma or before the brace.  An inline table that a command changes is written anew,
as `dpstream init` writes one; its values keep the form in which they were written.
"""

import copy
import tomllib
from collections.abc import Mapping
from pathlib import PurePath
from typing import Any

import msgspec
import tomlkit
from tomlkit.exceptions import TOMLKitError
from tomlkit.items import AoT, Array, InlineTable, SingleKey, Table

from dpstream.accounting.errors import UsageError
from dpstream.pipelines.project.job_section import SinkSection
from dpstream.pipelines.project.project import Project, check_name, flush_project, write_project
from dpstream.pipelines.project.text import read_at_most, text_of


def inline(value: Any) -> Any:
    """Return a value for a tomlkit document, with all tables in it as inline tables."""
    return tomlkit.parse(f"value = {_text(value)}\n")["value"]


def set_field(section: Any, table: str, field: str, value: Any) -> None:
    """Set a field of a table of a tomlkit section; an absent table becomes an inline one."""
    fields = section.get(table, {})
    if table in section and not isinstance(fields, InlineTable):
        fields[field] = value
    else:
        section[table] = inline({**fields, field: value})


def _text(value: Any) -> str:
    """Return a value as TOML; what was parsed from a file keeps the form that it has there."""
    if isinstance(value, Mapping):
        fields = (f"{SingleKey(name).as_string()} = {_text(part)}" for name, part in value.items())
        return f"{{ {', '.join(fields)} }}" if value else "{}"
    if isinstance(value, list) and not isinstance(value, Array):
        return f"[{', '.join(map(_text, value))}]"
    return str(tomlkit.item(value).as_string())


def read_project_text(project: Project) -> bytes:
    """Return the present bytes of the project file.

    Raises:
        UsageError: the file cannot be read or is too long.
    """
    return read_at_most(project.path, project.path.name, "shorten the project file")


def check_new_name(project: Project, name: str, option: str, existing: bool = False) -> None:
    """Refuse a name for a new job before anything is charged.

    Args:
        option: the option that gives the name.
        existing: whether a section of this name may exist.

    Raises:
        UsageError: the name cannot be used, or is taken.
    """
    check_name(option, name)
    if name in project.sections.job and not existing:
        raise UsageError(option, f"[job.{name}] exists", "choose another name")


def copied_section(text: bytes, job: str, new: str) -> Any:
    """Return the section of a job as tomlkit has it, to be changed and written as another job's.

    Raises:
        UsageError: the file's layout cannot be copied.
    """
    try:
        document: Any = tomlkit.parse(text_of(text))
        section = copy.deepcopy(document["job"][job])
    except (TOMLKitError, UnicodeDecodeError, LookupError):
        raise _unusual(job) from None
    _forget_headers(section)
    section.pop("store", None)
    section.pop("dead_letter", None)
    sink = section.get("sink", {})
    for field in ("path", "topic", "table"):
        if sink.get(field):
            place = place_beside(str(sink[field]), new, "." if field == "table" else "/", job)
            set_field(section, "sink", field, place)
    return section


def _unusual(job: str) -> UsageError:
    """Return the error for a layout that tomlkit cannot copy, such as tables in between."""
    return UsageError(
        f"job.{job}", "cannot be copied as it is laid out", f"write all of it below one [job.{job}]"
    )


def place_beside(place: str, new: str, separator: str = "/", job: str | None = None) -> str:
    """Return another folder, topic or table of releases, beside the one of a job.

    Args:
        new: what the other's name ends with.
        separator: what stands before the place's own name.
        job: a name that ``new`` replaces.
    """
    if separator == "/":
        place = PurePath(place).as_posix()
    before, between, name = place.rpartition(separator)
    if place == "." or name in ("", ".."):  # the project's own folder, or one above it
        return (PurePath(place) / new).as_posix()
    return f"{before}{between}{new if name == job else f'{name}-{new}'}"


def _forget_headers(table: Any) -> None:
    """Remove the header names of parsed tables, under which tomlkit would write them again."""
    if isinstance(table, Table):
        table.display_name = None
    for part in table.values() if hasattr(table, "values") else ():
        if isinstance(part, Table):
            _forget_headers(part)
        elif isinstance(part, AoT):
            for entry in part.body:
                _forget_headers(entry)


def section_text(name: str, section: Any) -> str:
    """Return ``[job.NAME]`` as the text of a file."""
    jobs = tomlkit.table(is_super_table=True)
    jobs.append(name, section)
    document = tomlkit.document()
    document.append("job", jobs)
    return tomlkit.dumps(document).strip("\n") + "\n"


def sink_of_copy(name: str, section: str) -> str:
    """Return where the releases of a new job go, as a person must know: a service makes nothing.

    Args:
        section: the text of the new job.
    """
    sink = msgspec.convert(tomllib.loads(section)["job"][name]["sink"], SinkSection)
    return sink.place if sink.path else f"{sink.kind} {sink.place}: make it before the first run"


def extended(text: bytes, section: str) -> str:
    """Return the file's text, unchanged, with a section at its end."""
    before = text_of(text)
    gap = "" if before.endswith("\n\n") else "\n" if before.endswith("\n") else "\n\n"
    return f"{before}{gap}{section}"


def check_extended(text: bytes, job: str, new: str, section: Any) -> None:
    """Refuse a file whose meaning a section at its end would change by more than that section.

    Raises:
        UsageError: the file changes otherwise, for instance because all jobs are in one inline
            table.
    """
    before = tomllib.loads(text_of(text))
    if new in before["job"]:
        return  # nothing is written
    try:
        after = tomllib.loads(extended(text, section_text(new, section)))
    except tomllib.TOMLDecodeError:
        after = {}
    if after != before | {"job": before["job"] | {new: section.unwrap()}}:
        raise _unusual(job)


def with_job(project: Project, name: str, section: Mapping[str, Any]) -> Project:
    """Return the project as if its file had a section ``[job.NAME]``; nothing is written."""
    replace = msgspec.structs.replace
    sections, written = (
        replace(parts, job={**parts.job, name: dict(section)})
        for parts in (project.sections, project.written)
    )
    return project._replace(sections=sections, written=written)


def append_section(project: Project, name: str, text: bytes, section: str, option: str) -> None:
    """Write the file with a section at its end, once; an equal section is left as it is.

    Args:
        text: the file's text when the section was made.

    Raises:
        UsageError: another section of this name exists.
        PolicyError: the file was changed meanwhile.
        RunError: the file cannot be written.
    """
    present = tomlkit.parse(text_of(text)).unwrap().get("job", {}).get(name)
    if present is not None:
        if present != tomlkit.parse(section).unwrap()["job"][name]:
            raise UsageError(
                option, f"[job.{name}] exists and says otherwise", "choose another name"
            )
        flush_project(project.path)
        return
    write_project(project.path, extended(text, section), text)

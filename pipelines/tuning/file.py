"""The job file of a tuning: read without C and clamps, written with them, comments kept.

Before the tuning the job needs no ``contributions`` and no clamps.  For reading its
records C stands at 1 and each clamp to choose at the column's declared range: public both.
"""

import contextlib
import math
import os
import tomllib
from fractions import Fraction
from pathlib import Path
from typing import Any

import msgspec
import tomlkit
from tomlkit.exceptions import TOMLKitError

from dpstream.accounting.errors import RunError, UsageError
from dpstream.accounting.plan.fields import Aggregate
from dpstream.pipelines.jobs.job import Job, decode_job, decode_tables, job_of, read_text
from dpstream.pipelines.jobs.tables import TuningConfig
from dpstream.pipelines.project.text import parse_toml
from dpstream.state.disk_errors import file_errors
from dpstream.state.durable import put_once


def base_job(path: Path, clamps: bool) -> tuple[Job, tuple[str, ...]]:
    """The job with C = 1 and every clamp to choose at its declared range.

    Args:
        clamps: choose all clamps, not only those that are missing.

    Returns:
        (job, names of the aggregates whose clamp is to be chosen).

    Raises:
        UsageError: no usable job, or a range is not declared.
    """
    path = path.absolute()
    tables = parse_toml(read_text(path))
    tuning = _table(tables.get("choice"))
    declared = _table(tuning.get("range"))
    privacy = tables.get("privacy")
    if isinstance(privacy, dict):
        privacy["contributions"] = 1
        # The family follows from the C that is chosen, and C is chosen by Gaussian noise.
        if "public" not in _table(tables.get("keys")) and privacy.get("strategy") in (None, "auto"):
            privacy["strategy"] = "blt"
            privacy.pop("optimise", None)
    names = []
    listed = tables.get("aggregate")
    entries = [e for e in listed if isinstance(e, dict)] if isinstance(listed, list) else []
    for entry in entries:
        if entry.get("kind") not in ("sum", "mean"):
            continue
        if "clamp" in entry and not clamps:
            continue
        names.append(str(entry.get("name")))
        entry["clamp"] = _range(entry, declared)
    # What an earlier tuning wrote is not what is checked now; ranges are.
    tables["choice"] = {"range": declared}
    unknown = sorted(set(declared) - {str(e.get("name")) for e in entries})
    job = job_of(decode_tables(tables), path)
    if unknown:
        raise UsageError("choice.range", "names an aggregate that there is not", "correct it")
    return job, tuple(names)


def _table(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _range(entry: dict[str, Any], declared: dict[str, Any]) -> Any:
    """The declared range of an aggregate: [choice] range, else the clamp it has."""
    bounds = declared.get(str(entry.get("name")), entry.get("clamp"))
    if bounds is None:
        raise UsageError(
            f"choice.range.{entry.get('name')}",
            "is required: candidates for a clamp come from a public range, never from the data",
            f"add [choice] range = {{ {entry.get('name')} = [low, high] }} to the job",
        )
    return bounds


def question_of(out: Path) -> str | None:
    """The digest of the question that a job file was chosen by; ``None``: it is no such file."""
    with contextlib.suppress(OSError, UnicodeDecodeError, tomllib.TOMLDecodeError):
        choice = tomllib.loads(out.read_text(encoding="utf-8")).get("choice")
        return str(choice.get("question")) if isinstance(choice, dict) else None
    return None


def check_out(path: Path, out: Path, existing: bool = False, field: str = "--out") -> None:
    """Refuse a place for the new job that would lose something, before anything is charged."""
    if out.absolute().parent.resolve() != path.absolute().parent.resolve():
        raise UsageError(
            field, "must be in the job file's folder, where its paths start", "correct it"
        )
    if out.exists() and not (existing and out.resolve() != path.resolve()):
        raise UsageError(field, "exists", "choose another name")


def render(
    path: Path, contributions: int, clamps: tuple[tuple[str, int, int], ...], tuning: TuningConfig
) -> str:
    """The job file's text with the tuned figures; everything else as it was written.

    Raises:
        UsageError: the file cannot be kept as it is written.
    """
    try:
        document: Any = tomlkit.parse(read_text(path).decode("utf-8"))
    except (TOMLKitError, UnicodeDecodeError):
        raise UsageError("job file", "cannot be rewritten", "simplify its layout") from None
    document["privacy"]["contributions"] = contributions
    tuned = {name: (low, high) for name, low, high in clamps}
    for entry in document["aggregate"]:
        if entry["name"] in tuned:
            grid = msgspec.convert(entry.unwrap(), Aggregate).grid
            entry["clamp"] = list(in_column_units(*tuned[entry["name"]], grid))
    document.pop("choice", None)
    document["choice"] = _tuning_table(tuning)
    text = tomlkit.dumps(document)
    _check(text, contributions, tuned)
    return text


def in_column_units(low: int, high: int, grid: float) -> tuple[float, float]:
    """A clamp in grid units as the column's numbers, which snap back to the same grid units."""
    unit = Fraction(str(grid))
    return _outward(low, unit, -1), _outward(high, unit, 1)


def _outward(units: int, grid: Fraction, sign: int) -> int | float:
    """``units`` of the grid as a number that snaps back to them (bounds are snapped inward)."""
    exact = units * grid
    if exact.denominator == 1:
        return int(exact)
    value = float(exact)
    while (Fraction(str(value)) - exact) * sign < 0:
        value = math.nextafter(value, sign * math.inf)
    return value


def _tuning_table(tuning: TuningConfig) -> Any:
    table = tomlkit.table()
    for name, value in msgspec.to_builtins(tuning).items():
        if value is None or value in ((), [], {}):
            continue
        if isinstance(value, dict):
            inline = tomlkit.inline_table()
            inline.update(value)
            table.add(name, inline)
        else:
            table.add(name, value)
    return table


def _check(text: str, contributions: int, tuned: dict[str, tuple[int, int]]) -> None:
    """What is written reads back as what was chosen."""
    file = decode_job(text.encode())
    bounds = {a.name: a.grid_bounds() for a in file.aggregate if a.name in tuned}
    if file.privacy.contributions != contributions or bounds != tuned:
        raise RunError("--out", "would not say what was chosen", "report this job file's layout")


def write(out: Path, text: str, field: str = "--out") -> None:
    """Write the new job file once; a file that says the same already is left alone.

    Raises:
        UsageError: another file is there.
        RunError: it cannot be written.
    """
    with file_errors(field, "cannot be written"):
        os.stat(out.absolute().parent)  # a folder is not made: its name may be misspelt
        if not put_once(out, text.encode()) and out.read_bytes() != text.encode():
            raise UsageError(field, "exists and says otherwise", "choose another name")

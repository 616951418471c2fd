"""The job of a tuning: read without C and bounds, and written with them as a new job.

Before the tuning the job needs no ``contributions`` and no bounds.  To read its records, C is 1 and
each bounds to choose are the column's declared range; both are public.
"""

import copy
import math
from fractions import Fraction
from typing import Any

import msgspec

from dpstream.accounting.errors import RunError, UsageError
from dpstream.accounting.fields import Aggregate
from dpstream.pipelines.jobs.job import Job, job_in
from dpstream.pipelines.project.copying import (
    append_section,
    check_extended,
    copied_section,
    read_project_text,
    section_text,
    set_field,
    with_job,
)
from dpstream.pipelines.project.job_section import ChoiceSection
from dpstream.pipelines.project.project import Project


def base_job(project: Project, name: str, all_bounds: bool) -> tuple[Job, tuple[str, ...]]:
    """Return the job with C = 1, and with the declared range for all bounds to choose.

    Args:
        all_bounds: choose all bounds, not only those that are missing.

    Returns:
        (job, names of the aggregates whose bounds are to be chosen).

    Raises:
        UsageError: the job cannot be used, or a range is not declared.
    """
    section = copy.deepcopy(project.sections.job[name])
    declared = _table(_table(section.get("choice")).get("range"))
    section["contributions"] = 1
    mechanism = _table(section.get("mechanism"))
    # The family follows from the C that is chosen, and C is chosen by Gaussian noise.
    if "public_keys" not in section and mechanism.get("strategy") in (None, "auto"):
        mechanism = {**mechanism, "strategy": "blt"}
        mechanism.pop("optimise", None)
        section["mechanism"] = mechanism
    names, aggregates = list[str](), _table(section.get("aggregate"))
    for aggregate, part in aggregates.items():
        if not isinstance(part, dict) or part.get("kind") not in ("sum", "mean"):
            continue
        if "bounds" in part and not all_bounds:
            continue
        names.append(aggregate)
        part["bounds"] = _range(name, aggregate, part, declared)
    # What an earlier tuning wrote is not what is checked now; ranges are.
    section["choice"] = {"range": declared}
    job = job_in(with_job(project, name, section), name)
    if set(declared) - set(aggregates):
        raise UsageError(
            f"job.{name}.choice.range", "names an aggregate that there is not", "correct it"
        )
    return job, tuple(names)


def _table(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _range(name: str, aggregate: str, part: dict[str, Any], declared: dict[str, Any]) -> Any:
    """Return the declared range of an aggregate: that of ``choice.range``, else its bounds."""
    bounds = declared.get(aggregate, part.get("bounds"))
    if bounds is None:
        raise UsageError(
            f"job.{name}.choice.range.{aggregate}",
            "is required: candidates for bounds come from a public range, never from the data",
            f"add choice.range = {{ {aggregate} = [low, high] }} to [job.{name}]",
        )
    return bounds


def question_of(project: Project, name: str) -> tuple[str, str] | None:
    """Return digest and label (``--as-of``) of the question that a job was chosen by.

    ``None``: there is no such job, or it was not chosen privately.
    """
    choice = _table(project.sections.job.get(name, {}).get("choice"))
    question = choice.get("question")
    return None if question is None else (str(question), str(choice.get("as_of", "")))


def render(
    project: Project,
    name: str,
    new: str,
    contributions: int,
    bounds: tuple[tuple[str, int, int], ...],
    choice: ChoiceSection,
) -> tuple[bytes, str]:
    """Return the present project file, and a new section with the tuned figures; see
    `pipelines.project.copying`.

    Raises:
        UsageError: the file cannot be extended.
    """
    text = read_project_text(project)
    section = copied_section(text, name, new)
    section["contributions"] = contributions
    tuned = {aggregate: (low, high) for aggregate, low, high in bounds}
    for aggregate, limits in tuned.items():
        grid = section["aggregate"][aggregate].get("grid", 1.0)
        set_field(section["aggregate"], aggregate, "bounds", list(in_column_units(*limits, grid)))
    section.pop("choice", None)
    section["choice"] = _written(choice)
    check_extended(text, name, new, section)
    _check(project, new, section.unwrap(), contributions, tuned)
    return text, section_text(new, section)


def write(project: Project, new: str, text: bytes, section: str) -> None:
    """Write the new section once; raises as `pipelines.project.copying.append_section` does."""
    append_section(project, new, text, section, "--as")


def in_column_units(low: int, high: int, grid: float) -> tuple[float, float]:
    """Return bounds in grid units as the column's numbers, which snap back to the same."""
    unit = Fraction(str(grid))
    return _outward(low, unit, -1), _outward(high, unit, 1)


def _outward(units: int, grid: Fraction, sign: int) -> int | float:
    """Return ``units`` of the grid as a number that snaps back to them (bounds snap inward)."""
    exact = units * grid
    if exact.denominator == 1:
        return int(exact)
    value = float(exact)
    while (Fraction(str(value)) - exact) * sign < 0:
        value = math.nextafter(value, sign * math.inf)
    return value


def _written(choice: ChoiceSection) -> dict[str, Any]:
    """Return the fields of a choice that are not empty."""
    fields = msgspec.to_builtins(choice)
    return {name: value for name, value in fields.items() if value not in (None, (), [], {})}


def _check(
    project: Project,
    new: str,
    section: dict[str, Any],
    contributions: int,
    tuned: dict[str, tuple[int, int]],
) -> None:
    """Check that the written section reads back as what was chosen."""
    _, written = with_job(project, new, section).job(new)
    bounds = {
        name: Aggregate(name, part.kind, part.column, part.bounds, part.grid).grid_bounds()
        for name, part in written.aggregate.items()
        if name in tuned
    }
    if written.contributions != contributions or bounds != tuned:
        raise RunError("--as", "would not say what was chosen", "report this job's layout")

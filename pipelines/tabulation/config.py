"""``config.json``: the parameters of both programs, read with every fault named.

Fields and their values are those of the public production code; where this reader is stricter or
softer, docs/guides/census.md lists it.  A file may hold further fields, such as those of the
other program: those of the program that runs must be there and right, the others are not looked
at.  A field whose name is close to that of an optional one is a fault, because a misspelt option
would be silently off.

A budget may be infinite, as in production: then its counts are exact, and nothing is promised of
anything (`TablePlan.exact`).
"""

import itertools
import json
import math
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any, Literal, NamedTuple

import msgspec

from dpstream.accounting.errors import UsageError, nearest
from dpstream.accounting.limits import MAX_EPSILON
from dpstream.accounting.tabulation.parameters import (
    PR_LEVELS,
    TABLES,
    US_LEVELS,
    Family,
    Level,
    Parameters,
    Program,
)
from dpstream.pipelines.formats.lines import BOM
from dpstream.pipelines.tabulation.text import Faults

CONFIG = "config.json"
PUERTO_RICO = "72"
#: FIPS codes of the states and the District of Columbia.
STATES = tuple(f"{n:02d}" for n in range(1, 57) if n not in (3, 7, 14, 43, 52))
MAX_CONFIG_BYTES = 1 << 20
#: Race codes that a record has room for.
MAX_RACE_CODES = 8
_FRACTION = "privacy_budget_p_stage_1_fraction"
#: Numbers that production takes as texts too: ``"0.5"``, ``"inf"``, and a fraction as ``"1/10"``.
_NUMBER = float | str
#: Types of the fields that are not made from levels, and whether they must be there.
_FIELDS: dict[str, tuple[Any, bool]] = {
    "max_race_codes": (int, True),
    "privacy_defn": (str, True),
    "allow_negative_counts": (bool, True),
    "run_us": (bool, True),
    "run_pr": (bool, True),
    "reader": (str, True),
    "state_filter_us": (list[str], False),
    "zero_suppression_chance": (float, False),
    _FRACTION: (_NUMBER, True),
}
_OF_P = {"zero_suppression_chance", _FRACTION}
_LEVELS = (*US_LEVELS, *PR_LEVELS)


class Choice(NamedTuple):
    """The choices beside the parameter files.

    Attributes:
        program: ``p`` or ``h``; noise, estimates: as `Parameters` has them.
    """

    program: Program
    noise: Family = "census"
    estimates: Literal["census", "combined"] = "census"

    def check(self) -> None:
        """Refuse what no files could mean.

        Raises:
            UsageError: estimates of two steps, where there is one.
        """
        if self.program == "h" and self.estimates == "combined":
            raise UsageError(
                "estimates",
                "combined needs a first step, which households do not have",
                "leave it out: their totals have the census estimate",
            )


def read_config(path: Path, choice: Choice, faults: Faults) -> Parameters | None:
    """Return the parameters of a file.

    Args:
        faults: takes what is wrong; rows of JSON have no numbers, fields have names.

    Returns:
        ``None`` if there is a fault.
    """
    entries = _decoded(path, faults)
    if entries is None:
        return None
    before = len(faults.faults)
    fields = fields_of(choice.program)
    missing = [n for n, (_, required) in fields.items() if not required and n not in entries]
    for name in (name for name in entries if name not in fields):
        if hint := nearest(name, missing, cutoff=0.8):  # it looks like a missing optional field
            fix = f"{hint}correct its name, or leave it out"
            faults.add("", "has a field that is not known", fix)
    values = {
        name: _typed(entries, name, kind, required, faults)
        for name, (kind, required) in fields.items()
    }
    _check(values, choice.program, faults)
    if choice.noise == "rounded" and values["privacy_defn"] == "puredp":
        faults.add(
            "privacy_defn",
            "is puredp, for which there is no rounded noise",
            "write zcdp, or choose the noise census",
        )
    return None if len(faults.faults) > before else _parameters(values, choice)


def fields_of(program: str) -> dict[str, tuple[Any, bool]]:
    """Return the type of each field that a program reads, and whether it must be there."""
    out = {n: kind for n, kind in _FIELDS.items() if program == "p" or n not in _OF_P}
    budget = _NUMBER if program == "p" else float
    for prefix, thresholds in names_of(program).values():
        out |= {f"{prefix}_{level.name}": (budget, True) for level in _LEVELS}
        out[thresholds] = (dict[str, list[float]], True)
    return out


def names_of(program: str) -> dict[str, tuple[str, str]]:
    """Return the prefix of the names of a table's budgets, and the field of its thresholds, by
    table.
    """
    if program == "p":
        return {"t1t2": ("privacy_budget_p", "thresholds_p")}
    return {t.name: (f"privacy_budget_h_{t.name}", f"thresholds_h_{t.name}") for t in TABLES["h"]}


def _decoded(path: Path, faults: Faults) -> dict[str, Any] | None:
    """The fields of a file as JSON has them; a field that is there twice is a fault."""
    data: bytes | None = None
    with faults.reading(), open(path, "rb") as file:
        data = file.read(MAX_CONFIG_BYTES + 1)
    if data is None:
        return None
    if len(data) > MAX_CONFIG_BYTES:
        faults.add("", f"exceeds {MAX_CONFIG_BYTES} bytes", "give a parameter file")
        return None
    twice = list[str]()

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        out = dict(pairs)
        if len(out) < len(pairs):
            twice.append("")
        return out

    try:
        entries = json.loads(data.removeprefix(BOM).decode("utf-8"), object_pairs_hook=once)
    except (ValueError, RecursionError):
        faults.add("", "is not JSON in UTF-8", "correct the file")
        return None
    if not isinstance(entries, dict):
        faults.add("", "is not one JSON object", "write fields in braces")
        return None
    if twice:
        faults.add("", "has a field or a threshold twice", "keep one of them")
        return None
    return entries


def _typed(entries: dict[str, Any], name: str, kind: Any, required: bool, faults: Faults) -> Any:
    """The value of a field, ``None`` where it is missing or of another type."""
    if name not in entries:
        if required:
            faults.add(name, "is required", "add it")
        return None
    value = entries[name]
    try:
        if kind is _NUMBER and isinstance(value, str):
            return float(Fraction(value) if name == _FRACTION else value)
        return msgspec.convert(value, float if kind is _NUMBER else kind, strict=True)
    except (msgspec.ValidationError, ArithmeticError, ValueError):
        faults.add(name, f"is not {_WORDS[kind]}", "correct its type")
        return None


_WORDS: dict[Any, str] = {
    int: "a whole number",
    str: "a text",
    bool: "true or false",
    float: "a number",
    _NUMBER: "a number, or the text of one",
    list[str]: "a list of texts",
    dict[str, list[float]]: "an object of lists of numbers",
}


def _check(values: dict[str, Any], program: str, faults: Faults) -> None:
    """Everything that a type does not say; what is ``None`` has its fault already."""
    most, states = values["max_race_codes"], values["state_filter_us"]
    listed = bool(values["run_us"] and states)
    mistyped = {fault.column for fault in faults.faults}
    states_fix = 'list the FIPS codes of states, such as "01", each once'
    faults.check(
        (
            most is not None and not 1 <= most <= MAX_RACE_CODES,
            "max_race_codes",
            f"is not 1 to {MAX_RACE_CODES}",
            "correct it",
        ),
        (
            values["privacy_defn"] not in (None, "zcdp", "puredp"),
            "privacy_defn",
            "is not zcdp or puredp",
            "write zcdp",
        ),
        (
            values["reader"] not in (None, "csv"),
            "reader",
            "is not csv: files are read as texts, nothing else is",
            "write csv",
        ),
        (
            values["run_us"] is False and values["run_pr"] is False,
            "run_us",
            "and run_pr are both false: nothing would run",
            "set one of them",
        ),
        (
            bool(values["run_us"] and not states) and "state_filter_us" not in mistyped,
            "state_filter_us",
            "is empty or missing, and run_us is true",
            states_fix,
        ),
        (
            listed and len(set(states)) < len(states),
            "state_filter_us",
            "has a state twice",
            states_fix,
        ),
        (
            listed and not set(states) <= set(STATES),
            "state_filter_us",
            "has what is no FIPS code of a state",
            f"use {', '.join(STATES)}",
        ),
    )
    if program == "p":
        _check_p(values, faults)
    for table in TABLES[program]:
        prefix, thresholds = names_of(program)[table.name]
        for level in _LEVELS:
            _check_budget(values, f"{prefix}_{level.name}", faults)
        _check_thresholds(values, thresholds, len(table.details) - 1, table.name, faults)


def _check_p(values: dict[str, Any], faults: Faults) -> None:
    fraction, chance = values[_FRACTION], values["zero_suppression_chance"]
    faults.check(
        (
            fraction is not None and not 0 < fraction < 1,
            _FRACTION,
            "is not between 0 and 1",
            "correct it",
        ),
        (
            chance is not None and not 0 <= chance < 1,
            "zero_suppression_chance",
            "is not at least 0 and below 1",
            "correct it",
        ),
    )


def _check_budget(values: dict[str, Any], name: str, faults: Faults) -> None:
    budget = values[name]
    if budget is None:
        return
    if not budget >= 0:
        faults.add(name, "is not a number of 0 or more", "0 switches a level off")
    elif MAX_EPSILON < budget < math.inf:
        fix = "write Infinity for exact counts of public data, else correct it"
        faults.add(name, f"exceeds {MAX_EPSILON:,.0f}, which protects nobody", fix)


def _check_thresholds(
    values: dict[str, Any], name: str, count: int, table: str, faults: Faults
) -> None:
    """Thresholds of each level of the run: enough, not falling; an infinite one is never reached.

    Labels of no level are not looked at: a misspelt one is missing.
    """
    thresholds = values[name]
    if thresholds is None:
        return
    for level in _running(values):
        if level.label not in thresholds:
            faults.add(f"{name} {level.label}", "is missing", f'add "{level.label}" to {name}')
    for label in (level.label for level in _LEVELS if level.label in thresholds):
        level_thresholds, where = thresholds[label], f"{name} {label}"
        if len(level_thresholds) < count or (table == "t4" and len(level_thresholds) != count):
            least = f"exactly {count}" if table == "t4" else f"at least {count}"
            faults.add(where, f"does not have {least} thresholds", "correct the list")
        if any(map(math.isnan, level_thresholds)):
            faults.add(where, "has what is no number", "correct the list")
        elif any(a > b for a, b in itertools.pairwise(level_thresholds)):
            faults.add(where, "has thresholds that fall", "sort them")


def _running(values: dict[str, Any]) -> Iterator[Level]:
    if values["run_us"]:
        yield from US_LEVELS
    if values["run_pr"]:
        yield from PR_LEVELS


def _parameters(values: dict[str, Any], choice: Choice) -> Parameters:
    """The resolved parameters of values without fault, of the levels that run."""
    levels = tuple(_running(values))
    names = names_of(choice.program)
    budgets = {
        table: {level: values[f"{prefix}_{level.name}"] + 0.0 for level in levels}
        for table, (prefix, _) in names.items()
    }
    sizes = {table.name: len(table.details) - 1 for table in TABLES[choice.program]}
    thresholds = {
        table: {level: tuple(values[field][level.label][: sizes[table]]) for level in levels}
        for table, (_, field) in names.items()
    }
    return Parameters(
        program=choice.program,
        noise=choice.noise,
        definition=values["privacy_defn"],
        budgets=budgets,
        fraction=values.get(_FRACTION),
        thresholds=thresholds,
        zero_suppression=values.get("zero_suppression_chance") or 0.0,
        allow_negative=values["allow_negative_counts"],
        run_us=values["run_us"],
        run_pr=values["run_pr"],
        max_race_codes=values["max_race_codes"],
        state_filter=tuple(sorted(values["state_filter_us"])) if values["run_us"] else (),
        estimates=choice.estimates,
    )


def states_of(parameters: Parameters) -> tuple[str, ...]:
    """Return FIPS codes whose blocks and records count, sorted: Puerto Rico's too, if it runs."""
    more = (PUERTO_RICO,) if parameters.run_pr else ()
    return (*parameters.state_filter, *more)

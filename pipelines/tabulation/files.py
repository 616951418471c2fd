"""The files of an execution: what is public is read, checked and handed over; nothing private is.

PARAMETERS is a folder with ``config.json`` and the four files of iterations and codes; DATA is one
with ``GRF-C.txt`` and the records, and for households ``pop-group-totals.txt``.  Of the records
only the header is looked at here: it says that this is the file that is meant, and nothing of a
person.  So validating can be repeated at will, by anybody, on any data.
"""

from pathlib import Path
from typing import NamedTuple

import pyarrow as pa

from dpstream.accounting.errors import required
from dpstream.accounting.tabulation.parameters import Parameters
from dpstream.dp_transforms.tabulation.domain import PublicFiles
from dpstream.pipelines.tabulation import characteristics, geography
from dpstream.pipelines.tabulation.config import CONFIG, Choice, read_config, states_of
from dpstream.pipelines.tabulation.faults import Fault, Faults, refuse
from dpstream.pipelines.tabulation.layouts import LAYOUTS
from dpstream.pipelines.tabulation.text import first_line, usable_header
from dpstream.pipelines.tabulation.totals import read_totals, total_files


class Loaded(NamedTuple):
    """The public files of an execution, without fault.

    Attributes:
        totals: t1 of persons, for households (see `totals.read_totals`).
    """

    parameters: Parameters
    files: PublicFiles
    totals: pa.Table | None


def validate(parameters: Path, data: Path, choice: Choice) -> list[Fault]:
    """All faults of the public files, and of the header of the records.

    Raises:
        UsageError: the choice itself makes no sense.
    """
    return _read(parameters, data, choice, records=True)[1]


def load(
    parameters: Path, data: Path, choice: Choice, records: bool = True, totals: bool = True
) -> Loaded:
    """The public files of an execution.

    Args:
        records: whether the file of records must be there; its header is looked at then.
        totals: whether households need the totals of persons now.

    Raises:
        UsageError: there is a fault; names the first and says how many there are.  Or the choice
            makes no sense.
    """
    loaded, faults = _read(parameters, data, choice, records, totals)
    refuse(faults)
    return required(loaded, "loaded is there")


def records_path(data: Path, program: str) -> Path:
    """The private file of a program."""
    return data / LAYOUTS[program].file


def public_paths(parameters: Path, data: Path, program: str) -> list[Path]:
    """Every public file that a program reads: what identifies an execution beside the records."""
    names = [CONFIG, *characteristics.COLUMNS]
    more = total_files(data) if program == "h" else []
    return [*(parameters / name for name in names), data / geography.GEOGRAPHY, *more]


def _read(
    parameters: Path, data: Path, choice: Choice, records: bool, totals: bool = True
) -> tuple[Loaded | None, list[Fault]]:
    choice.check()
    faults = {name: Faults(name) for name in (CONFIG, *characteristics.COLUMNS)}
    resolved = read_config(parameters / CONFIG, choice, faults[CONFIG])
    iterations = characteristics.read_characteristics(parameters, faults)
    of_blocks = Faults(geography.GEOGRAPHY)
    states = () if resolved is None else states_of(resolved)
    blocks = geography.read_geography(data / geography.GEOGRAPHY, states, of_blocks)
    every = [fault for one in (*faults.values(), of_blocks) for fault in one.faults]
    if records:
        every += _header_faults(data, choice.program)
    if resolved is None or iterations is None or blocks is None:
        return None, every
    files, published = PublicFiles(*iterations, blocks), None
    if choice.program == "h" and totals:
        published = read_totals(data, files, resolved, every)
    return Loaded(resolved, files, published), every


def _header_faults(data: Path, program: str) -> list[Fault]:
    """Of the records: whether they are there, and have the columns of their layout."""
    layout = LAYOUTS[program]
    faults = Faults(layout.file)
    try:
        with open(data / layout.file, "rb", buffering=0) as raw:
            usable_header(first_line(raw)[0], layout.columns, faults)
    except FileNotFoundError:
        faults.add("", "is missing", "put it into its folder")
    except OSError:
        faults.add("", "cannot be read", "check that it is a file, and its permissions")
    return faults.faults

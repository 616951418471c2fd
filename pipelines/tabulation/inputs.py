"""The files of an execution: the public ones are read and checked, and the plan is derived.

PARAMETERS is a folder with ``config.json`` and the four files of iterations and codes; DATA is one
with ``GRF-C.txt`` and the records, and for households ``pop-group-totals.txt``.  Of the records
only the header is looked at here: it says that this is the file that is meant, and nothing of a
person.  So validating can be repeated at will, by anybody, on any data.

Workers are told where the files are, and make of the public ones what the launcher made of them:
the groups of a nation are too many to be sent about.  A digest of all files goes with it, so that
nothing is taken from memory that was made of other files.

The plan follows from public files alone, so that the records need not be there.  Households need
the published totals of persons to be executed; to plan them they may still be missing, and then the
plan has no hash yet.
"""

import functools
import hashlib
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from dpstream.accounting.errors import RunError, UsageError, required
from dpstream.accounting.limits import MIN_DELTA
from dpstream.accounting.tabulation.guarantee import DELTA
from dpstream.accounting.tabulation.parameters import Level, Parameters
from dpstream.accounting.tabulation.plan import TablePlan, describe
from dpstream.dp_transforms.tabulation.domain import (
    Domain,
    PublicFiles,
    Published,
    Shard,
    domain_of,
    published_of,
    regions_of,
    shards_of,
)
from dpstream.pipelines.tabulation.config import CONFIG, Choice, read_config, states_of
from dpstream.pipelines.tabulation.private import LAYOUTS, Lookup, lookup_of
from dpstream.pipelines.tabulation.public_files import (
    GEOGRAPHY,
    PARAMETER_FILES,
    TOTALS,
    read_characteristics,
    read_geography,
    read_totals,
    total_files,
)
from dpstream.pipelines.tabulation.text import Fault, Faults, first_line, refuse, usable_header
from dpstream.state.disk_errors import file_error


class Loaded(NamedTuple):
    """The public files of an execution, without faults.

    Attributes:
        totals: t1 of persons, for households (see `public_files.read_totals`).
    """

    parameters: Parameters
    files: PublicFiles
    totals: pa.Table | None


def validate(parameters: Path, data: Path, choice: Choice) -> list[Fault]:
    """Return all faults of the public files, and of the header of the records.

    Raises:
        UsageError: the choice itself makes no sense.
    """
    return _loaded(parameters, data, choice, records=True)[1]


def load(
    parameters: Path, data: Path, choice: Choice, records: bool = True, totals: bool = True
) -> Loaded:
    """Return the public files of an execution.

    Args:
        records: whether the file of records must be there; its header is looked at then.
        totals: whether households need the totals of persons now.

    Raises:
        UsageError: there is a fault; names the first and says how many there are.  Or the choice
            makes no sense.
    """
    loaded, faults = _loaded(parameters, data, choice, records, totals)
    refuse(faults)
    return required(loaded, "loaded is there")


def records_path(data: Path, program: str) -> Path:
    """Return the private file of a program."""
    return data / LAYOUTS[program].file


def public_paths(parameters: Path, data: Path, program: str) -> list[Path]:
    """Return every public file that a program reads: they identify an execution beside the
    records.
    """
    names = [CONFIG, *PARAMETER_FILES]
    more = total_files(data) if program == "h" else []
    return [*(parameters / name for name in names), data / GEOGRAPHY, *more]


def _loaded(
    parameters: Path, data: Path, choice: Choice, records: bool, totals: bool = True
) -> tuple[Loaded | None, list[Fault]]:
    choice.check()
    faults = {name: Faults(name) for name in (CONFIG, *PARAMETER_FILES)}
    resolved = read_config(parameters / CONFIG, choice, faults[CONFIG])
    iterations = read_characteristics(parameters, faults)
    of_blocks = Faults(GEOGRAPHY)
    states = () if resolved is None else states_of(resolved)
    blocks = read_geography(data / GEOGRAPHY, states, of_blocks)
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
    """Return what is wrong with the records as a file: it is missing, or lacks a column."""
    layout = LAYOUTS[program]
    faults = Faults(layout.file)
    with faults.reading(), open(data / layout.file, "rb") as file:
        usable_header(first_line(file), layout.columns, faults)
    return faults.faults


class Inputs(NamedTuple):
    """The files of an execution.

    Attributes:
        parameters, data: paths of folders.
        choice: what is asked for beside them.
        digest: of the public files, as `digest_of` gives it; notices that one changed meanwhile.
        place: of the data relative to the project file: it identifies the records.
    """

    parameters: str
    data: str
    choice: Choice
    digest: str
    place: str = ""

    @property
    def records(self) -> Path:
        """The private file."""
        return records_path(Path(self.data), self.choice.program)

    @property
    def paths(self) -> list[Path]:
        """All files."""
        public = public_paths(Path(self.parameters), Path(self.data), self.choice.program)
        return [*public, self.records]


class Prepared(NamedTuple):
    """The values that are computed from the public files.

    Attributes:
        plan: the plan of the execution.
        domain: the groups of the plan; shards: ranges of these groups.
        lookup: finds the region and iterations of a record.
        published: totals that choose the detail of households, ``None`` for persons.
        complete: whether no public file was missing (`plan` allows the totals to be).
    """

    plan: TablePlan
    domain: Domain
    shards: tuple[Shard, ...]
    lookup: Lookup
    published: dict[Level, Published] | None
    complete: bool = True


def inputs_of(parameters: Path, data: Path, choice: Choice, project: Path = Path("/")) -> Inputs:
    """Return the files of an execution as they are now.

    Args:
        project: folder of the project file, which may be moved together with the data.

    Raises:
        UsageError: one is missing.
        RunError: one cannot be read.
    """
    digest = digest_of(public_paths(parameters, data, choice.program))
    folders = os.path.abspath(parameters), os.path.abspath(data)
    return Inputs(*folders, choice, digest, os.path.relpath(data, project))


def check_records(inputs: Inputs) -> None:
    """Refuse records that are missing or lack a column, by their header.

    Raises:
        UsageError: there is a fault.
    """
    refuse(_header_faults(Path(inputs.data), inputs.choice.program))


@functools.lru_cache(maxsize=1)
def prepared(inputs: Inputs) -> Prepared:
    """Return the values from the public files, cached on this machine; the records may be absent.

    Raises:
        UsageError: a file has a fault.
        RunError: the files are not those that the inputs were made of.
    """
    parameters, data = Path(inputs.parameters), Path(inputs.data)
    paths = public_paths(parameters, data, inputs.choice.program)
    loaded = load(parameters, data, inputs.choice, records=False)
    setup = prepared_of(loaded, lists_digest(paths))
    if digest_of(paths) != inputs.digest:
        raise RunError(
            "PARAMETERS",
            "have a file that changed while it was read",
            "run again when it is whole",
        )
    return setup


def prepared_of(loaded: Loaded, lists: str) -> Prepared:
    """Return the same from files that are loaded.

    Args:
        lists: their `lists_digest`.
    """
    parameters, files, totals = loaded
    domain = domain_of(files, parameters, None if totals is None else regions_of(totals))
    if not domain.levels:
        raise UsageError(
            "config.json", "leaves no level with a budget and a group", "give a level a budget"
        )
    stability = {level.level: level.stability for level in domain.levels}
    return Prepared(
        TablePlan(parameters, stability, lists),
        domain,
        shards_of(domain.levels),
        lookup_of(files, parameters),
        None if totals is None else published_of(domain, totals),
    )


def digest_of(paths: Iterable[Path]) -> str:
    """Return 128-bit hex digest of the content of some files, by their names."""
    digest = hashlib.blake2b(digest_size=16)
    for path in paths:
        digest.update(content_of(path))
    return digest.hexdigest()


def lists_digest(paths: Iterable[Path]) -> str:
    """Return the digest of public files that a plan has beside its parameters.

    The file of parameters is none of them: how it is written is presentation.
    """
    return digest_of(path for path in paths if path.name != CONFIG)


def content_of(path: Path) -> bytes:
    """Return the bytes that identify a file's content.

    Raises:
        UsageError: it is missing.
        RunError: it cannot be read.
    """
    try:
        with open(path, "rb") as file:
            digest = hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16))
            return f"{path.name}\0{file.tell()}\0{digest.hexdigest()}\0".encode()
    except FileNotFoundError:
        raise UsageError(path.name, "is missing", "put it into its folder") from None
    except OSError as refused:
        raise file_error(path.name, "cannot be read", refused) from None


def stamps(inputs: Inputs) -> list[tuple[str, int, int, int, int]]:
    """Return (path, bytes, times of change, inode) of every file: cheap, to notice a change in a
    run.
    """
    out = []
    for path in inputs.paths:
        try:
            status = os.stat(path)
        except FileNotFoundError:
            raise RunError(path.name, "is gone", "put it back") from None
        except OSError as error:
            raise file_error(path.name, "cannot be read", error) from None
        own = status.st_mtime_ns, status.st_ctime_ns, status.st_ino
        out.append((str(path), status.st_size, *own))
    return out


def plan(parameters: Path, data: Path, choice: Choice) -> Prepared:
    """Return what the public files give, perhaps without the totals of households.

    Raises:
        UsageError: there is a fault, or the choice is not possible.
    """
    totals = choice.program != "h" or total_files(data)[0].exists()
    loaded = load(parameters, data, choice, records=False, totals=totals)
    paths = public_paths(parameters, data, choice.program)
    paths = paths if totals else [path for path in paths if path.name != TOTALS]
    return prepared_of(loaded, lists_digest(paths))._replace(complete=totals)


def faults(parameters: Path, data: Path, choice: Choice) -> list[Fault]:
    """Return all faults of the public files; without any, those of the plan.

    Raises:
        UsageError: the choice itself makes no sense.
    """
    fault_list = validate(parameters, data, choice)
    if not fault_list:
        try:
            plan(parameters, data, choice).plan.measured()
        except UsageError as error:
            where = "" if error.field == CONFIG else error.field
            fault_list.append(Fault(CONFIG, None, where, error.rule, error.fix))
    return fault_list


def figures(prepared: Prepared, delta: float | None = None) -> dict[str, Any]:
    """Return every public figure; see `accounting.tabulation.describe`.

    Raises:
        UsageError: a figure is beyond its range.
    """
    delta = DELTA if delta is None else delta
    if not MIN_DELTA <= delta < 1:
        rule = f"must be at least {MIN_DELTA:g}, and below 1"
        raise UsageError("--delta", rule, "write e.g. 1e-10")
    groups = {level.level: level.groups for level in prepared.domain.levels}
    out = describe(prepared.plan, delta, groups)
    empty = _without_block(prepared)
    if empty:
        out["notes"] = [
            *out["notes"],
            f"{empty:,} groups of {TOTALS} are in regions without a "
            "block: their counts are noise alone",
        ]
    if not prepared.complete:
        out["plan_hash"] = None
        out["notes"] = [*out["notes"], f"the plan has no hash before {TOTALS} is there"]
    return out


def _without_block(prepared: Prepared) -> int:
    """Groups of published totals in regions without a block, where no record can be."""
    count = 0
    for level, published in (prepared.published or {}).items():
        domain = required(prepared.domain.of(level), "totals are of levels that run")
        region = published.groups // len(domain.iterations)
        count += int((~np.isin(region, prepared.domain.regions_of[level.region_type])).sum())
    return count

"""Files of a workload: its queries, in JSON or the arrays of NPZ; and strategies that were solved.

A strategy is named by the structure of its workload.  It is public: it depends on the queries and
on no record.  A file is checked against its digest when it is read, and solved again if it is
damaged.  A forged file could make answers less exact, but not less private: the sensitivity is
computed for the mix that is used.
"""

import contextlib
import io
import json
import math
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np

from dpstream.accounting.errors import DpstreamError, UsageError, closest
from dpstream.accounting.libraries import one_thread
from dpstream.accounting.limits import (
    MAX_EXPLICIT_NUMBERS,
    MAX_SOLVED_CELLS,
    MAX_WORKLOAD_BYTES,
    MAX_WORKLOAD_TEXT_BYTES,
)
from dpstream.accounting.places import check_path
from dpstream.accounting.strategies.cells.auto import (
    OBJECTIVES,
    STRATEGIES,
    Plan,
    auto,
    largest,
    named,
)
from dpstream.accounting.strategies.cells.pure import LatticeStrategy, pure
from dpstream.accounting.strategies.cells.stored import (
    from_arrays,
    lattice_arrays,
    lattice_of_arrays,
    to_arrays,
)
from dpstream.accounting.workloads.workload import Workload, from_dict
from dpstream.accounting.workloads.workload import from_arrays as workload_of_arrays
from dpstream.state.disk_errors import unreadable
from dpstream.state.durable import PRIVATE, make_folder, replacing
from dpstream.state.npz import DAMAGED, TooLargeError, arrays_of

_FIELD = "workload file"


def read_workload(path: Path) -> Workload:
    """Return the workload of a file: NPZ by its ending, else JSON.

    Raises:
        UsageError: the file cannot be read, is neither, or holds no valid workload.
    """
    check_path(str(path), _FIELD)
    try:
        if path.suffix == ".npz":
            with open(path, "rb") as file:
                arrays = arrays_of(file, MAX_WORKLOAD_BYTES, MAX_EXPLICIT_NUMBERS)
        elif path.stat().st_size > MAX_WORKLOAD_TEXT_BYTES:
            raise TooLargeError
        else:
            text = path.read_bytes().decode("utf-8-sig")
    except OSError as error:
        raise unreadable(f"{_FIELD} {path.name}", error) from None
    except TooLargeError:
        raise UsageError(
            _FIELD,
            f"is too large: a matrix has at most {MAX_EXPLICIT_NUMBERS:,} numbers, all arrays "
            f"{MAX_WORKLOAD_BYTES:,} bytes, and JSON {MAX_WORKLOAD_TEXT_BYTES:,} bytes",
            "write factors in place of matrices, NPZ in place of JSON, or split the workload",
        ) from None
    except DAMAGED:
        raise UsageError(_FIELD, "is no UTF-8 text or no NPZ file", "write it anew") from None
    return workload_of_arrays(arrays) if path.suffix == ".npz" else from_dict(_parsed(text))


def domain_text(workload: Workload) -> list[dict[str, Any]]:
    """Return the domain as workload files write it."""
    return [
        {"name": a.name, **({"edges": list(a.edges)} if a.edges else {"values": list(a.values)})}
        for a in workload.attributes
    ]


def _parsed(text: str) -> Any:
    """Parse strict JSON: no NaN, no Infinity, no name twice in one object."""
    try:
        return json.loads(text, parse_constant=_no_number, object_pairs_hook=_distinct)
    except DpstreamError:
        raise
    except (ValueError, RecursionError):
        raise UsageError(_FIELD, "is not JSON", "correct its syntax") from None


def _no_number(_: str) -> float:
    raise UsageError("workload", "numbers are finite", "remove NaN and Infinity")


def _distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    entries = dict(pairs)
    if len(entries) < len(pairs):
        raise UsageError("workload", "an object names a key twice", "keep one of them")
    return entries


#: Bytes of a stored strategy once unpacked: more than any that is solved.
MAX_PLAN_BYTES = 1 << 34
#: Cells of one matrix that is solved within seconds.
_QUICK = 2048


def folder_of(given: Path | None) -> Path:
    """Return the folder of strategies: ``given``, else ``dpstream/strategies`` in the user's
    caches.
    """
    if given is not None:
        return given
    home = os.environ.get("XDG_CACHE_HOME")
    return (Path(home) if home else Path.home() / ".cache") / "dpstream" / "strategies"


def solved(
    workload: Workload, folder: Path, objective: str = "total", strategy: str = "auto"
) -> tuple[Plan, Path, bool]:
    """Return the plan of a workload, its file, and whether the file existed.

    A search that takes minutes is announced on stderr.

    Raises:
        UsageError: there is no such strategy or objective, or the workload is too large to be
            solved.
    """
    if strategy not in STRATEGIES:
        raise UsageError("--strategy", f"no strategy {strategy!r}", closest(strategy, STRATEGIES))
    if objective not in OBJECTIVES:
        fix = closest(objective, OBJECTIVES)
        raise UsageError("--objective", f"no objective {objective!r}", fix)
    workload = workload.canonical
    path = folder / f"{workload.structure}-{objective}-{strategy}.npz"
    plan = _read(path, workload.structure)
    if plan is not None:
        return plan, path, True
    rows = workload.cells if len(workload.products) > 1 else max(workload.sizes)
    if _QUICK < rows <= MAX_SOLVED_CELLS:
        text = f"Searching a strategy over {rows:,} cells: minutes of a core; the cache keeps it."
        print(text, file=sys.stderr, flush=True)
    plan = _solve(workload, objective, strategy)
    with contextlib.suppress(OSError):  # without a cache it is solved again
        make_folder(folder, PRIVATE)
        write(path, plan, workload.structure)
    return plan, path, False


def solved_purely(workload: Workload, bits: int, folder: Path) -> tuple[str, LatticeStrategy, bool]:
    """Return name and lattice of the best strategy for pure epsilon, and whether its file existed.

    Raises:
        UsageError: the workload is too large to be solved.
    """
    workload = workload.canonical
    path = folder / f"{workload.structure}-pure-{bits}.npz"
    arrays = _arrays(path)
    with contextlib.suppress(UsageError, KeyError, ValueError):
        if arrays is not None:
            return *lattice_of_arrays(arrays, workload.structure), True
    strategy = pure(workload, bits)
    made = strategy.lattice(bits)
    with contextlib.suppress(OSError):
        make_folder(folder, PRIVATE)
        _keep(path, lattice_arrays(strategy.name, made, workload.structure))
    return strategy.name, made, False


def write(path: Path, plan: Plan, structure: str) -> None:
    """Store a plan in a file that only its owner can read."""
    _keep(path, to_arrays(plan, structure))


def _keep(path: Path, arrays: dict[str, Any]) -> None:
    held = io.BytesIO()
    np.savez(held, **arrays)
    with replacing(path, PRIVATE) as draft:
        draft.write_bytes(held.getbuffer())


def _read(path: Path, structure: str) -> Plan | None:
    arrays = _arrays(path)
    with contextlib.suppress(UsageError, KeyError, ValueError):
        return None if arrays is None else from_arrays(arrays, structure)
    return None


def _arrays(path: Path) -> dict[str, Any] | None:
    try:
        with open(path, "rb") as file:
            return arrays_of(file, MAX_PLAN_BYTES)
    except (*DAMAGED, TooLargeError):
        return None


def _solve(workload: Workload, objective: str, strategy: str) -> Plan:
    best = auto(workload, objective)
    if strategy == "auto":
        return best
    weighted = workload.relative() if objective == "relative" else workload
    with one_thread():
        named_strategy = named(weighted, strategy)
        worst = objective == "worst"
        error = largest(weighted, named_strategy) if worst else named_strategy.error(weighted)
    if not math.isfinite(error):
        raise UsageError("--strategy", "does not measure all that is asked", "choose another")
    return best._replace(strategy=named_strategy, error=error)

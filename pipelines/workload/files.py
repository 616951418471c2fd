"""Workload files: JSON text, or the arrays of NPZ, read into a checked workload."""

import json
from pathlib import Path
from typing import Any

from dpstream.accounting.errors import DpstreamError, PolicyError, UsageError
from dpstream.accounting.limits import (
    MAX_EXPLICIT_NUMBERS,
    MAX_WORKLOAD_BYTES,
    MAX_WORKLOAD_TEXT_BYTES,
)
from dpstream.accounting.places import refuse_url
from dpstream.accounting.workloads.workload import Workload, from_arrays, from_dict
from dpstream.state.disk_errors import unreadable
from dpstream.state.npz import DAMAGED, TooLargeError, arrays_of

_FIELD = "workload file"


def read_workload(path: Path) -> Workload:
    """Return the workload of a file: NPZ by its ending, else JSON.

    Raises:
        UsageError: the file cannot be read, or is neither.
        PolicyError: its content is not a valid workload.
    """
    refuse_url(str(path), _FIELD)
    try:
        if path.suffix == ".npz":
            with open(path, "rb") as file:
                arrays = arrays_of(file, MAX_WORKLOAD_BYTES, MAX_EXPLICIT_NUMBERS)
        elif path.stat().st_size > MAX_WORKLOAD_TEXT_BYTES:
            raise TooLargeError
        else:
            text = path.read_bytes().decode()
    except OSError as error:
        raise unreadable(_FIELD, error) from None
    except TooLargeError:
        raise UsageError(
            _FIELD,
            f"is too large: a matrix has at most {MAX_EXPLICIT_NUMBERS:,} numbers, all arrays "
            f"{MAX_WORKLOAD_BYTES:,} bytes, and JSON {MAX_WORKLOAD_TEXT_BYTES:,} bytes",
            "write factors in place of matrices, NPZ in place of JSON, or split the workload",
        ) from None
    except DAMAGED:
        raise UsageError(_FIELD, "is no UTF-8 text or no NPZ file", "write it anew") from None
    return from_arrays(arrays) if path.suffix == ".npz" else from_dict(_parsed(text))


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
    raise PolicyError("workload", "numbers are finite", "remove NaN and Infinity")


def _distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    entries = dict(pairs)
    if len(entries) < len(pairs):
        raise PolicyError("workload", "an object names a key twice", "keep one of them")
    return entries

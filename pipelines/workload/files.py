"""Workload files: JSON text, or the arrays of NPZ, read into a checked workload."""

import json
import zipfile
from pathlib import Path
from typing import Any

import numpy as np

from dpstream.accounting.errors import DpstreamError, PolicyError, UsageError
from dpstream.accounting.workloads.parse import from_arrays, from_dict
from dpstream.accounting.workloads.workload import Workload

#: Bytes of a file; an explicit matrix of the largest size fits.
MAX_BYTES = 1 << 30
_FIELD = "workload file"


def read_workload(path: Path) -> Workload:
    """The workload of a file: NPZ by its ending, else JSON.

    Raises:
        UsageError: it cannot be read, or is neither.
        PolicyError: what it says is no workload.
    """
    try:
        if path.stat().st_size > MAX_BYTES:
            raise UsageError(_FIELD, f"exceeds {MAX_BYTES} bytes", "write factors, not matrices")
        if path.suffix == ".npz":
            with open(path, "rb") as file, np.load(file, allow_pickle=False) as held:
                arrays = {name: held[name] for name in held.files}
        else:
            text = path.read_bytes().decode()
    except OSError:
        raise UsageError(_FIELD, "cannot be read", "check its path and permissions") from None
    except (ValueError, EOFError, zipfile.BadZipFile):
        raise UsageError(_FIELD, "is no UTF-8 text or no NPZ file", "write it anew") from None
    return from_arrays(arrays) if path.suffix == ".npz" else from_dict(_parsed(text))


def domain_text(workload: Workload) -> list[dict[str, Any]]:
    """The domain as workload files write it."""
    return [
        {"name": a.name, **({"edges": list(a.edges)} if a.edges else {"values": list(a.values)})}
        for a in workload.attributes
    ]


def _parsed(text: str) -> Any:
    """JSON without what JSON does not have: NaN, Infinity, a name twice in one object."""
    try:
        return json.loads(text, parse_constant=_no_number, object_pairs_hook=_distinct)
    except DpstreamError:
        raise
    except (ValueError, RecursionError):
        raise UsageError(_FIELD, "is not JSON", "mend its syntax") from None


def _no_number(_: str) -> float:
    raise PolicyError("workload", "numbers are finite", "remove NaN and Infinity")


def _distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise PolicyError("workload", "an object names a key twice", "keep one of them")
    return found

"""NPZ files that unpack to more than they may, or declare more than they have."""

import io
import resource
import subprocess
import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest

from dpstream.accounting.errors import UsageError
from dpstream.pipelines.workload.planning import read_workload
from dpstream.state.npz import DAMAGED, TooLargeError, arrays_of


def packed(**arrays: object) -> bytes:
    out = io.BytesIO()
    np.savez_compressed(out, **arrays)  # type: ignore[arg-type]
    return out.getvalue()


def member(shape: tuple[int, ...], data: bytes) -> bytes:
    """A file of one array whose header says more than its bytes are."""
    head, out = io.BytesIO(), io.BytesIO()
    np.lib.format.write_array_header_1_0(
        head, {"shape": shape, "fortran_order": False, "descr": "<f8"}
    )
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("a.npy", head.getvalue() + data)
    return out.getvalue()


def test_arrays_are_read_back() -> None:
    given = {"a": np.arange(6.0).reshape(2, 3), "b": np.array(["x", "y"]), "c": np.float64(3)}
    out = arrays_of(io.BytesIO(packed(**given)), 1 << 12, 6)
    assert {name: array.tolist() for name, array in out.items()} == {
        name: np.asarray(array).tolist() for name, array in given.items()
    }


def test_what_is_too_large_or_lies_is_refused() -> None:
    zeros = packed(a=np.zeros(1 << 20, np.uint8))
    with pytest.raises(TooLargeError):
        arrays_of(io.BytesIO(zeros), 1 << 20)
    with pytest.raises(TooLargeError):
        arrays_of(io.BytesIO(zeros), 1 << 30, (1 << 20) - 1)
    for lie in (member((1 << 50,), bytes(80)), member((11,), bytes(80)), member((1, 2), b"")):
        with pytest.raises(DAMAGED):
            arrays_of(io.BytesIO(lie), 1 << 62)
    archive = bytearray(packed(a=np.arange(50.0), b=np.arange(3)))
    for at in range(len(archive)):
        broken = bytes([*archive[:at], archive[at] ^ 16, *archive[at + 1 :]])
        try:
            arrays_of(io.BytesIO(broken), 1 << 20)
        except (*DAMAGED, TooLargeError):
            continue


def limited() -> None:
    """At most 2 GiB of memory for what follows."""
    resource.setrlimit(resource.RLIMIT_AS, (2 << 30, 2 << 30))


def test_a_small_file_takes_little_memory_to_be_refused(tmp_path: Path) -> None:
    """600 MB of zeros in 600 kB."""
    path = tmp_path / "w.npz"
    path.write_bytes(packed(matrix=np.zeros((1, 600_000_000), np.uint8)))
    assert path.stat().st_size < 1 << 20
    with pytest.raises(UsageError) as refused:
        read_workload(path)
    assert refused.value.field == "workload file"
    code = (
        "from pathlib import Path; from dpstream.pipelines.workload.planning import *; import sys\n"
    )
    code += "try: read_workload(Path(sys.argv[1]))\nexcept UsageError: sys.exit(7)"
    command = [sys.executable, "-c", code, str(path)]
    assert subprocess.run(command, preexec_fn=limited, check=False).returncode == 7

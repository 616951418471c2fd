"""Workload files as they come."""

from pathlib import Path

import numpy as np
import pytest

from dpstream.accounting.errors import DpstreamError, PolicyError, UsageError
from dpstream.pipelines.workload import files
from dpstream.pipelines.workload.files import domain_text, read_workload
from tests.pipelines.workload.survey import DOMAIN, workload, write

ONE = '{"domain": [{"name": "a", "size": 2}], "queries": [{"factors": {"a": %s}}]}'


def test_json_and_arrays(tmp_path: Path) -> None:
    assert read_workload(write(tmp_path / "w.json")).digest == workload().digest
    assert domain_text(workload()) == DOMAIN
    np.savez(tmp_path / "w.npz", W=np.eye(3)[:2])
    assert read_workload(tmp_path / "w.npz").queries == 2


@pytest.mark.parametrize(
    "text",
    ["{", "[1]", '"\ud83d', '{"domain": [], "domain": []}', ONE % '{"matrix": [[NaN, 1]]}',
     ONE % '{"matrix": [[1e400, 1]]}', ONE % '{"matrix": [[0, 0]]}', ONE % '{"matrix": []}',
     ONE % '"all"', "[" * 100_000],
)  # fmt: skip
def test_no_workload(text: str, tmp_path: Path) -> None:
    path = tmp_path / "w.json"
    path.write_bytes(text.encode("utf-8", "surrogatepass"))
    with pytest.raises(DpstreamError):
        read_workload(path)


def test_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for path in (tmp_path, tmp_path / "none.json", tmp_path / "none.npz"):
        with pytest.raises(UsageError):
            read_workload(path)
    (tmp_path / "w.npz").write_bytes(b"PK\x03\x04 no archive")
    with pytest.raises(UsageError):
        read_workload(tmp_path / "w.npz")
    np.savez(tmp_path / "o.npz", W=np.array([[object()]]))
    with pytest.raises(UsageError):
        read_workload(tmp_path / "o.npz")
    np.savez(tmp_path / "v.npz", V=np.eye(2))
    with pytest.raises(PolicyError):
        read_workload(tmp_path / "v.npz")
    monkeypatch.setattr(files, "MAX_WORKLOAD_TEXT_BYTES", 10)
    with pytest.raises(UsageError, match="too large"):
        read_workload(write(tmp_path / "w.json"))

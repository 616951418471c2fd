"""A proxy is other data: contents are compared, unpacked, whatever files are called."""

import gzip
from collections.abc import Callable
from pathlib import Path

import pytest

from dpstream.accounting.errors import PolicyError
from dpstream.pipelines.connectors.files.source import recorded
from dpstream.pipelines.jobs.job import Job
from dpstream.pipelines.tuning.read import content_of, refuse_own_data

TEXT = b"user,key,time,value\nu,k,2024-01-01T00:00:00Z,1\n"


def test_content_is_of_the_unpacked_text(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_bytes(TEXT)
    (tmp_path / "b.csv.gz").write_bytes(gzip.compress(TEXT))
    (tmp_path / "c.csv").write_bytes(TEXT[:-2] + b"2\n")
    (tmp_path / "d.csv.gz").write_bytes(gzip.compress(TEXT)[:-9])
    a, b, c, d = (
        content_of(str(tmp_path / name), "csv")
        for name in ("a.csv", "b.csv.gz", "c.csv", "d.csv.gz")
    )
    assert a == b and a[0] == len(TEXT)
    assert a[0] == c[0] and len({a[1], c[1], d[1]}) == 3
    packed = content_of(str(tmp_path / "b.csv.gz"), "parquet")
    assert packed != a


@pytest.mark.parametrize("packed", [False, True])
def test_a_copy_of_the_jobs_own_file_is_refused(
    packed: bool, tmp_path: Path, make_job: Callable[..., Job]
) -> None:
    job, other = make_job("csv"), tmp_path / "other"
    (tmp_path / "in" / "a.csv").write_bytes(TEXT)
    other.mkdir()
    (other / "x.csv").write_bytes(TEXT.replace(b",1\n", b",3\n"))
    refuse_own_data(job, recorded(job, f"{other}/*", "--proxy"))
    (other / "y.csv").write_bytes(gzip.compress(TEXT) if packed else TEXT)
    if packed:
        (other / "y.csv").rename(other / "y.csv.gz")
    with pytest.raises(PolicyError) as error:
        refuse_own_data(job, recorded(job, f"{other}/*", "--proxy"))
    assert error.value.field == "--proxy"

"""Flink for the tests: the local one of the job server, and a session cluster of processes."""

import sys
from collections.abc import Iterator

import pytest

from tests.runners.engines import ROOT, Pool, need_flink, worker_pool

sys.path.insert(0, str(ROOT / "deploy" / "flink"))
import cluster as session

__all__ = ["session"]

#: Seconds are the least that Flink's job server tells of a source's watermark.
LOCAL = ["--parallelism=2"]


@pytest.fixture(scope="module")
def local() -> list[str]:
    """Flags of a Flink inside the job server, with two slots."""
    need_flink()
    return LOCAL


@pytest.fixture
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator["session.Cluster"]:
    """A job manager and two task managers."""
    lib = need_flink().parent / "lib"
    with session.running(lib, tmp_path_factory.mktemp("flink"), workers=2) as flink_cluster:
        yield flink_cluster


@pytest.fixture
def pool() -> Iterator[Pool]:
    """A pool of Python workers."""
    with worker_pool() as python_pool:
        yield python_pool

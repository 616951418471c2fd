"""What tests of more than one folder share, and which of them ``make test`` leaves out."""

import gc
import itertools
import os
import sys
from collections.abc import Generator, Iterator

# Before numpy is loaded, here and in processes of tests: threads of OpenBLAS that wait for each
# other cost CPU seconds where several workers share the cores.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import pytest

from dpstream.state.private_log import keep_in
from tests.golden.refusals import refused
from tests.kafka_broker import Broker, running
from tests.lanes import EXTENDED, SLOW, left_out, read_list

__all__ = ["refused"]

_NUMBERS = itertools.count()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark what the lists leave out, before markers select; refuse a test that has no fixture.

    Otherwise the error appears only when the test runs, which may be a slow one.
    """
    for item in items:
        if isinstance(item, pytest.Function):
            missing = {*item.fixturenames} - {*item._fixtureinfo.name2fixturedefs, "request"}
            if missing:
                raise pytest.UsageError(f"{item.nodeid}: no fixture {', '.join(missing)} is here")
    if config.option.markexpr in config.getini("addopts") and any("::" in a for a in config.args):
        config.option.markexpr = "not slow"  # an extended test that is named runs
    for path, mark in ((SLOW, pytest.mark.slow), (EXTENDED, pytest.mark.extended)):
        ids = [item.nodeid for item in items if item.get_closest_marker("slow") is None]
        out = left_out(ids, read_list(path))
        for item in items:
            if item.nodeid in out:
                item.add_marker(mark)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Collect without the collector, which would walk modules and tests again and again."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


_count_frozen = gc.get_freeze_count


@pytest.hookimpl(trylast=True)
def pytest_collection_finish() -> None:
    """Keep the collector from what is there already: a fifth of a second in each run of a job.

    A run asks how many objects are frozen; to count 700,000 takes 70 ms.
    """
    gc.collect()
    gc.freeze()
    frozen = _count_frozen()
    gc.get_freeze_count = lambda: frozen
    if "apache_beam" in sys.modules:
        from tests import quick_beam

        quick_beam.install()


def pytest_unconfigure() -> None:
    """Let the interpreter collect at its end: DuckDB's binding reports what is left."""
    gc.unfreeze()


@pytest.fixture(autouse=True)
def own_state_folder(
    monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """No test reads or writes what belongs to the user: error logs, heads of remote accounts.

    Its tracebacks go there too, and not beside a job that an earlier test of this process loaded.
    """
    name = f"state-{next(_NUMBERS)}"  # not made: few tests need it
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path_factory.getbasetemp() / name))
    keep_in(None)


@pytest.fixture
def unfrozen() -> Iterator[None]:
    """A collector as in a process of its own."""
    gc.unfreeze()
    counted, gc.get_freeze_count = gc.get_freeze_count, _count_frozen
    yield
    gc.get_freeze_count = counted
    gc.freeze()


@pytest.fixture(scope="session")
def kafka(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Broker]:
    """A running Kafka broker; a test that stops it starts it again."""
    with running(tmp_path_factory.mktemp("kafka")) as broker:
        yield broker

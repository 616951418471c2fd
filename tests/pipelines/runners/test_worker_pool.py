"""The pool of workers: engines of this machine only (processes are started in tests/runners).

The order in which a run's parts end: workers finish, then the engine, then their pools.
"""

from types import SimpleNamespace
from typing import Any

import pytest

from dpstream.pipelines.runners.worker_pool import (
    LoopbackFlinkRunner,
    LoopbackPool,
    LoopbackPrismRunner,
    parser,
)


def worker_request(url: str) -> SimpleNamespace:
    here = SimpleNamespace(url="127.0.0.1:9")
    return SimpleNamespace(
        worker_id="1-1",
        control_endpoint=SimpleNamespace(url=url),
        logging_endpoint=here,
        artifact_endpoint=here,
        provision_endpoint=here,
    )


@pytest.mark.parametrize("host", ["10.0.0.1", "example.org", "0.0.0.0", "127.0.0.1.example.org"])
def test_no_worker_for_another_machines_engine(host: str) -> None:
    pool = LoopbackPool(use_process=True)
    assert "another machine" in pool.StartWorker(worker_request(f"{host}:80"), None).error
    assert pool._workers == [] and pool._harnesses == []


def test_what_starts_a_worker_names_its_engine() -> None:
    request = worker_request("localhost:50")
    own = LoopbackPool(use_process=True, state_cache_size=7, data_buffer_time_limit_ms=9)
    assert own._command(request)[-4:] == ["localhost:50", "1-1", "7", "9"]
    boot = LoopbackPool(use_process=True, container_executable="/opt/boot")
    command = boot._command(request)
    assert command[0] == "/opt/boot" and "--control_endpoint=localhost:50" in command


def test_an_end_of_nobody_is_answered_at_once() -> None:
    pool = LoopbackPool(use_process=True)
    pool.StopWorker(SimpleNamespace(worker_id="1-1"), None)
    assert pool._requests == []


def test_the_port_must_be_named() -> None:
    assert parser().parse_args(["--service_port=0"]).service_port == 0
    with pytest.raises(SystemExit):
        parser().parse_args([])


class Part:
    """Notes what is asked of it, by name."""

    def __init__(self, name: str, calls: list[str]) -> None:
        self.name, self.calls, self.pool = name, calls, self

    def __getattr__(self, verb: str) -> Any:
        return lambda: self.calls.append(f"{self.name} {verb}")


def test_workers_finish_before_their_engine_ends() -> None:
    for kind in (LoopbackPrismRunner, LoopbackFlinkRunner):
        calls: list[str] = []
        runner = kind()
        server: Any = Part("server", calls)
        pools: Any = (Part("a", calls), Part("b", calls))
        runner._server, runner._pools = server, pools
        runner.check()
        runner.drain()
        assert calls == ["server check", "a drain", "b drain"]
        calls.clear()
        runner.close()
        assert calls == ["a finish", "b finish", "server stop", "a stop", "b stop"]
        runner.close()
        runner.check()
        assert len(calls) == 5

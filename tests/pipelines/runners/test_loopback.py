"""The order in which a run's parts end: workers finish, then the engine, then their pools."""

from typing import Any

from dpstream.pipelines.runners.loopback import LoopbackFlinkRunner, LoopbackPrismRunner


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

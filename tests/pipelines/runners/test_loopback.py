"""The order in which a run's parts end: workers finish, then the engine, then their pools."""

from typing import Any

from dpstream.pipelines.runners.loopback import LoopbackFlinkRunner, LoopbackPrismRunner


class Part:
    """Notes what is asked of it, by name."""

    def __init__(self, name: str, told: list[str]) -> None:
        self.name, self.told, self.pool = name, told, self

    def __getattr__(self, verb: str) -> Any:
        return lambda: self.told.append(f"{self.name} {verb}")


def test_workers_finish_before_their_engine_ends() -> None:
    for kind in (LoopbackPrismRunner, LoopbackFlinkRunner):
        told: list[str] = []
        runner = kind()
        runner._server, runner._pools = Part("server", told), (Part("a", told), Part("b", told))
        runner.check()
        runner.drain()
        assert told == ["server check", "a drain", "b drain"]
        told.clear()
        runner.close()
        assert told == ["a finish", "b finish", "server stop", "a stop", "b stop"]
        runner.close()
        runner.check()
        assert len(told) == 5

"""A pool of Python workers that takes requests from this machine only.

    python -m dpstream.pipelines.runners.worker_pool --service_port=50000

A request to start a worker names the engine that the worker is to serve, and a worker runs the
code that its engine sends.  Beam's own pool takes such requests from every machine that reaches
its port.  This one listens on 127.0.0.1 and starts workers for engines of this machine only; it
starts them with the interpreter that runs it, and again if they end before they have reached
their engine, which would wait for them for ever.

Beam's runners for Prism and Flink start the pool in the process of a run, without access from other
machines (`LoopbackRunner`).  Job server and workers end with the run.
"""

import argparse
import copy
import logging
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import grpc
from apache_beam.options.pipeline_options import DebugOptions, PortableOptions
from apache_beam.portability import python_urns
from apache_beam.portability.api import beam_fn_api_pb2, beam_fn_api_pb2_grpc
from apache_beam.runners.portability.flink_runner import FlinkRunner
from apache_beam.runners.portability.portable_runner import PortableRunner
from apache_beam.runners.portability.prism_runner import PrismRunner
from apache_beam.runners.worker import sdk_worker_main
from apache_beam.runners.worker.worker_pool_main import BeamFnExternalWorkerPoolServicer
from apache_beam.transforms.environments import ExternalEnvironment
from apache_beam.utils import thread_pool_executor
from typing_extensions import override

from dpstream.pipelines.runners import job_servers
from dpstream.pipelines.runners.guard import stop, with_parent
from dpstream.pipelines.runners.harness import Harness
from dpstream.pipelines.runners.job_servers import (
    LOOPBACK,
    GuardedJobServer,
    LoopbackFlink,
    LoopbackPrism,
)

_LOGGER = logging.getLogger(__name__)
#: Hosts of engines that a worker is started for.
_HERE = frozenset({LOOPBACK, "localhost", "[::1]"})
#: Seconds between two looks at the workers; that a connection must have lasted to count, because a
#: worker connects before it says who it is; that an ended worker is given to end.
_LOOK, _SETTLED, _STOP = 0.5, 3.0, 10.0
#: Seconds that the bundles of a worker may take to end before their job is cancelled.
DRAIN_SECONDS = 15.0
#: How often a worker is started again.
RESTARTS = 5
_OPTIONS = [
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.http2.max_ping_strikes", 0),
    ("grpc.so_reuseport", 0),  # a port that another pool has is an error
]


class LoopbackPool(BeamFnExternalWorkerPoolServicer):  # type: ignore[misc]
    """Beam's pool, for this machine; its workers are threads of this process, or processes."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self._lock = threading.Lock()
        # Several engines may call theirs the same: no names as keys.
        self._workers: list[_Worker] = []
        self._harnesses: list[Harness] = []
        self._requests: list[str] = []
        self._closed = threading.Event()
        self._server: Any = None

    @classmethod
    @override
    def start(
        cls,
        use_process: bool = False,
        port: int = 0,
        state_cache_size: int = 0,
        data_buffer_time_limit_ms: int = -1,
        container_executable: str | None = None,
    ) -> "tuple[str, LoopbackPool]":
        """Listen; return the address, and the pool, which is to be stopped."""
        server = grpc.server(thread_pool_executor.shared_unbounded_instance(), options=_OPTIONS)
        bound = server.add_insecure_port(f"{LOOPBACK}:{port}")
        pool = cls(
            use_process=use_process,
            container_executable=container_executable,
            state_cache_size=state_cache_size,
            data_buffer_time_limit_ms=data_buffer_time_limit_ms,
        )
        beam_fn_api_pb2_grpc.add_BeamFnExternalWorkerPoolServicer_to_server(pool, server)
        server.start()
        pool._server = server
        if use_process:
            threading.Thread(target=pool._watch, daemon=True).start()
        return f"{LOOPBACK}:{bound}", pool

    @override
    def StartWorker(self, start_worker_request: Any, unused_context: Any) -> Any:
        """Start a worker for an engine of this machine."""
        endpoint = start_worker_request.control_endpoint.url
        if endpoint.rpartition(":")[0] not in _HERE:
            return beam_fn_api_pb2.StartWorkerResponse(error="the engine is on another machine")
        name = start_worker_request.worker_id
        try:
            if self._use_process:
                worker = _Worker(name, self._command(start_worker_request), endpoint)
                with self._lock:
                    self._workers.append(worker)
            else:
                harness = Harness(
                    endpoint,
                    worker_id=name,
                    state_cache_size=self._state_cache_size,
                    data_buffer_time_limit_ms=self._data_buffer_time_limit_ms,
                )
                harness.start()
                with self._lock:
                    self._harnesses.append(harness)
        except Exception:
            return beam_fn_api_pb2.StartWorkerResponse(error=traceback.format_exc())
        return beam_fn_api_pb2.StartWorkerResponse()

    @override
    def StopWorker(self, stop_worker_request: Any, unused_context: Any) -> Any:
        """End a worker; it is not started again.

        Each engine numbers its workers for itself (two task managers of Flink both begin with
        ``1-1``), and only the number is told here.  An engine hangs up before it asks; so of
        several workers it is the one that was hung up on.  If none is in time, all stay: each ends
        by itself with its engine, but an engine waits for ever for one that is taken from it.
        """
        name = stop_worker_request.worker_id
        with self._lock:
            self._requests.append(name)
        try:
            workers = self._hung_up_on(name)
        finally:
            with self._lock:
                self._requests.remove(name)
        for worker in workers:
            worker.stop()
        return beam_fn_api_pb2.StopWorkerResponse()

    def _hung_up_on(self, name: str) -> "list[_Worker | Harness]":
        """Those of a name that are to be stopped now."""
        deadline = time.monotonic() + _STOP
        while True:
            with self._lock:
                both: list[_Worker | Harness] = [*self._workers, *self._harnesses]
                workers = same = [w for w in both if w.name == name and not w.stopped]
                if len(same) > 1:
                    workers = [worker for worker in same if worker.left()]
                for worker in workers:
                    worker.stopped = True
            if workers or not same or time.monotonic() > deadline:
                return workers
            time.sleep(_LOOK / 5)

    def drain(self) -> None:
        """Let the bundles of this process's workers come to their end, and begin none."""
        deadline = time.monotonic() + DRAIN_SECONDS
        with self._lock:
            harnesses = list(self._harnesses)
        for harness in harnesses:
            harness.drain(deadline)

    def finish(self) -> None:
        """End the workers of this process while their engine is still there."""
        deadline = time.monotonic() + _STOP
        with self._lock:
            harnesses, self._harnesses = self._harnesses, []
        for harness in harnesses:
            harness.finish(deadline)

    def stop(self, grace: float | None = None) -> None:
        """Take no more requests, and end all workers."""
        self._server.stop(grace)
        self._closed.set()
        self.finish()
        with self._lock:
            workers, self._workers = self._workers, []
        for worker in workers:
            worker.process.terminate()
        for worker in workers:
            worker.stop()

    def _watch(self) -> None:
        while not self._closed.wait(_LOOK):
            with self._lock:
                # None is started again while it is asked whose end is meant.
                self._workers = [
                    w for w in self._workers if w.name in self._requests or w.goes_on()
                ]

    def _command(self, request: Any) -> list[str]:
        """What starts a worker: Beam's boot program where one is named, else its harness here."""
        control = request.control_endpoint.url
        if self._container_executable:
            return [
                self._container_executable,
                f"--id={request.worker_id}",
                f"--logging_endpoint={request.logging_endpoint.url}",
                f"--artifact_endpoint={request.artifact_endpoint.url}",
                f"--provision_endpoint={request.provision_endpoint.url}",
                f"--control_endpoint={control}",
            ]
        settings = (self._state_cache_size, self._data_buffer_time_limit_ms)
        harness = ["-m", "dpstream.pipelines.runners.harness"]
        return [sys.executable, *harness, control, request.worker_id, *map(str, settings)]


class _Worker:
    """A worker process, and whether it has reached its engine; see `Harness` for its names.

    Attributes:
        ended: whether it has ended by itself and is not started again.
    """

    def __init__(self, name: str, command: Sequence[str], endpoint: str) -> None:
        self.name, self.stopped, self.ended = name, False, False
        host, _, port = endpoint.rpartition(":")
        self._command, self._host, self._port = command, host.strip("[]"), int(port)
        self._starts, self._since, self._settled = 0, 0.0, False
        self.process = self._start()

    def goes_on(self) -> bool:
        """Look at it, start it again if it must be; whether it is to be looked at again."""
        if self.process.poll() is None:
            if not self._settled and job_servers.connected(self.process.pid, self._port):
                self._since = self._since or time.monotonic()
                self._settled = time.monotonic() - self._since >= _SETTLED
            return True
        if self.stopped:
            return False
        # One that had reached its engine is missed there; another is asked for if it is needed.
        self.ended = self._settled or self._starts > RESTARTS
        if self.ended:
            # As long as its engine can ask for its end, that must not be taken for another's.
            with suppress(OSError), socket.create_connection((self._host, self._port), _LOOK):
                return True
            return False
        _LOGGER.warning("A worker ended before it had reached its engine; it is started again.")
        self.process = self._start()
        return True

    def left(self) -> bool:
        """Whether its engine has hung up: it ends then by itself, in order."""
        if (code := self.process.poll()) is not None:
            return self.ended or code == 0 or self._since > 0
        return self._since > 0 and not job_servers.connected(self.process.pid, self._port)

    def stop(self) -> None:
        """End it, in order if it does so in time."""
        stop(self.process, _STOP)

    def _start(self) -> "subprocess.Popen[bytes]":
        self._starts, self._since = self._starts + 1, 0.0
        # A guard, because this is a thread of gRPC's: what the kernel ties to a parent ends
        # with the parent's thread.
        return subprocess.Popen(with_parent(self._command))


class LoopbackRunner(PortableRunner):  # type: ignore[misc]
    """The base of both runners.

    Beam's pool of workers in this process listens on all interfaces, and a job server lives to the
    end of the process.
    """

    _server: GuardedJobServer | None = None
    _pools: tuple[LoopbackPool, ...] = ()

    def check(self) -> None:
        """Refuse, and end, a job server that other machines can reach.

        Raises:
            PolicyError: it listens beyond loopback.
        """
        if self._server is not None:
            self._server.check()

    def drain(self) -> None:
        """Let the bundles of workers in this process come to their end: the job is to be
        cancelled."""
        for pool in self._pools:
            pool.drain()

    def close(self) -> None:
        """End what was started: workers first, while their engine can still let them go."""
        server, self._server = self._server, None
        pools, self._pools = self._pools, ()
        for pool in pools:
            pool.finish()
        if server is not None:
            server.stop()
        for pool in pools:
            pool.stop()

    @override
    def start_and_replace_loopback_environments(self, pipeline: Any, options: Any) -> list[Any]:
        """Start pools of this machine only, and name them in the pipeline."""
        debug = options.view_as(DebugOptions)
        for environment in pipeline.components.environments.values():
            if environment.urn != python_urns.EMBEDDED_PYTHON_LOOPBACK:
                continue
            address, pool = LoopbackPool.start(
                use_process=debug.lookup_experiment("use_loopback_process_worker", False),
                state_cache_size=sdk_worker_main._get_state_cache_size_bytes(options=options),
                data_buffer_time_limit_ms=sdk_worker_main._get_data_buffer_time_limit_ms(
                    debug.experiments or []
                ),
            )
            self._pools += (pool,)
            portable = copy.deepcopy(options.view_as(PortableOptions))
            portable.environment_type, portable.environment_config = "EXTERNAL", address
            external = ExternalEnvironment.from_options(portable).to_runner_api(None)
            environment.urn, environment.payload = external.urn, external.payload
        return []  # they end in `close`, after the engine


class LoopbackPrismRunner(LoopbackRunner, PrismRunner):  # type: ignore[misc]
    """Prism, one for each run."""

    @override
    def default_job_server(self, options: Any) -> GuardedJobServer:
        self._server = LoopbackPrism(options)
        return self._server


class LoopbackFlinkRunner(LoopbackRunner, FlinkRunner):  # type: ignore[misc]
    """Flink, in the job server or a cluster."""

    @override
    def default_job_server(self, options: Any) -> GuardedJobServer:
        self._server = LoopbackFlink(options)
        return self._server


def parser() -> argparse.ArgumentParser:
    """Return the command line; the flags are those of Beam's pool."""
    argument_parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    argument_parser.add_argument("--service_port", type=int, required=True, help="0: any free one")
    argument_parser.add_argument(
        "--container_executable", help="Beam's boot program, in its images"
    )
    return argument_parser


def main(argv: Sequence[str] | None = None) -> None:
    """Serve until SIGINT or SIGTERM."""
    given = parser().parse_args(argv)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    address, pool = LoopbackPool.start(
        use_process=True,
        port=given.service_port,
        container_executable=given.container_executable,
    )
    try:
        print(f"Workers are started on request at {address}.", flush=True)
        with suppress(KeyboardInterrupt):
            threading.Event().wait()
    finally:
        pool.stop(0)


if __name__ == "__main__":
    main()

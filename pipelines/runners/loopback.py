"""Beam's runners for Prism and Flink without access from other machines; they end with the run."""

import copy
from typing import Any

from apache_beam.options.pipeline_options import DebugOptions, PortableOptions
from apache_beam.portability import python_urns
from apache_beam.runners.portability.flink_runner import FlinkRunner
from apache_beam.runners.portability.portable_runner import PortableRunner
from apache_beam.runners.portability.prism_runner import PrismRunner
from apache_beam.runners.worker import sdk_worker_main
from apache_beam.transforms.environments import ExternalEnvironment
from typing_extensions import override

from dpstream.pipelines.runners.job_servers import GuardedJobServer, LoopbackFlink, LoopbackPrism
from dpstream.pipelines.runners.worker_pool import LoopbackPool, Served


class LoopbackRunner(PortableRunner):  # type: ignore[misc]
    """The base of both runners.

    Beam's pool of workers in this process listens on all interfaces, and a job server lives to the
    end of the process.
    """

    _server: GuardedJobServer | None = None
    _pools: tuple[Served, ...] = ()

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
        for served in self._pools:
            served.pool.drain()

    def close(self) -> None:
        """End what was started: workers first, while their engine can still let them go."""
        server, self._server = self._server, None
        pools, self._pools = self._pools, ()
        for served in pools:
            served.pool.finish()
        if server is not None:
            server.stop()
        for served in pools:
            served.stop()

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

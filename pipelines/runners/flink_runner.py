"""Beam's runner for Flink, with an end to what it starts."""

from typing import Any

from apache_beam.runners.portability.flink_runner import FlinkRunner
from typing_extensions import override


class ClosingFlinkRunner(FlinkRunner):  # type: ignore[misc]
    """Beam leaves a job server, and a local Flink in it, running to the end of this process."""

    _server: Any = None

    @override
    def default_job_server(self, options: Any) -> Any:
        self._server = super().default_job_server(options)
        return self._server

    def close(self) -> None:
        """End the job server, if one was started."""
        server, self._server = self._server, None
        if server is not None:
            server.stop()

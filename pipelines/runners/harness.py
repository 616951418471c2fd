"""A worker in a thread of this process that ends in order, and one that is a process.

Beam ends a worker in a thread in the middle of its bundles: their DoFns go on without their engine,
then without keys and store, and each dies with a traceback at the end of a run that has succeeded.
Here the order is: no new bundles, the last ones come to their end, the job is cancelled, the
worker's connections are closed from both sides, and only then does the engine end.
"""

import sys
import threading
import time
from collections.abc import Sequence
from typing import Any

from apache_beam.runners.worker import statesampler
from apache_beam.runners.worker.sdk_worker import BundleProcessorCache, SdkHarness
from apache_beam.utils.sentinel import Sentinel
from typing_extensions import override

#: The thread of a worker that dies with a traceback if its engine ends first: a stop waits for it.
#: The thread that reads data does not, and Flink never ends its stream: no stop waits for it.
_READER = "read_state"
#: Milliseconds between two looks of a bundle's sampler, at most.
_SAMPLING_MS = 5


def end_bundles_soon() -> None:
    """End bundles of this process when their work has ended.

    Beam's worker tells the seconds of each step from a thread that looks at the bundle in growing
    intervals, up to 200 ms, and waits for the thread's next look before the bundle is done: a tenth
    of the bundle's own time more, for each stage and trigger.
    """
    statesampler.StateSampler.__init__.__defaults__ = (_SAMPLING_MS,)


class _Processors(BundleProcessorCache):  # type: ignore[misc]
    """The bundle processors of a worker in this process, which send the engine no metrics.

    All counts are in this process already (`dp_transforms.telemetry`); to collect, name and send
    what Beam counts of each transform takes several milliseconds of every bundle.
    """

    @override
    def get(self, instruction_id: str, bundle_descriptor_id: str) -> Any:
        processor = super().get(instruction_id, bundle_descriptor_id)
        processor.monitoring_infos = list
        return processor


class Harness(SdkHarness):  # type: ignore[misc]
    """A worker that takes no more bundles after it is stopped.

    Attributes:
        name: the engine's name of the worker; workers of other engines may have the same.
        stopped: whether the engine has stopped the harness.
    """

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        end_bundles_soon()
        self._bundle_processor_cache.__class__ = _Processors
        self.name, self.stopped = self._worker_id, False
        self._idle = threading.Condition()
        self._bundles, self._draining = 0, False
        self._thread = threading.Thread(
            target=self.run, name=f"run_worker_{self._worker_id}", daemon=True
        )

    def start(self) -> None:
        """Serve the engine, in a thread."""
        self._thread.start()

    def drain(self, deadline: float) -> None:
        """Take no more bundles; wait until none is left, at most to an instant of the clock
        ``time.monotonic``.  The engine waits for what it still asks for: cancel its job then."""
        with self._idle:
            self._draining = True
            while self._bundles and (seconds := deadline - time.monotonic()) > 0:
                self._idle.wait(seconds)

    def finish(self, deadline: float) -> None:
        """Close the connection, unless the engine has, and wait until the worker has ended."""
        self.stop()
        self._thread.join(max(0.0, deadline - time.monotonic()))
        for thread in threading.enumerate():
            if thread.name == _READER:
                thread.join(max(0.0, deadline - time.monotonic()))

    def left(self) -> bool:
        """Return whether the engine has hung up, or is gone."""
        return not self._thread.is_alive()

    def stop(self) -> None:
        """Close the connection to the engine; again is fine."""
        self._responses.put(Sentinel.sentinel)

    @override
    def _request_process_bundle(self, request: Any) -> None:
        with self._idle:
            if self._draining:
                return
            self._bundles += 1
        super()._request_process_bundle(request)

    @override
    def _execute(self, task: Any, request: Any) -> None:
        try:
            super()._execute(task, request)
        finally:
            if request.WhichOneof("request") == "process_bundle":
                with self._idle:
                    self._bundles -= 1
                    self._idle.notify_all()


def main(arguments: Sequence[str] | None = None) -> None:
    """Serve an engine until it ends.

    Args:
        arguments: address of the engine, id of the worker, entries of the state's cache, and
            milliseconds after which buffered output is sent (default: of the command line).
    """
    endpoint, worker_id, cache, milliseconds = sys.argv[1:] if arguments is None else arguments
    end_bundles_soon()
    SdkHarness(
        endpoint,
        worker_id=worker_id,
        state_cache_size=int(cache),
        data_buffer_time_limit_ms=int(milliseconds),
    ).run()


if __name__ == "__main__":
    main()

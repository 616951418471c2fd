"""Pipelines whose input ends and whose workers hand over files: run on an engine, to their end.

Workers and launcher share folders, so engines whose workers are other machines do not fit.  What a
pipeline has done is known by the files, because Flink's pipelines do not end by themselves.
"""

import contextlib
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from dpstream.accounting.errors import DpstreamError, UsageError
from dpstream.pipelines.runners.memory import sparing_memory

#: Engines whose workers read and write files where the launcher does.
_SHARING = ("DirectRunner", "PrismRunner", "FlinkRunner")
_LOOK_SECONDS = 0.2
#: Looks between two at the engine's ports.
_CHECK_EVERY = 10
#: States of a pipeline on which nothing follows.
_ENDED = ("DONE", "FAILED", "CANCELLED")


class Runner(NamedTuple):
    """The runner of a job.

    Attributes:
        name: of the table in `pipelines.runners.table`; flags: of Beam.
        parallelism: of its workers.
    """

    name: str
    flags: tuple[str, ...] = ()
    parallelism: int = 1

    def engine(self) -> Any:
        """Return the engine.

        Raises:
            UsageError: there is no such runner, or not on this machine, or not with these flags.
        """
        from dpstream.pipelines.runners.table import make_runner

        return make_runner(self.name, self.beam_args)

    def check(self) -> None:
        """Refuse a runner that cannot be used, before anything is charged.

        Raises:
            UsageError: there is no such runner, it is not on this machine, or its workers do not
                share folders with the launcher.
        """
        if self.name not in _SHARING:
            raise UsageError(
                "--runner",
                "does not run bounded jobs: its workers do not share this machine's folders",
                f"use {', '.join(_SHARING)}",
            )
        self.engine()

    @property
    def beam_args(self) -> list[str]:
        """All its flags."""
        more = [f"--parallelism={self.parallelism}"] if self.name == "FlinkRunner" else []
        return [*self.flags, *more]


def run_to_end(
    runner: Runner,
    run_id: str,
    build: Callable[[Any], object],
    handed_over: Callable[[], bool],
    errors: Callable[[], Sequence[DpstreamError]] = tuple,
) -> None:
    """Build a pipeline and run it until all is handed over; then this process forgets its keys.

    Args:
        run_id: of the charge, whose keys workers in this process have made.
        build: puts the transforms into the pipeline that it is given.
        handed_over: whether everything is there.
        errors: errors of workers elsewhere, as `runners.errors.coded` takes them.

    Raises:
        DpstreamError: it failed.
    """
    import apache_beam as beam

    from dpstream.dp_transforms.noise.secret_source import destroy_keys
    from dpstream.dp_transforms.telemetry import forget_error
    from dpstream.pipelines.runners.errors import coded

    engine, started = runner.engine(), None
    pipeline = beam.Pipeline(runner=engine.runner, options=engine.options)
    build(pipeline)
    forget_error()
    try:
        with sparing_memory():
            started = pipeline.run()
            engine.check()
            if engine.kind.ends:
                started.wait_until_finish()
            else:
                _until_handed_over(started, engine, handed_over)
    except BaseException as error:
        with contextlib.suppress(Exception):
            engine.drain()
            if started is not None:
                started.cancel()
        if not isinstance(error, Exception):
            raise
        raise coded(error, errors()) from None
    finally:
        try:
            engine.close()
        finally:
            destroy_keys(run_id)


def _until_handed_over(started: Any, engine: Any, handed_over: Callable[[], bool]) -> None:
    """Wait for everything, and cancel a pipeline that would not end by itself."""
    looks = 0
    while not handed_over():
        if str(started.state) in _ENDED:
            started.wait_until_finish()  # raises what it failed with
            return
        looks += 1
        if looks % _CHECK_EVERY == 0:
            engine.check()
        time.sleep(_LOOK_SECONDS)
    engine.drain()
    with contextlib.suppress(Exception):  # a runner reports a cancelled pipeline as a failed one
        started.cancel()
    if engine.cancel is not None:
        engine.cancel()
    with contextlib.suppress(Exception):
        started.wait_until_finish()

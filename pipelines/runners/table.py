"""Which engine runs a job; always named, never guessed from the pipeline.

One table: what an engine can do, which flags it takes, what it needs on this machine, and the
settings without which it would lose rows or promises (``pipelines.runners.settings``).
"""

import difflib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from apache_beam.options.pipeline_options import (
    DebugOptions,
    DirectOptions,
    FlinkRunnerOptions,
    PipelineOptions,
    PortableOptions,
    StandardOptions,
    _BeamArgumentParser,
)

from dpstream.accounting.errors import UsageError
from dpstream.pipelines.runners import settings


class EngineKind(NamedTuple):
    """An engine of the table.

    Attributes:
        engine: Beam's name of it.
        settle: checks the flags and this machine and adds what the flow needs:
            ``(options, flags) -> further flags``.
        make: the runner, once all is settled.
        streaming: takes input without end, and files as a stream, whose releases come while they
            are read; else input that ends only.
        by_reference: stages are threads of this process and decode each element once, so batches
            pass between them without bytes (`dp_transforms.batches`).
        ends: a pipeline whose input has ended ends by itself; Flink's go on, because without
            its impulse there are no more checkpoints, and must be cancelled when all is done.
        spreads: a source may have several elements, each with a watermark.  Prism (2.77) keeps
            one for all, that of the element it heard of last: the fastest would speak for all.
        flags: those that its job server knows and Beam's Python does not.
        cancel: what ends a pipeline of these options where the runner's own cancel does not.
    """

    engine: str
    settle: Callable[[PipelineOptions, Sequence[str]], list[str]]
    make: Callable[[], Any]
    streaming: bool
    by_reference: bool = False
    ends: bool = True
    spreads: bool = True
    flags: frozenset[str] = frozenset()
    cancel: Callable[[PipelineOptions], Callable[[], None] | None] = lambda _: None


_FN_API = EngineKind(
    "FnApiRunner", settings.fn_api, settings.fn_api_runner, streaming=False, by_reference=True
)

#: Names a user may write and the engine they mean.
RUNNERS = {
    "DirectRunner": _FN_API,
    "FnApiRunner": _FN_API,
    "PrismRunner": EngineKind(
        "PrismRunner",
        settings.prism,
        settings.prism_runner,
        streaming=True,
        by_reference=True,
        spreads=False,
    ),
    "FlinkRunner": EngineKind(
        "FlinkRunner",
        settings.flink,
        settings.flink_runner,
        streaming=True,
        ends=False,
        flags=settings.FLINK_FLAGS,
        cancel=settings.flink_cancel,
    ),
    "DataflowRunner": EngineKind(
        "DataflowRunner", settings.dataflow, settings.dataflow_runner, streaming=True
    ),
}


class Engine(NamedTuple):
    """What runs a pipeline.

    Attributes:
        kind: what it can do.
        runner, options: for ``beam.Pipeline``.
        cancel: to be called after the runner's own cancel, which is not enough.
    """

    kind: EngineKind
    runner: Any
    options: PipelineOptions
    cancel: Callable[[], None] | None = None

    def fitted(self, reader: Any) -> Any:
        """A source's reader as this engine can run it: with one element where it must be."""
        return reader if self.kind.spreads else getattr(reader, "as_one", lambda: reader)()

    def check(self) -> None:
        """Refuse an engine that other machines can reach, once it runs.

        Raises:
            PolicyError: it listens beyond loopback.
        """
        if (check := getattr(self.runner, "check", None)) is not None:
            check()

    def drain(self) -> None:
        """Let what workers in this process have begun come to its end, before a cancel."""
        if (drain := getattr(self.runner, "drain", None)) is not None:
            drain()

    def close(self) -> None:
        """End what the runner has started on this machine, once nobody waits for it any more."""
        if (close := getattr(self.runner, "close", None)) is not None:
            close()


def lives_on(name: str) -> bool:
    """Whether a pipeline must be cancelled on the engine, or would outlive its launcher."""
    return name in RUNNERS and not RUNNERS[name].ends


def make_runner(name: str, beam_args: Sequence[str]) -> Engine:
    """The engine of a runner's name and further Beam flags.

    Raises:
        UsageError: an unknown runner, flags that break the flow's promises, or a part of the
            engine that is not on this machine.
    """
    if name not in RUNNERS:
        raise UsageError(
            "--runner", f"must be one of {', '.join(RUNNERS)}", "use --runner=DirectRunner"
        )
    kind = RUNNERS[name]
    refuse_unknown(beam_args, kind.flags)
    parsed_options = PipelineOptions(list(beam_args), runner=kind.engine)
    _refuse_leaks(parsed_options)
    _refuse_open(parsed_options)
    flags = [*beam_args, *kind.settle(parsed_options, beam_args)]
    options = PipelineOptions(flags, runner=kind.engine)
    options.view_as(StandardOptions).streaming = kind.streaming
    return Engine(kind, kind.make(), options, kind.cancel(options))


def _refuse_leaks(options: PipelineOptions) -> None:
    """Refuse what shows records to others or shares a worker's state."""
    direct = options.view_as(DirectOptions)
    if direct.direct_num_workers != 1:
        raise UsageError(
            "--direct_num_workers",
            "must be 1: several processes would share one worker's state",
            "leave it out; [performance] threads uses more cores",
        )
    if direct.direct_running_mode != "in_memory":
        # Also with one worker: records would go through a port that lets other machines in, and
        # from process to process by bytes (2.3 times the CPU seconds, 2.7 times the memory).
        raise UsageError(
            "--direct_running_mode",
            "must be in_memory: the flow's stages share one process",
            "leave it out; [performance] threads uses more cores",
        )
    if "enable_data_sampling" in (options.view_as(DebugOptions).experiments or []):
        raise UsageError(
            "--experiments=enable_data_sampling", "would hand records to the runner", "leave it out"
        )
    if "enable_hot_key_logging" in options.get_all_options(drop_default=True):
        raise UsageError("--enable_hot_key_logging", "would write keys into logs", "leave it out")


def _refuse_open(options: PipelineOptions) -> None:
    """Refuse what opens ports of this process to all machines, inside Beam."""
    if options.view_as(PortableOptions).job_endpoint == "embed":
        raise UsageError("--job_endpoint", "must be HOST:PORT", "leave it out, or name a server")
    if options.view_as(FlinkRunnerOptions).flink_submit_uber_jar:
        raise UsageError("--flink_submit_uber_jar", "would let other machines in", "leave it out")


def refuse_unknown(beam_args: Sequence[str], further: frozenset[str]) -> None:
    """A flag that neither this program nor Beam knows is a typing error, not a silent no-op."""
    known_flags = {"runner", *further}
    for options in PipelineOptions.__subclasses__():
        beam_parser = _BeamArgumentParser(add_help=False)
        options._add_argparse_args(beam_parser)
        known_flags |= {flag.lstrip("-") for a in beam_parser._actions for flag in a.option_strings}
    for argument in beam_args:
        flag = argument.lstrip("-").partition("=")[0]
        if argument.startswith("--") and flag not in known_flags:
            close = difflib.get_close_matches(flag, known_flags, 1)
            fix = f"did you mean --{close[0]}?" if close else "leave it out"
            raise UsageError(f"--{flag}", "is no flag of this program or of Beam", fix.rstrip("?"))

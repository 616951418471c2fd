"""The engines that run jobs; a job always names one, and none is guessed from the pipeline.

One table: what an engine can do, which flags it takes, what it needs on this machine, and the
settings without which it would lose rows or promises.

**Flags.**  An engine needs something from this machine and from its flags, and must not be given
other things.  Each ``settle`` function gets the flags as Beam parsed them and as they were written,
refuses what does not go together with the flow, and returns further flags.  The reasons were
measured; tests/runners shows them.
"""

import argparse
import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from apache_beam.options.pipeline_options import (
    DebugOptions,
    DirectOptions,
    FlinkRunnerOptions,
    GoogleCloudOptions,
    JobServerOptions,
    PipelineOptions,
    PortableOptions,
    PrismRunnerOptions,
    StandardOptions,
    WorkerOptions,
    _BeamArgumentParser,
)

from dpstream.accounting.errors import PolicyError, UsageError, nearest
from dpstream.accounting.extras import require
from dpstream.pipelines.runners import parts
from dpstream.pipelines.runners.job_servers import (
    OPEN,
    LoopbackPrism,
    cancel_on_flink,
    unique_job_name,
)

#: Settings of Flink that Beam's Python does not know and passes on to the job server.
FLINK_FLAGS = frozenset(
    {
        "checkpointing_interval",
        "checkpoint_timeout_millis",
        "min_pause_between_checkpoints",
        "externalized_checkpoints_enabled",
        "retain_externalized_checkpoints_on_cancellation",
        "fail_on_checkpointing_errors",
        "unaligned_checkpoint_enabled",
        "savepoint_path",
        "state_backend",
        "state_backend_storage_path",
        "max_bundle_size",
        "max_bundle_time_mills",
        "number_of_execution_retries",
        "execution_retry_delay",
        "auto_watermark_interval",
        "shutdown_sources_after_idle_ms",
        "latency_tracking_interval",
        "flink_conf_dir",
        "disable_metrics",
    }
)
#: The job server's log, and how its virtual machine works: it lives as long as one run, and with a
#: compiler that optimises less, and one collector, starting costs it half the CPU time.
_QUIET = "-Dorg.slf4j.simpleLogger.defaultLogLevel=warn"
SHORT_LIVED = ("-XX:TieredStopAtLevel=1", "-XX:+UseSerialGC")
#: Flink's names for a cluster inside the job server.
_LOCAL_FLINK = ("[local]", "[auto]")
_ENVIRONMENTS = ("LOOPBACK", "EXTERNAL", "DOCKER", "PROCESS")
#: Seconds (ten years) that a job may be watched: after Beam's default of five minutes, the launcher
#: would give up on any job that still runs.
_FOREVER = "315360000"
#: Beam's name of workers that are processes of this machine.
_PROCESS_WORKERS = "use_loopback_process_worker"
#: Beam would list the installed packages for the engine (`pip freeze`) before it sends a job;
#: nothing reads the list.
NO_PACKAGE_LIST = "--experiments=disable_logging_submission_environment"
_AT_LEAST_ONCE = "streaming_mode_at_least_once"
#: Prism (2.77) splits a bundle that is slow, also one of a stage with state: then two bundles have
#: the same key at once, and what one of them keeps is lost.
PRISM_WHOLE_BUNDLES = "--experiments=prism_disable_sdf_split"


def fn_api(_options: PipelineOptions, _flags: Sequence[str]) -> list[str]:
    """Return the engine inside this process needs nothing."""
    return []


def fn_api_runner() -> Any:
    """Return Beam's engine in this process, without a cache of the state that is in this process
    anyway.

    Beam weighs what it caches by a walk through the globals of all modules, half a millisecond for
    each access to a shard's state, and holds what a shard has let go of.
    """
    from apache_beam.runners.portability.fn_api_runner import FnApiRunner, worker_handlers

    from dpstream.pipelines.runners.harness import end_bundles_soon

    end_bundles_soon()
    worker_handlers.STATE_CACHE_SIZE_MB = 0
    return FnApiRunner()


def prism(options: PipelineOptions, flags: Sequence[str]) -> list[str]:
    """Find Prism, of the Beam version of this program; its workers are threads of this process.

    Raises:
        UsageError: no such program, one of another version, or workers outside this process.
        PolicyError: it would let other machines in (see ``pipelines.runners.job_servers``).
    """
    named = options.view_as(PrismRunnerOptions).prism_location
    program = parts.prism(named)
    if program is None and options.view_as(PortableOptions).job_endpoint is None:
        raise UsageError(
            "--prism_location",
            "names no file" if named else "is needed: Prism was not found",
            "run `dpstream doctor --fix`, which builds it, or give Prism's program",
        )
    if program is not None and parts.prism_version(program) not in (None, parts.beam_version()):
        raise UsageError(
            "--prism_location",
            f"is a Prism of another Beam than {parts.beam_version()}",
            "run `dpstream doctor --fix`",
        )
    if program is not None and parts.prism_is_open(program):
        raise PolicyError(LoopbackPrism.flag, OPEN, LoopbackPrism.fix)
    if options.view_as(PortableOptions).environment_type not in (None, "LOOPBACK"):
        raise UsageError(
            "--environment_type", "must be LOOPBACK on Prism", "leave it out, or use Flink"
        )
    if options.view_as(DebugOptions).lookup_experiment(_PROCESS_WORKERS, False):
        # Batches pass between its stages by reference.
        raise UsageError(
            f"--experiments={_PROCESS_WORKERS}",
            "starts workers as processes, and Prism's are threads of this one",
            "leave it out, or use Flink",
        )
    return [
        *([f"--prism_location={program}"] if program is not None and not named else []),
        PRISM_WHOLE_BUNDLES,
        *_unless(flags, "prism_log_level", "warn"),
        *_unless(flags, "job_server_timeout", _FOREVER),
    ]


def prism_runner() -> Any:
    """Return Beam's local streaming engine."""
    from dpstream.pipelines.runners.worker_pool import LoopbackPrismRunner

    return LoopbackPrismRunner()


def flink(options: PipelineOptions, flags: Sequence[str]) -> list[str]:
    """Find the job server, say where workers run, and set what rows depend on.

    Without checkpoints a source without end is read inside Flink's shut-down, and no timer
    ever fires.  Outputs of a bundle that a checkpoint ends would be kept back while the
    watermark goes on, and a release would miss them: so bundles end before checkpoints, and
    soon (Flink's default is ten seconds).

    Raises:
        UsageError: a missing part, an unknown place for workers, no checkpoints, or sources that
            end by themselves.
    """
    portable = options.view_as(PortableOptions)
    more = [] if portable.job_endpoint else _job_server(options)
    local = options.view_as(FlinkRunnerOptions).flink_master in _LOCAL_FLINK
    place = portable.environment_type or ("LOOPBACK" if local else None)
    if place not in _ENVIRONMENTS:
        raise UsageError(
            "--environment_type",
            f"must be one of {', '.join(_ENVIRONMENTS)}",
            "use EXTERNAL with --environment_config=HOST:PORT of a worker pool on the cluster",
        )
    if place in ("EXTERNAL", "PROCESS") and not portable.environment_config:
        raise UsageError(
            "--environment_config", f"is required with {place}", "give HOST:PORT of the worker pool"
        )
    interval = _value(flags, "checkpointing_interval")
    if interval is not None and not (interval.isdigit() and int(interval)):
        raise UsageError(
            "--checkpointing_interval",
            "must be at least 1 millisecond",
            "use 1000, or leave it out",
        )
    if _value(flags, "shutdown_sources_after_idle_ms") is not None:
        raise UsageError(
            "--shutdown_sources_after_idle_ms",
            "can stop a run for good: the clock and a stage would wait for each other",
            "leave it out",
        )
    named = options.view_as(GoogleCloudOptions).job_name
    return [
        *more,
        NO_PACKAGE_LIST,
        # On a cluster it is cancelled by its name.
        *([] if local else [f"--job_name={unique_job_name(named)}"]),
        *([] if portable.environment_type else [f"--environment_type={place}"]),
        *_unless(flags, "checkpointing_interval", "1000"),
        "--finish_bundle_before_checkpointing",
        # A stage gets the output of the one before when that one's bundle has ended and its
        # watermark was sent.  Tests of keys wait for both (Flink's defaults: 10 s and 200 ms).
        *_unless(flags, "max_bundle_time_mills", "20"),
        *_unless(flags, "auto_watermark_interval", "20"),
        *_unless(flags, "job_server_timeout", _FOREVER),
        # A coded refusal comes back after a few tries; a cluster has its own restart strategy.
        *(_unless(flags, "number_of_execution_retries", "3") if local else []),
        *(_unless(flags, "execution_retry_delay", "1000") if local else []),
    ]


def flink_recorded(options: PipelineOptions, flags: Sequence[str]) -> list[str]:
    """Return the flags with which a Flink inside the job server runs a recording once, on workers
    in this process; none for other places, and where the flags say how a job begins again.

    A failure ends such a run, as it does on Prism, and the same command continues it from the
    store.  So no element is decoded a second time, and batches pass between stages by reference:
    by bytes the run takes twice the CPU time.  Nothing goes back to its checkpoints, so they are
    rare; without any, no timer fires.
    """
    again = ("number_of_execution_retries", "savepoint_path")
    if (
        options.view_as(FlinkRunnerOptions).flink_master not in _LOCAL_FLINK
        or options.view_as(PortableOptions).environment_type not in (None, "LOOPBACK")
        or options.view_as(DebugOptions).lookup_experiment(_PROCESS_WORKERS, False)
        or any(_value(flags, name) is not None for name in again)
    ):
        return []
    return ["--number_of_execution_retries=0", *_unless(flags, "checkpointing_interval", "10000")]


def flink_cancel(options: PipelineOptions) -> Callable[[], None] | None:
    """Return the call that ends a settled job on its cluster; ``None`` if its job server ends
    it.
    """
    master = options.view_as(FlinkRunnerOptions).flink_master
    if master in _LOCAL_FLINK:
        return None
    name = options.view_as(GoogleCloudOptions).job_name
    return functools.partial(cancel_on_flink, master, name)


def flink_runner() -> Any:
    """Return Beam's runner for Flink, local or a cluster."""
    from dpstream.pipelines.runners.worker_pool import LoopbackFlinkRunner

    return LoopbackFlinkRunner()


def _job_server(options: PipelineOptions) -> list[str]:
    """Flags that start Flink's job server on this machine."""
    named = options.view_as(FlinkRunnerOptions).flink_job_server_jar
    jar = parts.job_server(named)
    if jar is None:
        raise UsageError(
            "--flink_job_server_jar",
            "names no file" if named else "is needed: no job server was found",
            "run `make flink`, or give the jar of Beam's job server for Flink",
        )
    if parts.java_version(options.view_as(JobServerOptions).job_server_java_launcher) is None:
        raise UsageError(
            "--job_server_java_launcher", "is needed: no Java runs here", "install Java 17"
        )
    properties = options.view_as(JobServerOptions).job_server_jvm_properties
    # A virtual machine refuses two collectors, and takes the last of two other settings.
    own = any(text.startswith("-XX:") for text in properties)
    tuned: tuple[str, ...] = () if own else SHORT_LIVED
    if tuned and (classes := jar.with_suffix(".jsa")).is_file():
        tuned = (*tuned, f"-XX:SharedArchiveFile={classes}")  # `deploy/flink/archive.py`
    return [
        *([] if named else [f"--flink_job_server_jar={jar}"]),
        *(f"--job_server_jvm_property={text}" for text in (_QUIET, *tuned)),
    ]


def dataflow(options: PipelineOptions, _flags: Sequence[str]) -> list[str]:
    """Check that a Dataflow job runs the flow as it is meant: this image, each record once.

    Raises:
        UsageError: a required option is missing, or one allows records twice.
    """
    cloud = options.view_as(GoogleCloudOptions)
    for name, fix in (
        ("project", "give the Google Cloud project"),
        ("region", "give the region of the workers"),
        ("temp_location", "give a folder gs://BUCKET/FOLDER"),
    ):
        if not getattr(cloud, name):
            option = "gcp-project" if name == "project" else name
            raise UsageError(f"--{option}", "is required on Dataflow", fix)
    if not options.view_as(WorkerOptions).sdk_container_image:
        raise UsageError(
            "--sdk_container_image",
            "is required on Dataflow: workers need this program",
            "build the image of the Dockerfile, push it, and name it",
        )
    refuse_at_least_once(options)
    if "disable_streaming_engine" in (options.view_as(DebugOptions).experiments or []):
        raise UsageError(
            "--experiments=disable_streaming_engine", "is not supported", "leave it out"
        )
    require("dataflow", "--runner=DataflowRunner")
    exactly = "streaming_mode_exactly_once"
    return [
        *([] if cloud.enable_streaming_engine else ["--enable_streaming_engine"]),
        *(
            []
            if exactly in (cloud.dataflow_service_options or [])
            else [f"--dataflow_service_option={exactly}"]
        ),
    ]


def refuse_at_least_once(options: PipelineOptions) -> None:
    """Refuse Dataflow's mode in which records count twice between BOUND and RELEASE.

    Raises:
        UsageError: it is asked for.
    """
    services = options.view_as(GoogleCloudOptions).dataflow_service_options or []
    experiments = options.view_as(DebugOptions).experiments or []
    if any(_AT_LEAST_ONCE in option for option in (*services, *experiments)):
        raise UsageError(
            "--dataflow_service_options",
            "must not allow at-least-once: records would count twice",
            "leave it out",
        )


def dataflow_runner() -> Any:
    """Return Google's service."""
    from apache_beam.runners.dataflow.dataflow_runner import DataflowRunner

    return DataflowRunner()


def _value(flags: Sequence[str], name: str) -> str | None:
    """What ``--name=value`` or ``--name value`` says; the last one counts."""
    setting = None
    for flag, after in itertools.zip_longest(flags, flags[1:], fillvalue=""):
        given, equals, value = flag.partition("=")
        if given == f"--{name}":
            setting = value if equals else after
    return setting


def _unless(flags: Sequence[str], name: str, value: str) -> list[str]:
    """``--name=value``, unless the flag is there."""
    return [] if _value(flags, name) is not None else [f"--{name}={value}"]


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
        recorded: flags with which an engine that is not always ``by_reference`` is so for a
            recording; none where it cannot be.
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
    recorded: Callable[[PipelineOptions, Sequence[str]], list[str]] = lambda *_: []


_FN_API = EngineKind("FnApiRunner", fn_api, fn_api_runner, streaming=False, by_reference=True)

#: Names a user may write and the engine they mean.
RUNNERS = {
    "DirectRunner": _FN_API,
    "FnApiRunner": _FN_API,
    "PrismRunner": EngineKind(
        "PrismRunner",
        prism,
        prism_runner,
        streaming=True,
        by_reference=True,
        spreads=False,
    ),
    "FlinkRunner": EngineKind(
        "FlinkRunner",
        flink,
        flink_runner,
        streaming=True,
        ends=False,
        flags=FLINK_FLAGS,
        cancel=flink_cancel,
        recorded=flink_recorded,
    ),
    "DataflowRunner": EngineKind("DataflowRunner", dataflow, dataflow_runner, streaming=True),
}


class Engine(NamedTuple):
    """An engine that runs a pipeline.

    Attributes:
        kind: what it can do.
        runner, options: arguments of ``beam.Pipeline``.
        cancel: is called after the runner's own cancel, which does not end everything.
        by_reference: batches pass between its stages by reference.
    """

    kind: EngineKind
    runner: Any
    options: PipelineOptions
    cancel: Callable[[], None] | None = None
    by_reference: bool = False

    def fitted(self, reader: Any) -> Any:
        """Return a source's reader as this engine can run it: with one element where it must be."""
        return reader if self.kind.spreads else getattr(reader, "as_one", lambda: reader)()

    def check(self) -> None:
        """Refuse an engine that other machines can reach, once it runs.

        Raises:
            PolicyError: it listens beyond loopback.
        """
        getattr(self.runner, "check", lambda: None)()

    def drain(self) -> None:
        """Let what workers in this process have begun come to its end, before a cancel."""
        getattr(self.runner, "drain", lambda: None)()

    def close(self) -> None:
        """End what the runner has started on this machine, once nobody waits for it any more."""
        getattr(self.runner, "close", lambda: None)()


def lives_on(name: str) -> bool:
    """Return whether a pipeline must be cancelled on the engine, or would outlive its launcher."""
    return name in RUNNERS and not RUNNERS[name].ends


def make_runner(name: str, beam_args: Sequence[str], recorded: bool = False) -> Engine:
    """Return the engine of a runner's name and further Beam flags.

    Args:
        recorded: the input ends, and a run that has failed is begun again by a person.

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
    direct = parsed_options.view_as(DirectOptions)
    # What shows records to others, shares a worker's state, or, inside Beam, opens ports of this
    # process to all machines.
    for is_set, flag, rule, fix in (
        (
            direct.direct_num_workers != 1,
            "--direct_num_workers",
            "must be 1: several processes would share one worker's state",
            "leave it out; threads = 4 in [job.NAME] uses more cores",
        ),
        (
            # Also with one worker: records would go through a port that lets other machines in,
            # and from process to process by bytes (2.3 times the CPU seconds, 2.7 times the
            # memory).
            direct.direct_running_mode != "in_memory",
            "--direct_running_mode",
            "must be in_memory: the flow's stages share one process",
            "leave it out; threads = 4 in [job.NAME] uses more cores",
        ),
        (
            "enable_data_sampling" in (parsed_options.view_as(DebugOptions).experiments or []),
            "--experiments=enable_data_sampling",
            "would hand records to the runner",
            "leave it out",
        ),
        (
            "enable_hot_key_logging" in parsed_options.get_all_options(drop_default=True),
            "--enable_hot_key_logging",
            "would write keys into logs",
            "leave it out",
        ),
        (
            parsed_options.view_as(PortableOptions).job_endpoint == "embed",
            "--job_endpoint",
            "must be HOST:PORT",
            "leave it out, or name a server",
        ),
        (
            parsed_options.view_as(FlinkRunnerOptions).flink_submit_uber_jar,
            "--flink_submit_uber_jar",
            "would let other machines in",
            "leave it out",
        ),
    ):
        if is_set:
            raise UsageError(flag, rule, fix)
    once = kind.recorded(parsed_options, beam_args) if recorded else []
    flags = [*beam_args, *once, *kind.settle(parsed_options, [*beam_args, *once])]
    options = PipelineOptions(flags, runner=kind.engine)
    options.view_as(StandardOptions).streaming = kind.streaming
    return Engine(kind, kind.make(), options, kind.cancel(options), kind.by_reference or bool(once))


def refuse_unknown(
    beam_args: Sequence[str], further: frozenset[str], own: Sequence[str] = ()
) -> None:
    """Refuse a word that neither this program nor Beam knows: it is a typing error.

    Args:
        further: names of flags that the engine's job server knows.
        own: options of the command, which a misspelled flag may mean.

    Raises:
        UsageError: an unknown flag or word, or a value that Beam cannot read.
    """
    parser = _BeamArgumentParser(
        add_help=False, allow_abbrev=False, exit_on_error=False, conflict_handler="resolve"
    )
    for options in PipelineOptions.__subclasses__():
        options._add_argparse_args(parser)
    for name in further:
        parser.add_argument(f"--{name}", nargs="?")
    try:
        _, unknown = parser.parse_known_args(list(beam_args))
    except argparse.ArgumentError as error:
        flag = error.argument_name or "the flags of Beam"
        raise UsageError(flag, "has no value that Beam can read", "correct it") from None
    if unknown:
        flag = unknown[0].partition("=")[0]
        if not flag.startswith("-"):
            fix = "leave it out; write names before flags, and a flag's value as --FLAG=VALUE"
            raise UsageError(flag, "is neither a flag nor the value of one", fix)
        fix = f"{nearest(flag, [*own, *parser._option_string_actions])}correct it, or leave it out"
        raise UsageError(flag, "is no flag of this program, of Beam or of this engine", fix)

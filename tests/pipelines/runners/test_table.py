"""The table of runners: what each is given, what each refuses, and what is missing.

What each engine is told by default, and whose flags stay (more of them in test_table).
"""

import shutil
import stat
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import apache_beam as beam
import pytest
from apache_beam.options.pipeline_options import (
    GoogleCloudOptions,
    PipelineOptions,
    PortableOptions,
    PrismRunnerOptions,
    StandardOptions,
)
from apache_beam.pipeline import PipelineVisitor
from apache_beam.runners.portability import stager

from dpstream.accounting.errors import PolicyError, RunError, UsageError
from dpstream.dp_transforms.telemetry import first_error, forget_error, guarded
from dpstream.pipelines.connectors.kafka.reader import Kafka
from dpstream.pipelines.connectors.kafka.source import ReadKafka
from dpstream.pipelines.runners import job_servers, parts, table
from dpstream.pipelines.runners.errors import coded
from dpstream.pipelines.runners.table import RUNNERS, make_runner
from tests.emulator import free_port
from tests.golden.refusals import Refused
from tests.pipelines.kafka_jobs import kafka_job

CLOUD = ["--project=p", "--region=r", "--temp_location=gs://b/f", "--sdk_container_image=i"]
ENDPOINT = "--job_endpoint=127.0.0.1:1"


def test_the_engine_of_this_process_needs_nothing() -> None:
    assert table.fn_api(PipelineOptions([]), []) == []


@pytest.mark.parametrize("missing", range(len(CLOUD)))
def test_dataflow_needs_each_of_its_options(missing: int, refused: Refused) -> None:
    flags = [flag for n, flag in enumerate(CLOUD) if n != missing]
    error = refused(lambda: table.dataflow(PipelineOptions(flags), flags))
    option = CLOUD[missing].partition("=")[0]
    assert error.field == {"--project": "--gcp-project"}.get(option, option)


@pytest.mark.parametrize("flag", ["--dataflow_service_options", "--experiments"])
def test_records_never_count_twice(flag: str, refused: Refused) -> None:
    table.refuse_at_least_once(PipelineOptions([f"{flag}=streaming_mode_exactly_once"]))
    refused(
        lambda: table.refuse_at_least_once(
            PipelineOptions([f"{flag}=streaming_mode_at_least_once"])
        )
    )


def test_a_local_flink_has_workers_here_and_ends_with_its_server() -> None:
    flags = [ENDPOINT, "--flink_master=[local]"]
    added_flags = table.flink(PipelineOptions(flags), flags)
    assert {"--environment_type=LOOPBACK", "--checkpointing_interval=1000"} <= {*added_flags}
    assert table.flink_cancel(PipelineOptions(flags)) is None
    assert table.flink_cancel(PipelineOptions([ENDPOINT, "--flink_master=h:1"])) is not None


@pytest.mark.parametrize(
    ("flags", "once"),
    [
        ([], True),
        (["--checkpointing_interval=7"], True),
        (["--flink_master=h:1", "--environment_type=LOOPBACK"], False),
        (["--environment_type=EXTERNAL", "--environment_config=h:1"], False),
        (["--experiments=use_loopback_process_worker"], False),
        (["--number_of_execution_retries=3"], False),
        (["--savepoint_path=s"], False),
    ],
)
def test_only_a_recording_on_a_flink_of_this_process_passes_batches_by_reference(
    flags: list[str], once: bool
) -> None:
    """A job that begins again would decode a batch twice, and worker processes have none of it."""
    assert [
        make_runner("FlinkRunner", [ENDPOINT, *flags], recorded).by_reference
        for recorded in (False, True)
    ] == [False, once]


@pytest.mark.parametrize(
    "given", [["--checkpointing_interval=7"], ["--checkpointing_interval", "7"]]
)
def test_a_persons_interval_stays(given: list[str]) -> None:
    flags = [ENDPOINT, "--flink_master=[local]", *given]
    assert "--checkpointing_interval" not in str(table.flink(PipelineOptions(flags), flags))
    with pytest.raises(UsageError) as error:
        table.flink(PipelineOptions(flags), [*flags, "--checkpointing_interval=0"])
    assert error.value.field == "--checkpointing_interval"


def test_prisms_workers_are_threads_of_this_process(refused: Refused) -> None:
    flags = [ENDPOINT, "--experiments=use_loopback_process_worker"]
    refused(lambda: table.prism(PipelineOptions(flags), flags))
    flags = [ENDPOINT, "--environment_type=EXTERNAL"]
    refused(lambda: table.prism(PipelineOptions(flags), flags))


def test_prism_never_splits_a_bundle() -> None:
    added_flags = table.prism(PipelineOptions([ENDPOINT]), [ENDPOINT])
    assert table.PRISM_WHOLE_BUNDLES in added_flags


@pytest.mark.parametrize(
    ("given", "tuned"),
    [((), True), (("-Xmx1g",), True), (("-XX:+UseG1GC",), False)],
)
def test_a_job_server_starts_with_half_of_the_work(
    given: tuple[str, ...], tuned: bool, tmp_path: Path
) -> None:
    """A second collector beside a person's own would keep it from starting at all."""
    java, jar = tmp_path / "java", tmp_path / "server.jar"
    java.write_text("#!/bin/sh\necho 'openjdk version \"17.0.1\"' >&2\n")
    java.chmod(0o755)
    jar.touch()
    flags = [
        f"--flink_job_server_jar={jar}",
        f"--job_server_java_launcher={java}",
        *(f"--job_server_jvm_property={text}" for text in given),
    ]
    for archived in (False, True):
        added_flags = table.flink(PipelineOptions(flags, flink_master="[local]"), flags)
        assert ("--job_server_jvm_property=-XX:+UseSerialGC" in added_flags) == tuned
        assert ("--job_server_jvm_property=-XX:TieredStopAtLevel=1" in added_flags) == tuned
        classes = f"--job_server_jvm_property=-XX:SharedArchiveFile={tmp_path / 'server.jsa'}"
        assert (classes in added_flags) == (tuned and archived)
        (tmp_path / "server.jsa").touch()


def test_flink_is_sent_no_list_of_packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beam would ask pip for it before each job."""
    commands: list[str] = []

    def listed(command: list[str]) -> bytes:
        commands.append(command[-1])
        return b""

    monkeypatch.setattr(stager.subprocess, "check_output", listed)
    flags = [ENDPOINT, "--flink_master=[local]"]
    added_flags = table.flink(PipelineOptions(flags), flags)
    stager.Stager.create_job_resources(PipelineOptions([*flags, *added_flags]), str(tmp_path))
    assert commands == []
    stager.Stager.create_job_resources(PipelineOptions(flags), str(tmp_path))
    assert commands == ["freeze"], "without the flag"


SAMPLING = "--experiments=enable_data_sampling"
MODULE = b"\tmod\tgithub.com/apache/beam/sdks/v2\tv%s\th1:x\n"
MENDED = b"\tmod\tgithub.com/apache/beam/sdks/v2\t(devel)\nbuild\t-tags=loopback,beam%s\n"


@pytest.fixture(autouse=True)
def tools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine whose only parts are a Prism and a job server in this folder."""
    monkeypatch.setattr(parts, "tools", lambda: [tmp_path])
    monkeypatch.setattr(shutil, "which", lambda name: "/bin/true" if name == "java" else None)
    monkeypatch.setattr(parts, "java_version", lambda launcher="java": 17)
    monkeypatch.setitem(sys.modules, "apitools", ModuleType("apitools"))
    (tmp_path / "bin").mkdir()
    (tmp_path / "flink").mkdir()
    (tmp_path / "bin" / "prism").write_bytes(b"program" + MENDED % b"2.77.0")
    (tmp_path / "flink" / "job-server.jar").touch()
    forget_error()
    return tmp_path


def flags_of(name: str, *flags: str) -> list[str]:
    return make_runner(name, flags).options._flags


def test_what_each_engine_is_told(tools: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts, "beam_version", lambda: "2.77.0")
    direct = make_runner("DirectRunner", [])
    assert (type(direct.runner).__name__, direct.kind.streaming, direct.kind.by_reference) == (
        "FnApiRunner",
        False,
        True,
    )
    for name in set(RUNNERS) - {"DirectRunner", "FnApiRunner"}:
        engine = make_runner(name, CLOUD if name == "DataflowRunner" else [])
        assert name in [kind.__name__ for kind in type(engine.runner).__mro__]
        streaming = engine.kind.streaming and engine.options.view_as(StandardOptions).streaming
        assert (streaming, engine.kind.by_reference) == (True, name == "PrismRunner")
    prism = make_runner("PrismRunner", []).options.view_as(PrismRunnerOptions)
    assert prism.prism_location == str(tools / "bin" / "prism")
    flink = flags_of("FlinkRunner")
    assert {
        f"--flink_job_server_jar={tools / 'flink' / 'job-server.jar'}",
        "--environment_type=LOOPBACK", "--checkpointing_interval=1000",
        "--finish_bundle_before_checkpointing", "--max_bundle_time_mills=20",
    } <= set(flink)  # fmt: skip
    cloud = make_runner("DataflowRunner", CLOUD).options.view_as(GoogleCloudOptions)
    assert (cloud.dataflow_service_options, cloud.enable_streaming_engine) == (
        ["streaming_mode_exactly_once"],
        True,
    )


@pytest.mark.parametrize("name", sorted(RUNNERS))
def test_one_watermark_one_element(name: str, tmp_path: Path) -> None:
    """Prism keeps one watermark for a source, that of the partition it heard of last."""
    job = kafka_job(tmp_path, "127.0.0.1:1", "t", "")
    reader = ReadKafka(job, Kafka.of(job.source), "topic-id", 0)
    engine = make_runner(name, CLOUD if name == "DataflowRunner" else [])
    fitted = engine.fitted(reader)
    assert isinstance(fitted, ReadKafka)
    names = [type(dofn).__name__ for dofn in dofns(fitted)]
    spread = ["WatchPartitions", "ReadPartition"]
    assert names == (["ReadTopic"] if name == "PrismRunner" else spread)
    other = beam.Create([1])
    assert engine.fitted(other) is other, "one element is all it has"


def dofns(reader: ReadKafka) -> list[Any]:
    """Of a reader's own stages."""
    pipeline = beam.Pipeline()
    _ = pipeline | reader
    stages = list[Any]()

    class Visitor(PipelineVisitor):
        def visit_transform(self, node: Any) -> None:
            dofn = getattr(node.transform, "dofn", None)
            if type(dofn).__module__.startswith("dpstream."):
                stages.append(dofn)

    pipeline.visit(Visitor())
    return stages


def test_a_persons_flags_stay(tools: Path) -> None:
    flags = flags_of("FlinkRunner", "--checkpointing_interval", "500", "--max_bundle_time_mills=7")
    assert (
        "--checkpointing_interval=1000" not in flags and "--max_bundle_time_mills=100" not in flags
    )
    other = tools / "other.jar"
    other.touch()
    jars = [f for f in flags_of("FlinkRunner", f"--flink_job_server_jar={other}") if "jar=" in f]
    assert jars == [f"--flink_job_server_jar={other}"]
    away = ["--flink_master=host:8081", "--environment_type=EXTERNAL", "--environment_config=h:1"]
    options = make_runner("FlinkRunner", away).options.view_as(PortableOptions)
    assert (options.environment_type, options.environment_config) == ("EXTERNAL", "h:1")
    assert not any("retries" in flag for flag in options._flags), "a cluster has its own strategy"


def test_a_job_on_a_cluster_is_cancelled_by_its_own_name(
    tools: Path, monkeypatch: pytest.MonkeyPatch, refused: Refused
) -> None:
    """On a real cluster: tests/faults/test_stream_kills.py."""
    there = [
        f"--flink_master=localhost:{free_port()}", "--environment_type=EXTERNAL",
        "--environment_config=localhost:1", "--job_name=flights",
    ]  # fmt: skip
    engines = [make_runner("FlinkRunner", there) for _ in range(2)]
    names = {e.options.view_as(GoogleCloudOptions).job_name for e in engines}
    assert len(names) == 2 and all(name.startswith("flights-") for name in names)
    assert make_runner("FlinkRunner", []).cancel is None
    assert make_runner("PrismRunner", []).cancel is None
    monkeypatch.setattr(job_servers, "_CANCEL_SECONDS", 0.5)
    cancel = engines[0].cancel
    assert cancel is not None
    # nobody answers
    refused(cancel)


@pytest.mark.parametrize(
    ("name", "flags"),
    [
        ("SparkRunner", []),
        ("PrismRunner", ["--prism_location=/no/such/program"]),
        ("PrismRunner", ["--environment_type=DOCKER"]),
        ("PrismRunner", ["--checkpointing_interval=5"]),
        ("PrismRunner", ["--job_endpoint=embed"]),
        ("DirectRunner", ["--direct_running_mode=multi_threading"]),
        ("DirectRunner", ["--direct_running_mode=multi_processing"]),
        ("FlinkRunner", ["--flink_submit_uber_jar"]),
        ("PrismRunner", ["--enable_hot_key_logging"]),
        ("FlinkRunner", ["--flink_job_server_jar=/no/such/jar"]),
        ("FlinkRunner", ["--flink_master=host:8081"]),
        ("FlinkRunner", ["--environment_type=EXTERNAL"]),
        ("FlinkRunner", ["--checkpointing_interval=0"]),
        ("FlinkRunner", ["--shutdown_sources_after_idle_ms=0"]),
        ("FlinkRunner", ["--checkpointing_interval", "-1"]),
        ("FlinkRunner", [SAMPLING]),
        *(("DataflowRunner", [f for f in CLOUD if f != x]) for x in CLOUD),
        ("DataflowRunner", [*CLOUD, "--dataflow_service_options=streaming_mode_at_least_once"]),
        ("DataflowRunner", [*CLOUD, "--experiments=streaming_mode_at_least_once"]),
        ("DataflowRunner", [*CLOUD, "--experiments=disable_streaming_engine"]),
    ],
)  # fmt: skip
def test_refused(name: str, flags: list[str], refused: Refused) -> None:
    refused(make_runner, name, flags)


def test_missing_parts_say_how_to_get_them(
    tools: Path, monkeypatch: pytest.MonkeyPatch, refused: Refused
) -> None:
    (tools / "flink" / "job-server.jar").unlink()
    refused(make_runner, "FlinkRunner", [])
    make_runner("FlinkRunner", ["--job_endpoint=localhost:1"])  # a job server elsewhere
    (tools / "flink" / "job-server.jar").touch()
    monkeypatch.setattr(parts, "java_version", lambda launcher="java": None)
    refused(make_runner, "FlinkRunner", [])
    monkeypatch.setitem(sys.modules, "apitools", None)
    refused(make_runner, "DataflowRunner", CLOUD)
    for program in (MODULE, MENDED):
        (tools / "bin" / "prism").write_bytes(program % b"2.50.0")
        refused(make_runner, "PrismRunner", [])
    (tools / "bin" / "prism").unlink()
    refused(make_runner, "PrismRunner", [])


def test_a_program_that_does_not_say_its_version_is_taken(tools: Path) -> None:
    program = tools / "bin" / "prism"
    for content in (b"nothing", MODULE % b"", b"mod\tgithub.com/apache/beam/sdks/v2\t(devel)\n"):
        program.write_bytes(content)
        assert parts.prism_version(program) is None
        make_runner("PrismRunner", [])


def test_a_prism_that_lets_others_in(
    tools: Path, monkeypatch: pytest.MonkeyPatch, refused: Refused
) -> None:
    """Beam's own is refused; one that `make prism` built goes before one on the path."""
    program = tools / "bin" / "prism"
    assert (parts.prism_version(program), parts.prism_is_open(program)) == ("2.77.0", False)
    other = tools / "prism"
    other.write_bytes(MODULE % b"2.77.0")
    assert (parts.prism_version(other), parts.prism_is_open(other)) == ("2.77.0", True)
    monkeypatch.setattr(shutil, "which", lambda name: str(other))
    assert parts.prism() == program
    program.unlink()
    assert parts.prism() == other
    for flags in ([], [f"--prism_location={other}"]):
        refused(make_runner, "PrismRunner", flags)


def test_java_is_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    program = tmp_path / "java"
    for version_line, version in (
        ('openjdk version "17.0.1" 2025', 17),
        ('version "1.8.0_9"', 8),
        ("", None),
    ):
        program.write_text(f"#!/bin/sh\necho '{version_line}' >&2\n")
        program.chmod(program.stat().st_mode | stat.S_IEXEC)
        assert parts.java_version(str(program)) == version
    assert parts.java_version(str(tmp_path / "none")) is None


class Stage:
    @guarded("test")
    def fails(self, error: Exception) -> None:
        raise error


def test_the_error_of_a_worker_of_this_process() -> None:
    refusal, later = PolicyError("plan", "differs", "stop"), RunError("sink", "is gone", "wait")
    for error in (KeyError("private"), later, refusal, UsageError("x", "y", "z")):
        with pytest.raises((PolicyError, RunError, UsageError)):
            Stage().fails(error)
    first = first_error()
    assert type(first) is PolicyError and first.as_dict() == refusal.as_dict(), "the first refusal"
    assert first.__traceback__ is None, "its frames would hold records"
    assert coded(RuntimeError("unknown error")) is first
    assert coded(later) is later, "an exception that says it itself"
    forget_error()
    assert coded(RuntimeError("unknown error")).rule == "failed with RuntimeError"


@pytest.mark.parametrize(
    ("text", "kind", "field"),
    [
        ("x\naccounting.errors.PolicyError: store: SECRET", PolicyError, "store"),
        ("accounting.errors.UsageError: source: SECRET", UsageError, "source"),
        ("accounting.errors.RunError: stage.bound: SECRET", RunError, "stage.bound"),
        ("accounting.errors.PolicyError: SECRET: a: b", RunError, "runner"),
        ("accounting.errors.PolicyError: state.SECRET9: a", RunError, "runner"),
        ("KeyError: 'SECRET'", RunError, "runner"),
    ],
)  # fmt: skip
def test_of_a_text_only_kind_and_field_are_told(text: str, kind: type, field: str) -> None:
    error = coded(RuntimeError(text))
    assert (type(error), error.field) == (kind, field)
    assert "SECRET" not in str(error)

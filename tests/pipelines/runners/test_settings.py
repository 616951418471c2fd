"""What each engine is told by default, and whose flags stay (more of them in test_table)."""

from pathlib import Path

import pytest
from apache_beam.options.pipeline_options import PipelineOptions
from apache_beam.runners.portability import stager

from dpstream.accounting.errors import UsageError
from dpstream.pipelines.runners import settings

CLOUD = ["--project=p", "--region=r", "--temp_location=gs://b/f", "--sdk_container_image=i"]
ENDPOINT = "--job_endpoint=127.0.0.1:1"


def test_the_engine_of_this_process_needs_nothing() -> None:
    assert settings.fn_api(PipelineOptions([]), []) == []


@pytest.mark.parametrize("missing", range(len(CLOUD)))
def test_dataflow_needs_each_of_its_options(missing: int) -> None:
    flags = [flag for n, flag in enumerate(CLOUD) if n != missing]
    with pytest.raises(UsageError) as error:
        settings.dataflow(PipelineOptions(flags), flags)
    option = CLOUD[missing].partition("=")[0]
    assert error.value.field == {"--project": "--gcp-project"}.get(option, option)


@pytest.mark.parametrize("flag", ["--dataflow_service_options", "--experiments"])
def test_records_never_count_twice(flag: str) -> None:
    settings.refuse_at_least_once(PipelineOptions([f"{flag}=streaming_mode_exactly_once"]))
    with pytest.raises(UsageError) as error:
        settings.refuse_at_least_once(PipelineOptions([f"{flag}=streaming_mode_at_least_once"]))
    assert error.value.field == "--dataflow_service_options"


def test_a_local_flink_has_workers_here_and_ends_with_its_server() -> None:
    flags = [ENDPOINT, "--flink_master=[local]"]
    added_flags = settings.flink(PipelineOptions(flags), flags)
    assert "--environment_type=LOOPBACK" in added_flags
    assert "--checkpointing_interval=1000" in added_flags
    assert settings.flink_cancel(PipelineOptions(flags)) is None
    assert settings.flink_cancel(PipelineOptions([ENDPOINT, "--flink_master=h:1"])) is not None


@pytest.mark.parametrize(
    "given", [["--checkpointing_interval=7"], ["--checkpointing_interval", "7"]]
)
def test_a_persons_interval_stays(given: list[str]) -> None:
    flags = [ENDPOINT, "--flink_master=[local]", *given]
    added_flags = settings.flink(PipelineOptions(flags), flags)
    assert not any(flag.startswith("--checkpointing_interval") for flag in added_flags)
    with pytest.raises(UsageError) as error:
        settings.flink(PipelineOptions(flags), [*flags, "--checkpointing_interval=0"])
    assert error.value.field == "--checkpointing_interval"


def test_prisms_workers_are_threads_of_this_process() -> None:
    flags = [ENDPOINT, "--experiments=use_loopback_process_worker"]
    with pytest.raises(UsageError, match="threads of this one"):
        settings.prism(PipelineOptions(flags), flags)
    flags = [ENDPOINT, "--environment_type=EXTERNAL"]
    with pytest.raises(UsageError, match="must be LOOPBACK"):
        settings.prism(PipelineOptions(flags), flags)


def test_prism_never_splits_a_bundle() -> None:
    added_flags = settings.prism(PipelineOptions([ENDPOINT]), [ENDPOINT])
    assert settings.PRISM_WHOLE_BUNDLES in added_flags


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
    added_flags = settings.flink(PipelineOptions(flags, flink_master="[local]"), flags)
    assert ("--job_server_jvm_property=-XX:+UseSerialGC" in added_flags) == tuned
    assert ("--job_server_jvm_property=-XX:TieredStopAtLevel=1" in added_flags) == tuned


def test_flink_is_sent_no_list_of_packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beam would ask pip for it before each job."""
    commands: list[str] = []

    def listed(command: list[str]) -> bytes:
        commands.append(command[-1])
        return b""

    monkeypatch.setattr(stager.subprocess, "check_output", listed)
    flags = [ENDPOINT, "--flink_master=[local]"]
    added_flags = settings.flink(PipelineOptions(flags), flags)
    stager.Stager.create_job_resources(PipelineOptions([*flags, *added_flags]), str(tmp_path))
    assert commands == []
    stager.Stager.create_job_resources(PipelineOptions(flags), str(tmp_path))
    assert commands == ["freeze"], "without the flag"

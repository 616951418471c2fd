"""What each engine is told by default, and whose flags stay (more of them in test_table)."""

import pytest
from apache_beam.options.pipeline_options import PipelineOptions

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
    assert error.value.field == CLOUD[missing].partition("=")[0]


@pytest.mark.parametrize("flag", ["--dataflow_service_options", "--experiments"])
def test_records_never_count_twice(flag: str) -> None:
    settings.refuse_at_least_once(PipelineOptions([f"{flag}=streaming_mode_exactly_once"]))
    with pytest.raises(UsageError) as error:
        settings.refuse_at_least_once(PipelineOptions([f"{flag}=streaming_mode_at_least_once"]))
    assert error.value.field == "--dataflow_service_options"


def test_a_local_flink_has_workers_here_and_ends_with_its_server() -> None:
    flags = [ENDPOINT, "--flink_master=[local]"]
    told = settings.flink(PipelineOptions(flags), flags)
    assert "--environment_type=LOOPBACK" in told
    assert "--checkpointing_interval=1000" in told
    assert settings.flink_cancel(PipelineOptions(flags)) is None
    assert settings.flink_cancel(PipelineOptions([ENDPOINT, "--flink_master=h:1"])) is not None


@pytest.mark.parametrize(
    "given", [["--checkpointing_interval=7"], ["--checkpointing_interval", "7"]]
)
def test_a_persons_interval_stays(given: list[str]) -> None:
    flags = [ENDPOINT, "--flink_master=[local]", *given]
    told = settings.flink(PipelineOptions(flags), flags)
    assert not any(flag.startswith("--checkpointing_interval") for flag in told)
    with pytest.raises(UsageError) as error:
        settings.flink(PipelineOptions(flags), [*flags, "--checkpointing_interval=0"])
    assert error.value.field == "--checkpointing_interval"


def test_prism_never_splits_a_bundle() -> None:
    told = settings.prism(PipelineOptions([ENDPOINT]), [ENDPOINT])
    assert settings.PRISM_WHOLE_BUNDLES in told

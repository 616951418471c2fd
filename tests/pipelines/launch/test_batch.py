"""Batches on Dataflow: a ticket that was paid, the bytes of one process, nothing without it."""

import json
from pathlib import Path

import apache_beam as beam
import pytest
from apache_beam.options.pipeline_options import PipelineOptions
from apache_beam.portability.api import beam_runner_api_pb2

from dpstream.dp_transforms.noise.secret_source import SecretSource
from dpstream.dp_transforms.session import encoded
from dpstream.pipelines.launch import batch as launch_batch
from dpstream.pipelines.launch.batch import (
    BATCH,
    BatchParameters,
    begin,
    pipeline_of,
)
from dpstream.pipelines.launch.launcher import flags, main, without_runner
from dpstream.pipelines.project.project import load_project
from dpstream.pipelines.session.records.flow import ANSWER
from dpstream.pipelines.session.records.manifest import read_manifest
from dpstream.pipelines.session.ticket import ticket_of
from tests.golden.refusals import Refused
from tests.pipelines.session.batching import KEY, RUN, Made, here, made, secret_file

PROJECT = """
version = 1
[data_set.rides]
secret = "gcp:projects/p/secrets/noise/versions/1"
[table.rides]
path = "rides.csv"
coordinates = "gs://b/rides.table/"
dimension.hour = { type = "integer", low = 0, high = 24 }
dimension.epsilon = { type = "budget", most = 2.0, column = "budget" }
"""
CLOUD = ["--project=p", "--region=europe-west4", "--temp_location=gs://b/t",
         "--sdk_container_image=europe-docker.pkg.dev/p/r/dpstream:1"]  # fmt: skip
TICKET, OUT = "gs://b/tickets/one.json", "gs://b/out"


@pytest.fixture
def table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Made:
    return made(tmp_path, monkeypatch)


def asked_of(table: Made, folder: Path, out: str = "out", run: str = RUN) -> BatchParameters:
    """A table and a ticket as files of a store; only a test may have its key here."""
    keys = secret_file(folder)
    parts = tuple(read_manifest(table.folder, table.table).usable())
    with keys.ring() as ring:
        data = ticket_of(table.table, parts, table.question(), table.boxes, run, ring)[0]
    (folder / f"{run}.json").write_bytes(data)
    place = (folder / f"{run}.json").as_uri()
    return BatchParameters(place, table.folder.as_uri(), (folder / out).as_uri(), keys)


def asked_data(request: BatchParameters) -> bytes:
    return Path(request.ticket.removeprefix("file://")).read_bytes()


def run(began: launch_batch.Begin) -> None:
    pipeline = beam.Pipeline(options=PipelineOptions([]))
    pipeline_of(began, pipeline)
    pipeline.run().wait_until_finish()


def test_the_answer_is_that_of_this_process(table: Made, tmp_path: Path, refused: Refused) -> None:
    request = asked_of(table, tmp_path)
    assert not begin(request).done
    began = begin(request)  # cut off and started again
    run(began)
    with request.keys.ring() as ring:
        mine = here(table, table.table.space, table.question(), table.boxes, ring, RUN)
    out = tmp_path / "out"
    assert (out / ANSWER).read_bytes() == encoded(mine)
    assert sorted(path.name for path in out.iterdir()) == [ANSWER, BATCH]
    assert begin(request).done
    public = (out / BATCH).read_bytes()
    for part in read_manifest(table.folder, table.table).usable():  # nothing of records is there
        assert part.digest.encode() not in public and part.digest.encode() in asked_data(request)
    refused(lambda: begin(asked_of(table, tmp_path, run="6b" * 16)))
    (tmp_path / f"{RUN}.json").unlink()
    refused(begin, request)


def test_nothing_is_done_without_a_ticket_of_the_key(
    table: Made, tmp_path: Path, refused: Refused
) -> None:
    request = asked_of(table, tmp_path)
    refused(lambda: begin(request._replace(keys=SecretSource(None, "11" * 32))))
    path = tmp_path / f"{RUN}.json"
    path.write_bytes(path.read_bytes().replace(b'"amount":700000', b'"amount":900000'))
    refused(begin, request)
    assert not (tmp_path / "out").exists()


def test_the_template_is_built_with_the_options_of_the_service(table: Made, tmp_path: Path) -> None:
    """What Dataflow is handed: a pipeline that ends, without the key."""
    options = PipelineOptions(without_runner(flags(CLOUD, streaming=False)))
    pipeline = beam.Pipeline(options=options)
    pipeline_of(begin(asked_of(table, tmp_path)), pipeline)
    proto = pipeline.to_runner_api()
    bounded = {collection.is_bounded for collection in proto.components.pcollections.values()}
    assert bounded == {beam_runner_api_pb2.IsBounded.BOUNDED}
    names = {transform.unique_name for transform in proto.components.transforms.values()}
    assert {"Tally", "ByShard", "Measure", "Together", "Release"} <= names
    data = proto.SerializeToString()
    assert KEY.encode() not in data and bytes.fromhex(KEY) not in data


def parameters_of(
    folder: Path, text: str = PROJECT, ticket: str = TICKET, out: str = OUT
) -> BatchParameters:
    (folder / "dpstream.toml").write_text(text)
    return BatchParameters.of(load_project(folder / "dpstream.toml"), None, ticket, out)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("gs://b/rides.table/", "rides.table"),
        ('coordinates = "gs://b/rides.table/"', ""),
        ("gcp:projects/p/secrets/noise/versions/1", "file:noise.secret"),
        ("gcp:projects/p/secrets/noise/versions/1", "env:KEY"),
    ],
)
def test_what_the_launchers_disk_would_lose(
    old: str, new: str, tmp_path: Path, refused: Refused
) -> None:
    assert parameters_of(tmp_path).table == "gs://b/rides.table"
    refused(lambda: parameters_of(tmp_path, PROJECT.replace(old, new)))
    for given in ({"ticket": "one.json"}, {"out": "out"}):
        refused(parameters_of, tmp_path, **given)


def dry_run(folder: Path, given: list[str], capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    (folder / "dpstream.toml").write_text(PROJECT)
    code = main([f"--project_file={folder / 'dpstream.toml'}", *given, *CLOUD, "--dry_run"])
    return code, capsys.readouterr().out


PARAMETERS = ["--kind=batch", f"--out_folder={OUT}", f"--ticket={TICKET}"]


def test_a_dry_run_describes_the_batch(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, printed = dry_run(tmp_path, PARAMETERS, capsys)
    report = json.loads(printed)
    assert code == 0 and report["ticket"] == TICKET
    assert report["table"] == "gs://b/rides.table" and "streaming" not in report["options"]


@pytest.mark.parametrize(
    ("given", "field"),
    [
        (PARAMETERS[:2], "--ticket"), ([PARAMETERS[0], PARAMETERS[2]], "--out_folder"),
        (PARAMETERS[1:2], "--out_folder"), ([*PARAMETERS, "--streaming"], "--streaming"),
        ([*PARAMETERS, "--environment=none"], "--environment"),
    ],
)  # fmt: skip
def test_each_kind_has_its_parameters(
    given: list[str], field: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, printed = dry_run(tmp_path, given, capsys)
    assert code == 2 and field in printed

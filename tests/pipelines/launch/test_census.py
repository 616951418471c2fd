"""Tables on Dataflow: nothing stays on the launcher's disk, and the manifest comes last."""

from pathlib import Path

import apache_beam as beam
import msgspec
import pytest
from apache_beam.options.pipeline_options import PipelineOptions

from dpstream.accounting.errors import PolicyError, RunError, UsageError
from dpstream.dp_transforms.noise.secret_source import SecretSource
from dpstream.pipelines.ask.draft import MANIFEST, decoded
from dpstream.pipelines.ask.folder import Written
from dpstream.pipelines.launch import census as launch_tables
from dpstream.pipelines.launch.census import (
    TablesParameters,
    begin,
    pipeline_of,
)
from dpstream.pipelines.launch.dataflow import flags
from dpstream.pipelines.project.project import load_project
from dpstream.pipelines.runners.table import RUNNERS, refuse_unknown
from dpstream.pipelines.tabulation.config import Choice
from dpstream.pipelines.tabulation.flow import Seal
from dpstream.pipelines.tabulation.work import names_of
from tests.pipelines.launch.building import CLOUD, built
from tests.pipelines.tabulation.executing import KEY, content
from tests.pipelines.tabulation.office import Office, office
from tests.pipelines.tabulation.test_work import tables

PROJECT = """
version = 1
[data_set.persons]
unit = { name = "person" }
secret = "gcp:projects/p/secrets/noise/versions/1"
[census.persons]
parameters = "gs://b/parameters"
data = "gs://b/data/"
"""


@pytest.fixture
def own(tmp_path: Path) -> Office:
    return office(tmp_path / "office")


def asked_of(own: Office, out: Path) -> TablesParameters:
    """The office as folders of a store; only a test may have its key here."""
    keys = SecretSource(None, KEY)
    return TablesParameters(
        own.parameters.as_uri(), own.data.as_uri(), out.as_uri(), Choice("p"), keys
    )


def run(began: launch_tables.Begin) -> None:
    pipeline = beam.Pipeline(options=PipelineOptions([]))
    pipeline_of(began, pipeline)
    pipeline.run().wait_until_finish()


def test_tables_are_those_of_this_process(own: Office, tmp_path: Path) -> None:
    request = asked_of(own, tmp_path / "out")
    began = begin(request)
    assert not began.done and list(content(tmp_path / "out")) == ["run.json"]
    again = begin(request)  # cut off and started again: the same run id
    assert again.task.run_id == began.task.run_id and not again.done
    run(again)
    files = content(tmp_path / "out")
    manifest = decoded(files.pop(MANIFEST))
    del files["run.json"]
    assert manifest.run_id == began.task.run_id and manifest.insecure
    here = tables(began.prepared, own, tmp_path / "here", began.task.run_id)
    assert files == content(here) and set(files) == set(manifest.files)
    own.spoil("person-records.txt", lambda lines: lines[:-1])  # they are not looked at again
    assert begin(request).done
    own.spoil("person-records.txt", lambda lines: lines[:1])
    assert begin(request).done


def test_other_records_are_not_read_under_a_run_id(own: Office, tmp_path: Path) -> None:
    request = asked_of(own, tmp_path / "out")
    assert not begin(request).done
    own.spoil("person-records.txt", lambda lines: lines[:-1])
    with pytest.raises(UsageError, match="another execution"):
        begin(request)


def test_without_all_tables_there_is_no_manifest(own: Office, tmp_path: Path) -> None:
    began = begin(asked_of(own, tmp_path / "out"))
    files = dict.fromkeys(names_of(began.prepared), Written(0, ""))
    seal = Seal(began.task, True)
    for missing in sorted(files)[:2]:
        partial_files = {name: of for name, of in files.items() if name != missing}
        with pytest.raises(RunError, match="has not handed over"):
            list(seal.process((0, [msgspec.json.encode(partial_files).decode()])))
    files_json = msgspec.json.encode(files).decode()
    path = own.path("person-records.txt")
    was = path.read_bytes()
    path.write_bytes(was + b"\n")
    with pytest.raises(PolicyError, match="changed while it was read"):
        list(seal.process((0, [files_json])))
    assert MANIFEST not in content(tmp_path / "out")


def test_the_template_is_built_with_the_options_of_the_service(own: Office, tmp_path: Path) -> None:
    """What Dataflow is handed: a pipeline that ends, without the key and without a record."""
    key = tmp_path / "noise.secret"
    key.write_text(KEY + "\n")
    key.chmod(0o600)
    began = begin(asked_of(own, tmp_path / "out")._replace(keys=SecretSource(f"file:{key}")))
    names, proto = built(lambda pipeline: pipeline_of(began, pipeline))
    assert {"Count", "ByPart", "Publish", "ByOutput", "Seal"} <= names
    rows = own.path("person-records.txt").read_bytes().splitlines()[1:]
    assert KEY.encode() not in proto and not any(row in proto for row in rows)


def test_flags_for_dataflow() -> None:
    cloud_flags = flags(CLOUD, streaming=False)
    assert cloud_flags[-2:] == ["--runner=DataflowRunner", "--sdk_location=container"]
    assert flags(cloud_flags, streaming=False) == cloud_flags
    refuse_unknown([flag for flag in cloud_flags if "--runner" not in flag],
                    RUNNERS["DataflowRunner"].flags)  # fmt: skip
    for flag in ("--streaming", "--runner=DirectRunner",
                 "--experiments=streaming_mode_at_least_once"):  # fmt: skip
        with pytest.raises(UsageError):
            flags([flag], streaming=False)


def parameters_of(folder: Path, text: str = PROJECT, out: str = "gs://b/out") -> TablesParameters:
    (folder / "dpstream.toml").write_text(text)
    return TablesParameters.of(load_project(folder / "dpstream.toml"), None, out)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("gs://b/parameters", "/b/parameters"),
        ("gs://b/data/", "data"),
        ("gcp:projects/p/secrets/noise/versions/1", "file:noise.secret"),
        ("gcp:projects/p/secrets/noise/versions/1", "env:KEY"),
    ],
)
def test_what_the_launchers_disk_would_lose(old: str, new: str, tmp_path: Path) -> None:
    assert parameters_of(tmp_path).data == "gs://b/data"
    with pytest.raises(UsageError, match="thrown away"):
        parameters_of(tmp_path, PROJECT.replace(old, new))
    with pytest.raises(UsageError, match="thrown away") as error:
        parameters_of(tmp_path, out="out")
    assert error.value.field == "--out_folder"


def test_a_data_set_without_a_unit_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="required by census tables") as error:
        parameters_of(tmp_path, PROJECT.replace('unit = { name = "person" }\n', ""))
    assert error.value.field == "data_set.persons.unit" and '"person"' in error.value.fix


def test_no_table_of_other_records_is_put_under_a_run_id(own: Office, tmp_path: Path) -> None:
    """Files of a store are seen as soon as they are there: the manifest would be too late."""
    began = begin(asked_of(own, tmp_path / "out"))
    own.spoil("person-records.txt", lambda lines: lines[:-1])
    with pytest.raises(Exception, match="changed while it was read"):
        run(began)
    assert list(content(tmp_path / "out")) == ["run.json"]


def test_of_two_who_begin_at_once_one_publishes(own: Office, tmp_path: Path) -> None:
    request = asked_of(own, tmp_path / "out")
    first = begin(request)
    (tmp_path / "out" / "run.json").unlink()  # not seen yet by the other one
    second = begin(request)
    assert first.task.run_id != second.task.run_id
    with pytest.raises(Exception, match="another execution"):
        run(first)
    assert list(content(tmp_path / "out")) == ["run.json"]
    run(second)
    manifest = decoded(content(tmp_path / "out")[MANIFEST])
    assert manifest.run_id == second.task.run_id and begin(request).done

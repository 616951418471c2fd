"""The flex template: metadata, the launcher's dry run, and a launch that does not wait."""

import json
import os
import random
import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import apache_beam as beam
import numpy as np
import pyarrow as pa
import pytest
import yaml
from apache_beam.runners.portability.fn_api_runner import FnApiRunner
from apache_beam.runners.runner import PipelineResult
from apache_beam.utils.timestamp import Timestamp

from dpstream.pipelines.beam_yaml import TYPES, DPStreamRows, to_batch
from dpstream.pipelines.connectors.write import dead_letter_folder
from dpstream.pipelines.formats.encodings import read_releases
from dpstream.pipelines.jobs.job import Job, load_job
from dpstream.pipelines.launch import launcher
from dpstream.pipelines.launch.launcher import (
    check_remote,
    fetch,
    flags,
    main,
    options_of,
    parser,
    without_runner,
)
from dpstream.pipelines.runners.table import RUNNERS, refuse_unknown
from dpstream.pipelines.stream.run import run_job
from dpstream.state import open as stores
from tests import accounts
from tests.audit.leaks import make_job
from tests.fixed_runs import fix_run_id
from tests.golden.refusals import Refused
from tests.written import read_dead_letters

FLAGS = RUNNERS["DataflowRunner"].flags

FOLDER = Path(__file__).parents[2] / "deploy" / "dataflow"
METADATA: dict[str, Any] = json.loads((FOLDER / "metadata.json").read_text())
IMAGE = "europe-docker.pkg.dev/p/r/dpstream:1"
REMOTE = """
version = 1
[data_set.shop]
unit = { name = "user" }
secret = "gcp:projects/p/secrets/noise/versions/1"
[table.visits]
subscription = "projects/p/subscriptions/s"
unit_column = "user"
time_column = "time"
[job.visits]
table = "visits"
key = ["page"]
aggregate.visits = { kind = "count" }
start = "2026-01-01T00:00:00Z"
window = "1h"
release_every = "1m"
max_skew = "1m"
budget = { epsilon = 2.0, delta = 1e-6, covers = "window" }
contributions = 8
store = "spanner://p/i/d"
shards = 64
sink = { kind = "pubsub", topic = "projects/p/topics/t" }
"""
UNIT = 'unit = { name = "user" }'
LOCAL = 'account = { path = "shop.account.db", limit = { epsilon = 9, delta = 0.1 } }'


def remote(folder: Path, *edits: tuple[str, str]) -> Job:
    """A job that lies nowhere on this machine, after some edits."""
    text = REMOTE
    for old, new in edits:
        assert old in text
        text = text.replace(old, new, 1)
    path = folder / "dpstream.toml"
    accounts.write(path, text)
    return load_job(path)


def test_metadata_is_exactly_once_and_streaming() -> None:
    assert METADATA["streaming"] is True
    assert METADATA["supportsExactlyOnce"] is True and METADATA["supportsAtLeastOnce"] is False
    fields = {"name", "description", "streaming", "supportsExactlyOnce", "supportsAtLeastOnce",
             "parameters"}  # fmt: skip
    assert set(METADATA) == fields


def test_every_parameter_is_the_launchers_or_beams() -> None:
    own = {action.dest for action in parser()._actions} - {"help"}
    names = [parameter["name"] for parameter in METADATA["parameters"]]
    assert own <= set(names) and len(set(names)) == len(names)
    refuse_unknown([f"--{name}=x" for name in names if name not in own], FLAGS)
    fields = {"name", "label", "helpText", "paramType", "regexes", "isOptional"}
    for parameter in METADATA["parameters"]:
        assert set(parameter) <= fields and {"name", "label", "helpText"} <= set(parameter)
        assert parameter["paramType"] in ("TEXT", "GCS_READ_FILE", "GCS_WRITE_FOLDER", "BOOLEAN")
    for action in parser()._actions:
        if action.dest in names:
            [parameter] = [p for p in METADATA["parameters"] if p["name"] == action.dest]
            assert parameter["isOptional"] is not action.required


@pytest.mark.parametrize(
    ("name", "good", "bad"),
    [
        ("project_file", ["gs://b/a/dpstream.toml"], ["/a/dpstream.toml", "gs://b/visits.json"]),
        ("name", ["daily"], ["a b", ""]),
        ("sdk_container_image", [IMAGE, IMAGE + "@sha256:" + "0" * 64], ["dp stream", ""]),
    ],
)
def test_patterns_of_parameters(name: str, good: list[str], bad: list[str]) -> None:
    [parameter] = [p for p in METADATA["parameters"] if p["name"] == name]
    [pattern] = parameter["regexes"]
    assert all(re.fullmatch(pattern, text) for text in good)
    assert not any(re.fullmatch(pattern, text) for text in bad)


def test_flags_for_dataflow() -> None:
    given = ["--project=p", "--region=europe-west4", "--temp_location=gs://b/t",
             f"--sdk_container_image={IMAGE}"]  # fmt: skip
    all_flags = flags(given, streaming=True)
    options = options_of(all_flags)
    assert options["runner"] == "DataflowRunner" and options["streaming"] is True
    assert options["sdk_location"] == "container"
    assert options.get("enable_streaming_engine", True) is True
    assert options["sdk_container_image"] == IMAGE and options["project"] == "p"
    assert flags(all_flags, streaming=True) == all_flags, "nothing is given twice"
    assert "--sdk_location=container" not in flags(given[:3], streaming=True)
    here = without_runner(all_flags)
    assert sorted([*here, "--runner=DataflowRunner"]) == sorted(all_flags)
    refuse_unknown(here, FLAGS)


@pytest.mark.parametrize(
    "flag",
    [
        "--dataflow_service_options=streaming_mode_at_least_once",
        "--experiments=streaming_mode_at_least_once",
        "--runner=DirectRunner",
        "--projct=p",
    ],
)
def test_flags_that_are_refused(tmp_path: Path, flag: str, refused: Refused) -> None:
    refused(flags, [flag], streaming=True)


@pytest.mark.parametrize(
    "edit",
    [
        ('store = "spanner://p/i/d"', 'store = "s.db"'),
        ("gcp:projects/p/secrets/noise/versions/1", "file:noise.secret"),
        ("gcp:projects/p/secrets/noise/versions/1", "env:KEY"),
        ('subscription = "projects/p/subscriptions/s"',
          'folder = "in"\nformat = "parquet"'),
        (UNIT, f"{UNIT}\n{LOCAL}"),
    ],
    ids=["sqlite", "secret file", "environment", "local folder", "account"],
)  # fmt: skip
def test_what_the_launchers_disk_would_lose(
    tmp_path: Path, edit: tuple[str, str], refused: Refused
) -> None:
    check_remote(remote(tmp_path))
    refused(lambda: check_remote(remote(tmp_path, edit)))


def test_an_account_that_outlives_the_launcher(tmp_path: Path) -> None:
    account = 'account = { path = "spanner://p/i/ledger", id = "0acc0acc0acc0acc" }'
    job = remote(tmp_path, (UNIT, f"{UNIT}\n{account}"))
    check_remote(job)
    assert job.ledger is not None and job.ledger.path == "spanner://p/i/ledger"


def test_local_releases_are_refused(tmp_path: Path, refused: Refused) -> None:
    files = (
        'kind = "pubsub", topic = "projects/p/topics/t"',
        'kind = "parquet", path = "releases"',
    )
    refused(lambda: check_remote(remote(tmp_path, files)))


@pytest.mark.parametrize("named", ["refused", "/mnt/refused"])
def test_a_folder_for_dead_letters_is_refused(tmp_path: Path, named: str, refused: Refused) -> None:
    """It would be on each worker's disk; who names none is told that they are not kept."""
    shards = "shards = 64"
    job = remote(tmp_path, (shards, f'{shards}\ndead_letter = "{named}"'))
    refused(check_remote, job)
    check_remote(remote(tmp_path, (shards, f'{shards}\ndead_letter = "dead_letter/visits"')))


def test_the_dry_run_prints_options_and_starts_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    remote(tmp_path)
    monkeypatch.setattr(launcher, "run_job", mock.Mock(side_effect=AssertionError))
    args = [f"--project_file={tmp_path / 'dpstream.toml'}", "--dry_run=true", "--project=p"]
    assert main(args) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["store"] == "spanner://p/i/d" and report["shards"] == 64
    assert report["options"]["streaming"] is True and report["options"]["project"] == "p"
    assert main([args[0], "--dry_run", "--runner=DirectRunner"]) == 2
    assert "--runner" in capsys.readouterr().out


def test_the_launchers_module_is_that_program(tmp_path: Path) -> None:
    namespace = runpy.run_path(str(FOLDER / "launcher.py"), run_name="imported")
    assert namespace["main"] is main
    completed = subprocess.run(
        [sys.executable, str(FOLDER / "launcher.py"), f"--project_file={tmp_path / 'none.toml'}"],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert (
        completed.returncode == 2
        and "--project_file" in completed.stdout
        and "Traceback" not in completed.stderr
    )


def test_a_launch_does_not_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The whole job on an engine that runs at once: begun, handed over, and nobody waits."""
    job = make_job(tmp_path / "job")
    waited = mock.Mock(side_effect=AssertionError)
    monkeypatch.setattr(PipelineResult, "wait_until_finish", waited)
    monkeypatch.setattr("dpstream.pipelines.stream.run.wait_or_stop", waited)
    result = run_job(job, "DirectRunner", detach=True)
    assert result.run_id and not waited.called
    assert (tmp_path / "job" / "releases" / "run.json").exists()
    stores.close_all()
    monkeypatch.undo()
    assert run_job(job, "DirectRunner", detach=True).run_id == result.run_id


def test_a_project_file_from_any_file_system(tmp_path: Path, refused: Refused) -> None:
    """With the query of the job that is launched, which lies beside it."""
    local = tmp_path / "local"
    local.mkdir()
    text = REMOTE.replace("shards = 64", 'query = "live.sql"')
    (tmp_path / "a.toml").write_text(text)
    (tmp_path / "live.sql").write_text("SELECT page FROM visits")
    assert fetch(str(tmp_path / "a.toml"), local).read_text() == text
    assert (local / "live.sql").read_text() == "SELECT page FROM visits"
    (tmp_path / "b.toml").write_text("#" * (2 << 20))
    for name in ("b.toml", "none.toml"):
        error = refused(fetch, str(tmp_path / name), local)
        assert error.field == "--project_file" and str(tmp_path) not in str(error)


# Beam YAML: the example is run as a user runs it, and its rows are those of ``dpstream run``.


ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "deploy" / "beam_yaml"
SECRET, FIXED = 'secret = "file:shop.secret"', f'insecure_test_secret = "{"0f" * 32}"'
CANARY = "CANARY7741"


def orders(path: Path, repeat: bool = False) -> int:
    """Orders of 400 customers, some unusable, as a CSV file; ``repeat`` writes all twice."""
    rng = random.Random(1)
    lines = []
    for number in range(1_000):
        time = f"2024-01-01T{rng.randrange(24):02d}:10:00Z" if number % 100 else "never"
        lines.append(f"{number},c{rng.randrange(400)},p{rng.randrange(4)},{time},{number % 90}.5")
    text = ["order_id,customer,product,ordered,price", *lines, *(lines if repeat else ())]
    path.write_text("\n".join(text) + "\n")
    return len(text) - 1


def example(folder: Path, repeat: bool = False) -> Path:
    """A copy of the example with a fixed key and its input."""
    shutil.copytree(EXAMPLE, folder)
    project = folder / "dpstream.toml"
    text = project.read_text()
    assert SECRET in text
    project.write_text(text.replace(SECRET, FIXED))
    fix_run_id(project)
    orders(folder / "orders.csv", repeat)
    return project


#: ``python -m apache_beam.yaml.main``, whose run has the fixed run id.
PROGRAM = """
import runpy
from pathlib import Path
from tests.fixed_runs import fix_run_id
fix_run_id(Path.cwd())
runpy.run_module("apache_beam.yaml.main", run_name="__main__", alter_sys=True)
"""


def run_yaml(folder: Path) -> subprocess.CompletedProcess[str]:
    flags = ["--yaml_pipeline_file=pipeline.yaml", "--runner=FnApiRunner"]
    return subprocess.run(
        [sys.executable, "-c", PROGRAM, *flags], cwd=folder, capture_output=True, text=True,
        env=os.environ | {"PYTHONPATH": str(ROOT)}, timeout=300, check=False,
    )  # fmt: skip


def commands(text: str) -> str:
    """The commands of the example in the text of its guide."""
    [block] = re.findall(r"^<!-- beam-yaml -->\n```sh\n(.*?)^```$", text, flags=re.M | re.S)
    return str(block)


def test_the_commands_of_the_guide(tmp_path: Path) -> None:
    """As they stand, on what git has; nothing else is needed, and dead letters are told of."""
    listed = subprocess.run(["git", "ls-files", "deploy"], cwd=ROOT, capture_output=True, text=True,
                            check=True)  # fmt: skip
    for name in listed.stdout.splitlines():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / name, tmp_path / name)
    text = commands((ROOT / "docs" / "guides" / "beam-yaml.md").read_text())
    assert text.startswith("cd deploy/beam_yaml\n") and len(text.splitlines()) == 4
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-euc", text], cwd=tmp_path, env={**os.environ, "PATH": path},
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    folder = tmp_path / "deploy" / "beam_yaml"
    rows = published(folder)
    assert {row["product"] for row in rows} >= {"apples", "bread"}
    assert len(rows) == read_releases(folder / "releases").num_rows
    assert read_dead_letters(folder / "dead_letter" / "orders").num_rows == 20


def published(folder: Path) -> list[dict[str, Any]]:
    [file] = folder.glob("published-*")
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    return sorted(rows, key=lambda row: (row["trigger"], row["product"]))


def test_the_example_gives_what_dpstream_run_gives(tmp_path: Path) -> None:
    """Rows of the pipeline, delivered twice: the files of the sink are byte-equal to a run's."""
    job = example(tmp_path / "yaml", repeat=True)
    completed = run_yaml(job.parent)
    assert completed.returncode == 0, completed.stderr
    plain = load_job(example(tmp_path / "plain"))
    run_job(plain)
    stores.close_all()

    def files(folder: Path) -> dict[str, bytes]:
        return {
            str(path.relative_to(folder)): path.read_bytes()
            for path in sorted(folder.glob("window-*/*"))
        }

    mine, theirs = files(job.parent / "releases"), files(tmp_path / "plain" / "releases")
    assert mine == theirs and len(mine) == 4
    rows = published(job.parent)
    table = read_releases(job.parent / "releases")
    assert len(rows) == table.num_rows > 4
    released = sorted(zip(*(table[n].to_pylist() for n in ("trigger", "product", "orders")),
                          strict=True))  # fmt: skip
    assert [(r["trigger"], r["product"], r["orders"]) for r in rows] == released
    letters = read_dead_letters(dead_letter_folder(load_job(job)))
    assert letters.num_rows == 2 * 10 and set(letters["reason"].to_pylist()) == {"time"}


def test_running_it_again_changes_nothing(tmp_path: Path) -> None:
    job = example(tmp_path / "yaml")
    assert run_yaml(job.parent).returncode == 0
    before = published(job.parent)
    assert run_yaml(job.parent).returncode == 0
    assert published(job.parent) == before
    other = job.parent / "pipeline.yaml"
    other.write_text(other.read_text().replace("first version", "second version"))
    refused = run_yaml(job.parent)
    assert refused.returncode != 0 and "other input is a new run" in refused.stderr


def order(number: int, **other: Any) -> beam.Row:
    row = {
        "customer": f"c{number}", "product": "p", "ordered": "2024-01-01T01:00:00Z",
        "order_id": number, "price": 1.0,
    }  # fmt: skip
    return beam.Row(**{**row, **other})


def apply(job: Path, rows: list[beam.Row], source: str | None = "rows") -> None:
    """Run the transform on created rows."""
    try:
        with beam.Pipeline(runner=FnApiRunner()) as pipeline:
            _ = pipeline | beam.Create(rows) | DPStreamRows(source=source, project=str(job))
    finally:
        stores.close_all()


def test_created_rows_with_a_schema(tmp_path: Path) -> None:
    """Rows of another source: each once, whatever bundle it comes in."""
    job = example(tmp_path / "yaml")
    apply(job, [order(n) for n in range(600)] + [order(n) for n in range(300)])
    releases = read_releases(job.parent / "releases")
    sd = releases["orders_sd"][-1].as_py()
    assert abs(releases["orders"][-1].as_py() - 600) < 6 * sd < 200


@pytest.mark.parametrize(
    ("edits", "rows", "source"),
    [
        ([('record_id = { column = "order_id", type = "int" }\n', "")], [order(1)], "rows"),
        ([], [order(1)], None),
        ([], [beam.Row(customer="c", product="p")], "rows"),
        ([], [order(1, price=[1.0])], "rows"),
    ],
    ids=["no record id", "no name", "a field is missing", "a type is not usable"],
)  # fmt: skip
def test_what_is_refused(
    tmp_path: Path,
    edits: list[tuple[str, str]],
    rows: list[beam.Row],
    source: str,
    refused: Refused,
) -> None:
    job = example(tmp_path / "yaml")
    text = job.read_text()
    for old, new in edits:
        assert old in text
        text = text.replace(old, new)
    job.write_text(text)
    refused(apply, job, rows, source)
    assert not (job.parent / "job.state.db").exists()


def test_without_an_input_the_jobs_files_are_read(tmp_path: Path) -> None:
    job = example(tmp_path / "files")
    pipeline = yaml.safe_load((job.parent / "pipeline.yaml").read_text())
    [private] = [t for t in pipeline["pipeline"]["transforms"] if t["type"] == "DPStream"]
    del private["input"], private["config"]["source"]
    write = next(t for t in pipeline["pipeline"]["transforms"] if t["type"] == "WriteToJson")
    pipeline["pipeline"]["transforms"] = [private, write]
    (job.parent / "pipeline.yaml").write_text(yaml.safe_dump(pipeline))
    completed = run_yaml(job.parent)
    assert completed.returncode == 0, completed.stderr
    assert len(published(job.parent)) == read_releases(job.parent / "releases").num_rows > 4


KINDS = {
    "text": pa.string(), "whole": pa.int64(), "real": pa.float64(), "at": TYPES[Timestamp],
}  # fmt: skip
GOOD = {"text": "a", "whole": 7, "real": 1.5, "at": Timestamp(1_704_067_200)}


def test_a_bad_value_is_null_and_touches_no_other_row() -> None:
    bad: dict[str, list[Any]] = {
        "text": [7, b"x", "\ud800", None], "whole": ["7", 2**63, 1.5, True, np.float64(2), None],
        "real": ["x", True, None], "at": [1_704_067_200, "2024", None],
    }  # fmt: skip
    alone = to_batch([beam.Row(**GOOD)], KINDS).to_pylist()[0]
    assert alone["whole"] == 7 and alone["at"].year == 2024
    for name, values in bad.items():
        for value in values:
            rows = [beam.Row(**GOOD), beam.Row(**{**GOOD, name: value}), beam.Row(**GOOD)]
            first, second, third = to_batch(rows, KINDS).to_pylist()
            assert first == third == alone
            assert second == {**alone, name: None}, (name, value)
            assert to_batch(rows[1:2], KINDS).to_pylist() == [second]
    of_numpy = {"text": np.str_("a"), "whole": np.int32(7), "real": np.float32(1.5)}
    assert to_batch([beam.Row(**{**GOOD, **of_numpy})], KINDS).to_pylist() == [alone]


def test_no_value_in_an_error(tmp_path: Path, refused: Refused) -> None:
    job = example(tmp_path / "yaml")
    error = refused(lambda: apply(job, [beam.Row(customer=CANARY, product=CANARY)], "rows"))
    assert CANARY not in str(error)


def test_the_provider_names_the_transform() -> None:
    [provider] = yaml.safe_load((EXAMPLE / "provider.yaml").read_text())
    assert provider["type"] == "python"
    assert provider["transforms"] == {
        "DPStream": f"{DPStreamRows.__module__}.{DPStreamRows.__qualname__}"
    }

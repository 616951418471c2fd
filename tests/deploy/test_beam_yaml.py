"""Beam YAML: the example is run as a user runs it, and its rows are those of ``dpstream run``."""

import json
import os
import random
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import apache_beam as beam
import numpy as np
import pyarrow as pa
import pytest
import yaml
from apache_beam.runners.portability.fn_api_runner import FnApiRunner
from apache_beam.utils.timestamp import Timestamp

from dpstream.pipelines.beam_yaml import TYPES, DPStreamRows, to_batch
from dpstream.pipelines.connectors.write import dead_letter_folder
from dpstream.pipelines.formats.encodings import read_releases
from dpstream.pipelines.jobs.job import load_job
from dpstream.pipelines.stream.run import run_job
from dpstream.state import open as stores
from tests.fixed_runs import fix_run_id
from tests.golden.refusals import Refused
from tests.written import read_dead_letters

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
            for path in sorted(folder.rglob("*.parquet"))
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

"""The files of a publication: their facts, their forms, and what is never replaced."""

import hashlib
import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import jsonschema
import pyarrow.parquet as pq
import pytest
import yaml

from dpstream.pipelines.jobs.job import Job
from dpstream.pipelines.report import publication
from dpstream.state import open as stores
from tests.reports import call, edit, execute

SCHEMA = Path(__file__).with_name("deployments-schema.yaml")
SECTION = """
[job.daily.publication]
title = "Visits by page"
description = "Visits | of pages."
contact = "statistics@example.org"
licence = "CC-BY-4.0"
withhold = "sd > 30%"
"""
MORE = 'purpose = "Planning"\npublisher = "An office"\nregion = "Europe"\n'
NAMES = ["index.html", "final.parquet", "final.csv", publication.METHODOLOGY, "metadata.jsonld"]


@pytest.fixture
def job(make_job: Callable[..., Job]) -> Job:
    """A finished run with a secret that is not a test's."""
    job = make_job()
    rows = [f"u{n},{'ab'[n % 2]},2024-01-01T{n % 24:02d}:30:00Z,3" for n in range(600)]
    (job.path.parent / "in" / "a.csv").write_text("\n".join(["user,key,time,value", *rows]) + "\n")
    secret = next(line for line in job.path.read_text().splitlines() if "insecure" in line)
    (job.path.parent / "secret").write_text(hashlib.sha256(b"publication").hexdigest())
    (job.path.parent / "secret").chmod(0o600)
    job = edit(job, (secret, 'secret = "file:secret"'))
    execute(job)
    stores.close_all()
    job.path.write_text(job.path.read_text() + SECTION)
    return job


def publish(job: Job, out: Path, *more: str) -> tuple[int, str]:
    result = call("--project", job.path, "daily", "--publish", out, *more)
    return result.exit_code, result.output


def test_a_publication_and_what_a_registry_lacks(job: Job, tmp_path: Path) -> None:
    out = tmp_path / "public"
    code, text = publish(job, out)
    assert code == 0 and sorted(p.name for p in out.iterdir()) == sorted(NAMES)
    assert "deployment.yaml was not written: add publisher, purpose, region to" in text
    job.path.write_text(job.path.read_text() + MORE)  # what was typed is enough
    assert publish(job, out)[0] == 0
    entry = yaml.safe_load((out / "deployment.yaml").read_text())
    schema = yaml.safe_load(SCHEMA.read_text())
    jsonschema.validate(entry, schema, format_checker=jsonschema.FormatChecker())
    basic, loss = entry["deployment"]["basic"], entry["deployment"]["privacy_loss"]
    assert (basic["intended_use"], basic["data_product_region"]) == ("Planning", "Europe")
    assert loss["privacy_parameters"] == {"epsilon": 6.0, "delta": 1e-9}
    assert "'user'" in loss["privacy_unit"] and loss["privacy_parameters_details"] == (
        "For a person's lifetime: epsilon 6 at delta 1e-09."
    )
    # The date of the first publication stays, also where an edit has made the rest no YAML.
    path = out / "deployment.yaml"
    path.write_text(
        path.read_text()
        .replace(basic["publication_date"], "2020-02-02")
        .replace("status: Draft", "status: : [Draft")
    )
    assert publish(job, out)[0] == 0 and "2020-02-02" in path.read_text()
    page = (out / publication.METHODOLOGY).read_text()
    assert f"plan {job.plan.hash[:16]}." in page
    links = set(re.findall(r'href="([\w.]+)"', (out / "index.html").read_text()))
    assert links == {p.name for p in out.iterdir()} - {"index.html"}
    assert "| guarantee | epsilon 6 at delta 1e-09, all records" in page
    assert "**INSECURE" not in page and "## How to compare two figures" in page
    table = pq.read_table(out / "final.parquet")
    assert set(table["records_quality"].to_pylist()) <= {"final", "too uncertain"}
    assert table.num_rows == (out / "final.csv").read_text().count("\n") - 1 == 2
    metadata = json.loads((out / "metadata.jsonld").read_text())
    assert metadata["dct:title"] == "Visits by page" and metadata["dcat:contactPoint"] == {
        "@type": "vcard:Kind", "vcard:fn": "statistics@example.org",
        "vcard:hasEmail": {"@id": "mailto:statistics@example.org"},
    }  # fmt: skip
    period = metadata["dct:temporal"]
    assert period["dcat:endDate"]["@value"] == "2024-01-02T00:00:00Z"
    for distribution in metadata["dcat:distribution"]:
        assert (out / distribution["dcat:downloadURL"]["@id"]).exists()
    prefixes = set(metadata["@context"])
    assert {name.partition(":")[0] for name in metadata if ":" in name} <= prefixes
    assert "dct:spatial" in metadata and "dct:bibliographicCitation" not in metadata


def test_texts_of_the_section_stay_what_they_are(job: Job, tmp_path: Path) -> None:
    """A title is one line of Markdown and no HTML; a contact with a name is no address."""
    text = job.path.read_text().replace('"Visits by page"', '"Visits\\n<b>by</b> page"')
    job.path.write_text(text.replace('"statistics@example.org"', '"Ann <ann@example.org>"'))
    out = tmp_path / "public"
    assert publish(job, out)[0] == 0
    assert (
        "# Methodology: Visits &lt;b>by&lt;/b> page\n"
        in (out / publication.METHODOLOGY).read_text()
    )
    metadata = json.loads((out / "metadata.jsonld").read_text())
    assert metadata["dcat:contactPoint"]["vcard:fn"] == "Ann <ann@example.org>"
    assert "mailto" not in json.dumps(metadata)


def test_a_run_with_a_test_secret_has_no_entry(make_job: Callable[..., Job]) -> None:
    job = make_job()
    (job.path.parent / "in" / "a.csv").write_text("user,key,time,value\n")
    execute(job)
    stores.close_all()
    job.path.write_text(job.path.read_text() + SECTION + MORE)
    out = job.path.parent / "public"
    code, text = publish(job, out)
    assert code == 0 and "INSECURE: do not publish; deployment.yaml was not written." in text
    assert not (out / "deployment.yaml").exists()
    page = (out / publication.METHODOLOGY).read_text()
    assert "**INSECURE: this is not to be published.**" in page
    assert "| guarantee | none: INSECURE |" in page and "| lifetime | none: INSECURE |" in page
    metadata = json.loads((out / "metadata.jsonld").read_text())
    assert {metadata[f"dpstream:{name}"] for name in ("guarantee", "lifetime")} == {
        "none: INSECURE"
    }


@pytest.mark.parametrize("name", [*NAMES, "deployment.yaml"])
def test_no_other_file_is_replaced(job: Job, tmp_path: Path, name: str) -> None:
    out = tmp_path / "public"
    out.mkdir()
    (out / name).write_text("mine\n")
    if name == "deployment.yaml":
        job.path.write_text(job.path.read_text() + MORE)
    code, text = publish(job, out)
    assert code == 2 and "is another file" in text
    assert (out / name).read_text() == "mine\n" and [*out.iterdir()] == [out / name]


def test_a_folder_has_the_publication_of_one_job(job: Job, tmp_path: Path) -> None:
    out = tmp_path / "public"
    assert publish(job, out)[0] == 0
    old = {path.name: path.read_bytes() for path in out.iterdir()}
    page = out / publication.METHODOLOGY  # as another job has written it
    other = page.read_bytes().replace(b"report daily", b"report other")
    page.write_bytes(other)
    assert publish(job, out)[0] == 2
    assert {path.name: path.read_bytes() for path in out.iterdir()} == old | {page.name: other}


def test_cut_off_each_file_is_an_old_or_a_new_one(job: Job, tmp_path: Path) -> None:
    out = tmp_path / "public"
    assert publish(job, out)[0] == 0
    old = {path.name: path.read_bytes() for path in out.iterdir()}
    job.path.write_text(job.path.read_text().replace("Visits by page", "Other figures"))
    real, left = os.replace, [3]

    class Killed(BaseException):
        pass

    def replace(*names: Path) -> None:
        left[0] -= 1
        if not left[0]:
            raise Killed
        real(*names)

    with mock.patch.object(os, "replace", replace), pytest.raises(Killed):
        publish(job, out)
    now = {path.name: path.read_bytes() for path in out.iterdir()}
    assert now == old  # the tables are the same; the third is the methodology
    assert publish(job, out)[0] == 0
    assert b"Other figures" in (out / publication.METHODOLOGY).read_bytes()


@pytest.mark.parametrize("more", [("--out", "x.html"), ("--truth", "in/a.csv"), ("--serve",)])
def test_what_does_not_go_together(job: Job, tmp_path: Path, more: tuple[str, ...]) -> None:
    code, text = publish(job, tmp_path / "public", *more)
    assert code == 2 and "does not go with --publish" in text
    assert not (tmp_path / "public").exists()
    code, text = publish(job, Path(job.sink.path) / "public")
    assert code == 2 and "lies in the folder of the releases" in text

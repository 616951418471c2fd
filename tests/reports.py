"""Releases as a run would write them, reports on them and what every page must be."""

import base64
import hashlib
import json
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pyarrow as pa
from click.testing import CliRunner, Result

from dpstream.dp_transforms.batches import TRIGGER, WINDOW, release_schema
from dpstream.dp_transforms.flow import run_in_memory
from dpstream.pipelines.cli.main import cli
from dpstream.pipelines.connectors.files.source import pieces, read_piece
from dpstream.pipelines.connectors.inputs import positioned
from dpstream.pipelines.formats.rows import Rows
from dpstream.pipelines.jobs.job import Job, load_job
from dpstream.pipelines.render.page import script_text
from dpstream.pipelines.report.report import MARK
from dpstream.pipelines.stream.begin import begin
from dpstream.state import open as stores
from tests.written import write_release

RUN = "ab" * 16
VOID = {"meta", "link", "img", "br", "hr", "input"}


def call(*args: str | Path) -> Result:
    return CliRunner().invoke(cli, ["report", *(str(a) for a in args)])


class Page(HTMLParser):
    """A page's elements, texts and what is wrong with its tree."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.parts: list[tuple[str, str]] = []
        self.scripts: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag, tag

    def handle_data(self, data: str) -> None:
        if self.open[-1:] == ["script"]:
            self.scripts.append(data)
        elif data.strip() and self.open[-1:] != ["style"]:
            self.parts.append((self.open[-1] if self.open else "", " ".join(data.split())))

    def every(self, tag: str) -> list[dict[str, str | None]]:
        return [attrs for name, attrs in self.elements if name == tag]

    def of(self, tag: str) -> list[str]:
        return [text for name, text in self.parts if name == tag]

    @property
    def text(self) -> str:
        return " ".join(text for _, text in self.parts)


def put(job: Job, trigger: int, rows: list[dict[str, Any]], window: int = 0, **other: Any) -> None:
    """Write a release with these key, values and sds; all else as the flow would."""
    begin_, end = job.plan.timeline.window_bounds(window)
    time = job.plan.timeline.instant_of(job.plan.timeline.base(window) + trigger)
    stamp = {"plan_hash": job.plan.hash, "run_id": f"INSECURE-{RUN}", **other}
    fixed = {"release_id": bytes(16), "window_start": begin_, "window_end": end,
             "trigger": trigger, "trigger_time": time, **stamp}  # fmt: skip
    schema = release_schema(job.plan).with_metadata({WINDOW: str(window), TRIGGER: str(trigger)})
    batch = pa.RecordBatch.from_pylist([{**fixed, **row} for row in rows], schema=schema)
    write_release(Path(job.sink.path), job.sink.kind, batch)


def row(key: str, records: float, sd: float = 5.0) -> dict[str, Any]:
    return {
        "key": key,
        "records": records,
        "records_sd": sd,
        "total": 3 * records,
        "total_sd": 2 * sd,
    }


def three_triggers(job: Job, keys: list[str]) -> None:
    for trigger in (1, 2, 3):
        rows = [row(key, 100.0 * (i + 1) + trigger) for i, key in enumerate(sorted(keys))]
        put(job, trigger, rows)


def report(job: Job, tmp_path: Path, *flags: str | Path) -> tuple[Page, str, dict[str, Any]]:
    """(parsed page, its text, its figures) of a report that must succeed."""
    out = tmp_path / "page.html"
    result = call("--project", job.path, "--out", out, "--json", *flags)
    assert result.exit_code == 0, result.output
    text = out.read_text(encoding="utf-8")
    return Page(text), text, json.loads(result.stdout)


def edit(job: Job, *changes: tuple[str, str]) -> Job:
    text = job.path.read_text()
    for old, new in changes:
        assert old in text
        text = text.replace(old, new, 1)
    job.path.write_text(text)
    return load_job(job.path)


def execute(job: Job) -> None:
    """Run a job without Beam and write its releases."""
    run, _ = begin(job)
    batches = [
        batch
        for piece in pieces(job)
        for part in read_piece(piece, job.columns)
        if isinstance(part, Rows)
        for batch in positioned(part, piece[1], 1000)
    ]
    releases, _ = run_in_memory(run, batches)
    stores.close_all()
    for release in releases:
        write_release(Path(job.sink.path), job.sink.kind, release)


def check_scripts(page: Page) -> None:
    """Only the product's script may run, and its data holds no mark of HTML."""
    *data, code = page.every("script")
    assert code == {} and page.scripts[-1] == script_text() and len(page.scripts) == len(data) + 1
    assert data in ([], [{"type": "application/json", "id": "data"}])
    assert not [text for text in page.scripts[:-1] if set("<>&") & set(text)]
    [rules] = [m["content"] or "" for m in page.every("meta") if m.get("http-equiv")]
    digest = base64.b64encode(hashlib.sha256(script_text().encode()).digest()).decode()
    assert f"script-src 'sha256-{digest}'" in rules and "default-src 'none'" in rules
    assert "connect-src" not in rules and "require-trusted-types-for 'script'" in rules


def data_of(page: Page) -> dict[str, Any]:
    """What the page's table is made of."""
    return dict(json.loads(page.scripts[0]))


def check_page(page: Page, text: str) -> None:
    """What holds for every page: one file, valid, readable without eyes or scripts."""
    assert text.startswith(MARK) and page.open == []
    ids = [attrs["id"] for _, attrs in page.elements if "id" in attrs]
    assert len(ids) == len(set(ids))
    check_scripts(page)
    assert not page.every("img") and not page.every("iframe")
    assert "http://" not in text and "https://" not in text and "@import" not in text
    assert not [k for _, attrs in page.elements for k in attrs if k.startswith("on")]
    targets = [v for _, attrs in page.elements for k, v in attrs.items() if k.endswith("href")]
    assert all(v and v.startswith("#") and v[1:] in ids for v in targets)
    for attrs in page.every("svg"):
        assert attrs["role"] == "img" and len(attrs["aria-label"] or "") > 20
    assert all(attrs["aria-labelledby"] in ids for attrs in page.every("section"))
    assert page.every("html")[0]["lang"] == "en" and page.of("title") and page.of("h1")
    assert [m for m in page.every("meta") if m.get("name") == "viewport"]

"""CSV sinks: what a spreadsheet would compute is text, and comes back as it was."""

import csv
import io
from pathlib import Path

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dpstream.accounting.errors import PolicyError, UsageError
from dpstream.pipelines.connectors.files.sink import FileSink
from dpstream.pipelines.formats.encodings import encode, read_parts, read_releases
from dpstream.pipelines.formats.formulas import ambiguous, guarded, unguarded
from dpstream.pipelines.jobs.job import Job, load_job
from dpstream.pipelines.operate.state_view import export, publish
from dpstream.pipelines.report.data import collect
from dpstream.pipelines.report.releases import inventory, newest
from dpstream.pipelines.stream.run import run_job
from tests.pipelines.conftest import TEMPLATE
from tests.pipelines.connectors.files.test_sink import SCHEMA, files, release
from tests.written import write_release

STARTS = ["=", "+", "-", "@", "\t", "\r", "\n", "＝", "＋", "－", "＠"]
TEXTS = st.text(st.sampled_from(["'", "a", " ", '"', ",", *STARTS]), max_size=6)
KEYS = ["=1+1", "'=1+1", "''@x", "@user", "-", "'tis", "a=b", "", " =x"]


def keys_of(table: pa.Table) -> list[str]:
    return [str(key) for key in table["key"].to_pylist()]


@given(st.lists(TEXTS | st.none(), max_size=8))
@settings(deadline=None)
def test_a_guard_is_taken_away_again(texts: list[str | None]) -> None:
    table = pa.table({"key": pa.array(texts, pa.string()), "n": list(range(len(texts)))})
    marked = guarded(table)
    assert unguarded(marked).equals(table)
    for text, cell in zip(texts, marked["key"].to_pylist(), strict=True):
        formula = text is not None and text.lstrip("'")[:1] in STARTS and text.lstrip("'")
        assert cell == (f"'{text}" if formula else text)
    unguarded_texts = unguarded(table)["key"].to_pylist()
    assert ambiguous(table) == (unguarded_texts != texts)


@given(st.lists(TEXTS, min_size=1, max_size=8))
@settings(max_examples=50, deadline=None)
def test_no_cell_begins_with_a_formula(texts: list[str]) -> None:
    batch = release(0, 1, texts)
    text = encode(batch, "csv").decode()
    cells = [cell for row in csv.reader(io.StringIO(text, newline="")) for cell in row]
    assert not any(cell[:1] in STARTS for cell in cells if cell)
    assert encode(batch, "csv", guard=False) == encode(batch, "csv") or any(
        text.lstrip("'")[:1] in STARTS for text in texts
    )


@pytest.mark.parametrize("guard", [True, False])
def test_what_is_written_is_read(tmp_path: Path, guard: bool) -> None:
    sink = FileSink(tmp_path, "csv", guard)
    sink.write([release(0, 1, KEYS), release(0, 2, ["b"])])
    assert keys_of(read_releases(tmp_path, SCHEMA, guard)) == [*KEYS, "b"]
    assert keys_of(read_releases(tmp_path, guard=guard)) == [*KEYS, "b"]
    one = tmp_path / "window-000000" / "trigger-000001.csv"
    assert [k for part in read_parts(one, SCHEMA, guard) for k in keys_of(part)] == KEYS
    assert (b"\"''=1+1\"" in one.read_bytes()) is guard


def test_the_same_release_guarded_or_not(tmp_path: Path) -> None:
    """A sink that was begun before there was a guard goes on."""
    plain = [key for key in KEYS if not key.startswith("'")]
    FileSink(tmp_path, "csv", False).write([release(0, 1, plain)])
    before = files(tmp_path)
    for guard in (True, False):
        sink = FileSink(tmp_path, "csv", guard)
        assert sink.holds(release(0, 1, plain)) and all(
            sink.same(one, release(0, 1, plain)) for one in sink.published()
        )
        sink.write([release(0, 1, plain)])
        with pytest.raises(PolicyError):
            sink.write([release(0, 1, ["x", *plain[1:]])])
    assert files(tmp_path) == before


def test_another_release_is_not_taken_for_a_guarded_one(tmp_path: Path) -> None:
    write_release(tmp_path, "csv", release(0, 1, ["=x"]))
    with pytest.raises(PolicyError):
        write_release(tmp_path, "csv", release(0, 1, ["'=x"]))


def job_in(folder: Path, option: str = "", sink: str = "csv") -> Job:
    (folder / "in").mkdir(parents=True, exist_ok=True)
    rows = [
        f'u{i}{n},"{key}",2024-01-01T01:00:00Z,1' for i in range(200) for n, key in enumerate(
            ["=1+1", "@sum", "'=1+1", "plain"]
        )
    ]  # fmt: skip
    (folder / "in" / "a.csv").write_text("\n".join(["user,key,time,value", *rows]) + "\n")
    text = TEMPLATE.format(kind="csv", pattern="in/*", sink=sink, batch_rows=99)
    text = text.replace('path = "releases"', f'path = "releases"{option and ", "}{option}')
    (folder / "dpstream.toml").write_text(text)
    return load_job(folder / "dpstream.toml")


@pytest.mark.parametrize("option", ["", 'formulas = "guard"', 'formulas = "keep"'])
def test_a_job_from_end_to_end(tmp_path: Path, option: str) -> None:
    """Run, run again, a lost file, an export and the report agree about a key's text."""
    job = job_in(tmp_path, option)
    expected = ["'=1+1", "=1+1", "@sum", "plain"]
    run_job(job)
    first = files(tmp_path / "releases")
    text = b"".join(data for name, data in first.items() if name.endswith(".csv")).decode()
    cells = {cell for row in csv.reader(io.StringIO(text)) for cell in row}
    formula_cells = {cell for cell in cells if "1+1" in cell or "@sum" in cell}
    unmarked, marked = {"=1+1", "'=1+1", "@sum"}, {"'=1+1", "''=1+1", "'@sum"}
    assert formula_cells == (unmarked if "keep" in option else marked)
    run_job(job)
    (tmp_path / "releases" / "window-000000" / "trigger-000002.csv").unlink()
    publish(job)
    assert files(tmp_path / "releases") == first
    export(job, tmp_path / "out", "csv")
    assert files(tmp_path / "out") == first
    found_in = inventory(job)
    for _, group in found_in.by_window():
        table = pa.concat_tables(newest(job.plan, group))
        assert sorted(keys_of(table)) == expected
    assert collect(job.plan, found_in).windows.tolist() == [0]


def test_the_option_is_of_csv(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"sink\.formulas: is not for kind 'parquet'"):
        job_in(tmp_path, 'formulas = "keep"', "parquet")
    with pytest.raises(UsageError):
        job_in(tmp_path, 'formulas = "drop"')

"""``dpstream sql --stream`` as it is typed."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from dpstream.pipelines.cli.main import cli
from dpstream.pipelines.connectors.records.formats import read_releases
from dpstream.state import open as stores
from tests.pipelines.cli.test_quick_imports import loaded
from tests.pipelines.sql.visited import LOOKED_UP, dp, folder

_TEXT = dp(LOOKED_UP)


def _run(*words: object) -> Result:
    outcome = CliRunner().invoke(cli, list(map(str, words)))
    stores.close_all()
    return outcome


def test_run_and_emitted_give_the_same_bytes(tmp_path: Path) -> None:
    for name in ("one", "other"):
        (tmp_path / name).mkdir()
    path = folder(tmp_path / "one")
    ran = _run("sql", "--stream", path, _TEXT + ";")
    assert ran.exit_code == 0 and "all triggers done" in ran.stdout and "INSECURE" in ran.stdout
    releases = read_releases(tmp_path / "one" / "releases")
    assert {"section", "n", "n_sd", "t", "t_sd"} <= set(releases.column_names) and releases.num_rows

    other = folder(tmp_path / "other")
    emitted = _run("sql", "--stream", other, _TEXT, "--emit")
    out = other.parent / "visits.toml"
    assert _run("sql", "--stream", other, _TEXT, "--emit", out).exit_code == 0
    assert out.read_text() == emitted.stdout and not (other.parent / "releases").exists()
    assert _run("run", out).exit_code == 0
    files = sorted(p.relative_to(tmp_path / "one") for p in (tmp_path / "one").rglob("trigger-*"))
    assert len(files) == 4
    for file in files:
        assert (tmp_path / "one" / file).read_bytes() == (tmp_path / "other" / file).read_bytes()
    assert _run("plan", out).exit_code == 0


def test_again_goes_on_and_another_statement_is_refused(tmp_path: Path) -> None:
    path, text = folder(tmp_path), tmp_path / "q.sql"
    text.write_text(_TEXT)
    assert _run("sql", "--stream", path, "-f", text).exit_code == 0
    again = _run("sql", "--stream", path, "-f", text, "--json", "--runner", "DirectRunner")
    assert again.exit_code == 0 and json.loads(again.stdout)["resumed"] is True
    other = _run("sql", "--stream", path, _TEXT.replace("v.n < 5", "v.n < 4"))
    assert other.exit_code == 3 and "Fix:" in other.stderr


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (["--stream", "JOB"], 2), (["--stream", "JOB", _TEXT, "-f", "q.sql"], 2),
        (["--stream", "JOB", _TEXT, "--explain"], 2), (["--stream", "JOB", _TEXT, "--fresh"], 2),
        (["--stream", "JOB", _TEXT, "--as-of", "May"], 2),
        ([_TEXT, "--emit"], 2), ([_TEXT, "--runner", "DirectRunner"], 2),
        (["--stream", "JOB", f"{_TEXT}; {_TEXT}"], 2), (["--stream", "JOB", ""], 2),
        (["--stream", "JOB", _TEXT, "--emit", "/elsewhere.toml"], 2),
        (["--stream", "JOB", _TEXT, "--emit", "JOB"], 2), (["--stream", "none.toml", _TEXT], 2),
        (["--stream", "JOB", _TEXT.replace("v.page = s.page", "v.page > s.page")], 3),
    ],
)  # fmt: skip
def test_refusals_have_codes_and_leave_nothing(words: list[str], code: int, tmp_path: Path) -> None:
    path = folder(tmp_path)
    outcome = _run("sql", *(str(path) if word == "JOB" else word for word in words))
    assert outcome.exit_code == code and "Fix:" in outcome.stderr
    assert sorted(f.name for f in tmp_path.iterdir()) == ["in", "job.toml", "sections.csv"]


def test_writing_a_job_loads_no_runner(tmp_path: Path) -> None:
    names = loaded(["sql", "--stream", str(folder(tmp_path)), _TEXT, "--emit"])
    assert "apache_beam" not in names and "dpstream.pipelines.sql.stream" in names

"""``dpstream sql --stream`` as it is typed."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from dpstream.pipelines.cli.main import cli
from dpstream.pipelines.formats.encodings import read_releases
from dpstream.state import open as stores
from tests.pipelines.cli.test_quick_imports import loaded
from tests.pipelines.sql.shop import LOOKED_UP, dp, folder

_TEXT = dp(LOOKED_UP)


def _run(*words: object) -> Result:
    outcome = CliRunner().invoke(cli, list(map(str, words)))
    stores.close_all()
    return outcome


def test_run_and_emitted_give_the_same_bytes(tmp_path: Path) -> None:
    for name in ("one", "other"):
        (tmp_path / name).mkdir()
    project = ("--project", folder(tmp_path / "one"))
    ran = _run("sql", "--stream", "daily", _TEXT + ";", *project)
    assert ran.exit_code == 0 and "all triggers done" in ran.stdout and "INSECURE" in ran.stderr
    releases = read_releases(tmp_path / "one" / "releases")
    assert {"section", "n", "n_sd", "t", "t_sd"} <= set(releases.column_names) and releases.num_rows

    other = ("--project", folder(tmp_path / "other"))
    emitted = _run("sql", "--stream", "daily", _TEXT, "--emit", "live", *other)
    assert emitted.exit_code == 0 and not (tmp_path / "other" / "releases").exists()
    assert _run("run", "live", *other).exit_code == 0
    for one, two in zip(
        *(sorted((tmp_path / name).rglob("trigger-*")) for name in ("one", "other")), strict=True
    ):
        assert one.read_bytes() == two.read_bytes()
    assert _run("plan", "live", *other).exit_code == 0


def test_again_goes_on_and_another_statement_is_refused(tmp_path: Path) -> None:
    project, text = ("--project", folder(tmp_path)), tmp_path / "q.sql"
    text.write_text(_TEXT)
    stream = ("sql", "--stream", "daily", *project)
    assert _run(*stream, "-f", text).exit_code == 0
    again = _run(*stream, "-f", text, "--json", "--runner", "DirectRunner")
    assert again.exit_code == 0 and json.loads(again.stdout)["resumed"] is True
    other = _run(*stream, _TEXT.replace("v.n < 5", "v.n < 4"))
    assert other.exit_code == 3 and "Fix:" in other.stderr


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (["--stream", "daily"], 2), (["--stream", "daily", _TEXT, "-f", "q.sql"], 2),
        (["--stream", "daily", _TEXT, "--explain"], 2),
        (["--stream", "daily", _TEXT, "--fresh"], 2),
        (["--stream", "daily", _TEXT, "--as-of", "May"], 2),
        ([_TEXT, "--emit", "live"], 2), ([_TEXT, "--runner", "DirectRunner"], 2),
        (["--stream", "daily", f"{_TEXT}; {_TEXT}"], 2), (["--stream", "daily", ""], 2),
        (["--stream", "daily", _TEXT, "--emit", "a/b"], 2),
        (["--stream", "daily", _TEXT, "--emit", "daily"], 2), (["--stream", "none", _TEXT], 2),
        (["--stream", "daily", _TEXT.replace("v.page = s.page", "v.page > s.page")], 3),
    ],
)  # fmt: skip
def test_refusals_have_codes_and_leave_nothing(words: list[str], code: int, tmp_path: Path) -> None:
    outcome = _run("sql", *words, "--project", folder(tmp_path))
    assert outcome.exit_code == code and "Fix:" in outcome.stderr
    assert sorted(f.name for f in tmp_path.iterdir()) == ["dpstream.toml", "in", "sections.csv"]


def test_writing_a_job_loads_no_runner(tmp_path: Path) -> None:
    project = str(folder(tmp_path))
    names = loaded(["sql", "--stream", "daily", _TEXT, "--emit", "live", "--project", project])
    assert "apache_beam" not in names and "dpstream.pipelines.sql.stream" in names

"""Nothing that is there is written over, and the name that is proposed is free."""

from pathlib import Path

import pytest

from dpstream.accounting.errors import DpstreamError, PolicyError, RunError
from dpstream.pipelines.drafting.place import check_place, write


@pytest.mark.parametrize("there", ["job.toml", "job.db", "releases"])
def test_what_is_there_is_met_with_a_free_name(
    there: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    key = tmp_path / "noise.key"
    check_place(tmp_path / "job.toml", key, replace=False)
    (tmp_path / there).touch()
    (tmp_path / "job2.db").touch()
    with pytest.raises(PolicyError, match=r"add --out job3\.toml"):
        check_place(tmp_path / "job.toml", key, replace=False)
    check_place(tmp_path / "job3.toml", key, replace=False)
    if there == "job.toml":
        check_place(tmp_path / "job.toml", key, replace=True)


def test_places_for_no_job(tmp_path: Path) -> None:
    (tmp_path / "d.toml").mkdir()
    for out, key, field in (
        ("job", "k", "--out"), ("no/job.toml", "k", "--out"), ("d.toml", "k", "--out"),
        ("job.toml", "no/k", "--key-file"), ("job.toml", "job.toml", "--key-file"),
    ):  # fmt: skip
        with pytest.raises(DpstreamError) as error:
            check_place(tmp_path / out, tmp_path / key, replace=True)
        assert error.value.field == field


def test_a_key_is_made_once_and_a_job_only_if_told(tmp_path: Path) -> None:
    out, key = tmp_path / "job.toml", tmp_path / "noise.key"
    assert write("a", out, key, replace=False)
    assert key.stat().st_mode & 0o777 == 0o600
    before = key.read_bytes()
    with pytest.raises(PolicyError):
        write("b", out, key, replace=False)
    assert out.read_text() == "a"
    assert not write("c", out, key, replace=True)
    assert out.read_text() == "c" and key.read_bytes() == before
    with pytest.raises(RunError):
        write("d", tmp_path / "no" / "job.toml", key, replace=False)

"""``dpstream demo``: its examples, and a job that is not one."""

from pathlib import Path

from tests.pipelines.cli.called import examples_of, refused


def test_examples() -> None:
    assert examples_of("demo") == ["dpstream demo", "dpstream demo --folder flights"]


def test_what_lies_in_the_folder_is_used_and_checked(tmp_path: Path) -> None:
    for name in ("flights.parquet", "flights.secret", "dpstream.toml"):
        (tmp_path / name).write_text("SECRET")
    assert "SECRET" not in refused("demo", "--folder", tmp_path)
    assert (tmp_path / "dpstream.toml").read_text() == "SECRET"

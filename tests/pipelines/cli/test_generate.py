"""``dpstream generate``: the records that are asked for, never over others."""

from pathlib import Path

from tests.pipelines.cli.called import call, examples_of, refused


def test_each_command_has_examples() -> None:
    assert examples_of("generate", "zipf")


def test_a_file_is_not_written_over(tmp_path: Path) -> None:
    out = tmp_path / "data.parquet"
    assert call("generate", "zipf", out, "--users", "50").exit_code == 0
    before = out.read_bytes()
    refused("generate", "zipf", out, "--users", "60")
    assert out.read_bytes() == before
    assert call("generate", "zipf", out, "--users", "60", "--overwrite").exit_code == 0
    assert out.read_bytes() != before


def test_a_start_is_an_instant(tmp_path: Path) -> None:
    assert "--start" in refused("generate", "zipf", tmp_path / "x.parquet", "--start", "soon")

"""``dpstream secret``: a new key is for its owner only, and never written over."""

from collections.abc import Callable
from pathlib import Path

from dpstream.pipelines.jobs.job import Job
from tests.pipelines.cli.called import call, examples_of


def test_each_command_has_examples() -> None:
    assert examples_of("secret", "new") and examples_of("secret", "check")


def test_a_new_key_is_the_owners_alone(tmp_path: Path) -> None:
    key = tmp_path / "noise.secret"
    assert call("secret", "new", key).exit_code == 0
    assert key.stat().st_mode & 0o777 == 0o600
    before = key.read_bytes()
    outcome = call("secret", "new", key)
    assert outcome.exit_code != 0 and key.read_bytes() == before
    assert before.hex() not in outcome.output


def test_a_test_key_is_told(make_job: Callable[..., Job]) -> None:
    output = call("secret", "check", "--project", make_job().path).output
    assert "INSECURE" in output and "0f0f" not in output

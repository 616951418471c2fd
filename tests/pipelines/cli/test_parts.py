"""What commands share: lists of values, signals for a while, a bar of public things."""

import signal
from pathlib import Path

import click
import pytest

from dpstream.pipelines.cli.parts import (
    Bar,
    examples,
    options,
    stop_signals,
)
from tests import accounts
from tests.pipelines.cli.called import call, refused
from tests.pipelines.cli.mistakes import JOB


def test_options_stand_in_their_order() -> None:
    @click.command()
    @options(click.option("--first"), click.option("--second"))
    def two(**_: object) -> None:
        """Nothing."""

    assert [option.name for option in two.params] == ["first", "second"]
    assert examples("a", "b").endswith("Examples:\n  a\n  b")


def test_signals_stop_while_the_block_runs_and_then_do_what_they_did() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with stop_signals(True) as stop:
        assert stop is not None and not stop.is_set()
        signal.raise_signal(signal.SIGTERM)
        assert stop.is_set()
    assert signal.getsignal(signal.SIGTERM) is before
    with stop_signals(False) as none:
        assert none is None and signal.getsignal(signal.SIGTERM) is before


def test_a_bar_shows_steps_of_all(capsys: pytest.CaptureFixture[str]) -> None:
    with Bar(hidden=True) as bar:
        bar.update(3, 0)
        [task] = bar._progress.tasks
        assert (task.completed, task.total) == (3, None)
        bar.update(4, 9)
        assert (task.completed, task.total) == (4, 9)
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize("option", ["--env=live", "--set=job.job.store=b.db", "--project=p.toml"])
def test_a_job_file_takes_no_option_of_the_project_file(option: str, tmp_path: Path) -> None:
    """Its places would stay as they are, though somebody asked for others."""
    accounts.write(tmp_path / "job.toml", JOB)
    assert call("plan", tmp_path / "job.toml").exit_code == 0
    assert "Fix:" in refused("plan", tmp_path / "job.toml", option)


def test_a_change_is_tried_on_a_job_of_the_project_file_alone(tmp_path: Path) -> None:
    accounts.write(tmp_path / "job.toml", JOB)
    assert "--try" in refused("plan", tmp_path / "job.toml", "--try", "job.job.contributions=2")

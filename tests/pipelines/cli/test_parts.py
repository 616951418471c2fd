"""What commands share: lists of values, signals for a while, a bar of public things."""

import signal

import click
import pytest

from dpstream.pipelines.cli.main import cli
from dpstream.pipelines.cli.parts import (
    Bar,
    examples,
    options,
    stop_signals,
)
from tests.pipelines.cli.called import call


def test_options_stand_in_their_order() -> None:
    @click.command()
    @options(click.option("--first"), click.option("--second"))
    def two(**_: object) -> None:
        """Nothing."""

    assert [option.name for option in two.params] == ["first", "second"]
    assert examples("a", "b").endswith("Examples:\n  a\n  b")


def test_no_description_of_a_command_is_cut_off() -> None:
    groups = {(): cli} | {(name,): command for name, command in cli.commands.items()}
    for words, group in groups.items():
        if isinstance(group, click.Group):
            text = " ".join(call(*words, "--help").stdout.split())
            assert "..." not in text.partition("Commands:")[2]
            for command in group.commands.values():
                assert command.get_short_help_str(1_000) in text


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

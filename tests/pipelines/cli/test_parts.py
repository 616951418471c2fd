"""What commands share: lists of values, signals for a while, a bar of public things."""

import json
import signal

import click
import pytest
from click.testing import CliRunner

from dpstream.pipelines.cli.parts import (
    Bar,
    ListCommand,
    examples,
    options,
    print_json,
    stop_signals,
)


@click.command(cls=ListCommand)
@click.option("--many", multiple=True, type=int)
@click.option("--one")
@click.option("--flag", is_flag=True)
def lists(many: tuple[int, ...], one: str | None, flag: bool) -> None:
    """Says what it was given."""
    print_json([many, one, flag])


@pytest.mark.parametrize(
    ("args", "given"),
    [([], [[], None, False]), (["--many", "1", "2", "--flag"], [[1, 2], None, True]),
     (["--many", "1", "--one", "x", "--many", "3"], [[1, 3], "x", False])],
)  # fmt: skip
def test_options_take_several_values(args: list[str], given: list[object]) -> None:
    assert json.loads(CliRunner().invoke(lists, args).output) == given


@pytest.mark.parametrize("args", [["--many"], ["--many", "--flag"], ["stray"], ["--many", "x"]])
def test_what_a_list_refuses(args: list[str]) -> None:
    assert CliRunner().invoke(lists, args).exit_code == 2


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

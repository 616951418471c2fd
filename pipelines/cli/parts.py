"""What the commands of ``dpstream`` share: options, help texts, jobs, signals, JSON, progress."""

import contextlib
import functools
import json
import shlex
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar, cast

import click
from typing_extensions import override

from dpstream.accounting.extras import require

if TYPE_CHECKING:
    from dpstream.pipelines.drafting.ask import Person
    from dpstream.pipelines.jobs.job import Job
    from dpstream.pipelines.project.project import Project
    from dpstream.pipelines.runners.bounded import Runner

#: Of the names in what --json prints: another number means that some are gone or mean other things.
SCHEMA_VERSION = 1
AS_JSON = click.option("--json", "as_json", is_flag=True, help="Machine-readable output.")
ALLOW_LARGE_DELTA = click.option(
    "--allow-large-delta", is_flag=True, help="Take a delta above 0.01, which is refused else."
)
FRESH = click.option(
    "--fresh", is_flag=True, help="Ask anew what was answered before: a new charge."
)
AS_OF = click.option(
    "--as-of",
    default="",
    metavar="LABEL",
    help="State of the data, e.g. a date: with another"
    " label the same question is a new one, at a charge of its own.",
)
#: Of an answer that was charged before, also where it was cut off then and is given now.
REPEATED = "Given again as it is: --fresh asks anew, --as-of names another state of the data"
PROJECT = click.option(
    "--project",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="The project file.  [default: dpstream.toml here or in a parent]",
)
ENVIRONMENT = click.option(
    "--env", "environment", metavar="NAME", help="Take the places of [env.NAME]."
)
SETTINGS = click.option(
    "--set",
    "settings",
    multiple=True,
    metavar="FIELD=VALUE",
    help="Another place, such as job.daily.store=daily.db; repeatable.",
)
#: Assumed numbers of units, records, keys: beyond any load, and figures of them stay in the range
#: of floats and of whole numbers of 64 bits.
MOST_ASSUMED = 10**15
COUNT = click.IntRange(1, MOST_ASSUMED)
Function = TypeVar("Function", bound=Callable[..., Any])


def examples(*lines: str) -> str:
    """Help text at the end of a command: examples, not re-wrapped."""
    return "\b\nExamples:\n" + "\n".join(f"  {line}" for line in lines)


def person_of(as_json: bool) -> "Person":
    """Who answers a command's questions: whoever is at the terminal, or nobody."""
    from dpstream.pipelines.drafting.ask import Person

    return Person(None if as_json or not on_terminal() else _ask, _echo)


def on_terminal() -> bool:
    """Whether somebody can be asked."""
    return sys.stdin.isatty()


def _ask(question: str, proposal: str | None) -> str:
    return str(click.prompt(question, default=proposal, type=str, err=True)).strip()


def _echo(text: str) -> None:
    click.echo(text, err=True)


class Chosen(NamedTuple):
    """What a command is asked to use: a section of the project file.

    Attributes:
        name: of the section; ``None``: the only one of its kind.
        project: of ``--project``; environment: of ``--env``; settings: of ``--set``.
        tries: of ``plan --try``.
    """

    name: str | None
    project: Path | None = None
    environment: str | None = None
    settings: tuple[str, ...] = ()
    tries: tuple[str, ...] = ()

    def load(self) -> "Project":
        """The decoded project file; raises as `pipelines.project.project.load_project` does."""
        from dpstream.pipelines.project.project import load_project

        return load_project(self.project, self.environment, self.settings, self.tries)

    @property
    def flags(self) -> str:
        """The options as they are typed again, with a leading space."""
        project = () if self.project is None else ("--project", str(self.project))
        environment = () if self.environment is None else ("--env", self.environment)
        settings = (word for setting in self.settings for word in ("--set", setting))
        words = shlex.join((*project, *environment, *settings))
        return f" {words}" if words else ""


def section(
    name: str, required: bool = False, metavar: str | None = None
) -> Callable[[Function], Function]:
    """The argument that names a section of the project file, with the options that say which file.

    Args:
        name: of the argument and of the function's parameter, which takes a `Chosen`.
        required: further arguments follow.
        metavar: how help writes it.
    """

    def apply(function: Function) -> Function:
        @functools.wraps(function)
        def chosen(
            project: Path | None,
            environment: str | None,
            settings: tuple[str, ...],
            **given: Any,
        ) -> Any:
            given[name] = Chosen(_without_flag(given[name]), project, environment, settings)
            return function(**given)

        argument = click.argument(name, required=required, metavar=metavar)
        return cast(Function, argument(PROJECT(ENVIRONMENT(SETTINGS(chosen)))))

    return apply


def _without_flag(name: str | None) -> str | None:
    """The name; without one the first flag of Beam stands in its place, and goes back to them."""
    if name is None or not name.startswith("-"):
        return name
    click.get_current_context().args.insert(0, name)
    return None


def data_set(function: Function) -> Function:
    """The options that name a data set of a project file; the function's ``data_set`` is a
    `Chosen`."""

    @functools.wraps(function)
    def chosen(
        project: Path | None,
        environment: str | None,
        settings: tuple[str, ...],
        **given: Any,
    ) -> Any:
        given["data_set"] = Chosen(given["data_set"], project, environment, settings)
        return function(**given)

    option = click.option(
        "--data-set", metavar="NAME", help="Of the project file.  [default: the only one]"
    )
    return cast(Function, option(PROJECT(ENVIRONMENT(SETTINGS(chosen)))))


#: The job of a command; without a name the only one of the project file.
JOB = section("job")


def load_job(job: Chosen, workload: bool = False) -> "Job":
    """The checked job; its module is loaded only now, because help does not need it."""
    from dpstream.pipelines.jobs import job as jobs

    return jobs.job_in(job.load(), job.name, workload)


def print_json(value: Any) -> None:
    """One line of JSON on stdout; an object says which version of its names it has."""
    if isinstance(value, dict):
        value = {"schema_version": SCHEMA_VERSION} | value
    click.echo(json.dumps(value))


def print_warnings(warnings: Iterable[str]) -> None:
    """Each on a line of stderr, apart from the output; with --json they are in it, and stderr is
    for an error's object alone."""
    context = click.get_current_context(silent=True)
    if context is not None and context.params.get("as_json"):
        return
    for warning in warnings:
        click.echo(f"Warning: {warning}", err=True)


def options(*decorators: Callable[[Function], Function]) -> Callable[[Function], Function]:
    """Several options as one decorator, in their order in the help."""

    def apply(function: Function) -> Function:
        for decorator in reversed(decorators):
            function = decorator(function)
        return function

    return apply


#: Of the commands that make an account where none is chosen.
ACCOUNT = options(
    click.option(
        "--account",
        metavar="PATH",
        help="The account to charge, of those that are there: its path or URL.",
    ),
    click.option(
        "--new-account",
        is_flag=True,
        help="Make an account: the data are other people's, or other records.",
    ),
)


class ExtraGroup(click.Group):
    """A group whose commands need an extra of the package; their help does not.

    Args:
        extra: its name.
    """

    def __init__(self, *args: Any, extra: str, **options: Any) -> None:
        super().__init__(*args, **options)
        self.extra = extra

    @override
    def invoke(self, ctx: click.Context) -> Any:
        if not {*ctx.help_option_names} & {*ctx.args}:
            require(self.extra, ctx.command_path)
        return super().invoke(ctx)


@contextlib.contextmanager
def stop_signals(active: bool) -> Iterator[threading.Event | None]:
    """An event that is set by the signals that end a program, while the block runs.

    Args:
        active: whether being stopped is the ordinary end; otherwise signals do what they did.
    """
    if not active:
        yield None
        return
    stop = threading.Event()
    before = {
        number: signal.signal(number, lambda *_: stop.set())
        for number in (signal.SIGINT, signal.SIGTERM)
    }
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@dataclass
class Bar:
    """A progress bar on stderr that counts public things (by default steps: windows x triggers x
    shards), never records."""

    hidden: bool
    what: str = "steps"

    def __enter__(self) -> "Bar":
        from rich import progress as shown
        from rich.console import Console

        columns = (
            shown.TextColumn(self.what),
            shown.BarColumn(),
            shown.MofNCompleteColumn(),
            shown.TimeElapsedColumn(),
        )
        self._progress = shown.Progress(
            *columns, console=Console(stderr=True), disable=self.hidden, transient=True
        )
        self._progress.start()
        self._task = self._progress.add_task(self.what, total=None)
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def update(self, done: int, total: int) -> None:
        """Show ``done`` of ``total`` steps (0: nobody knows)."""
        self._progress.update(self._task, completed=done, total=total or None)


def runner_of(name: str | None, parallelism: int, flags: tuple[str, ...]) -> "Runner | None":
    """The runner of a command.

    Raises:
        UsageError: there is none, and something is said of it.
    """
    from dpstream.accounting.errors import UsageError
    from dpstream.pipelines.runners.bounded import Runner

    if name is None:
        if flags or parallelism > 1:
            raise UsageError("--runner", "is required with its flags", "name one, or omit them")
        return None
    return Runner(name, flags, parallelism)

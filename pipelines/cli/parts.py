"""Shared parts of the ``dpstream`` commands: options, help texts, jobs, signals, JSON, progress."""

import contextlib
import functools
import json
import os
import shlex
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn, TypeVar, cast

import click
from typing_extensions import override

from dpstream.accounting.extras import require

if TYPE_CHECKING:
    from dpstream.pipelines.ask.acceptance import Acceptance
    from dpstream.pipelines.jobs.job import Job
    from dpstream.pipelines.project.project import Project
    from dpstream.pipelines.runners.bounded import Runner
    from dpstream.state.ledger.open import AccountPlace

#: Of the names in what --json prints: another number means that some are gone or mean other things.
SCHEMA_VERSION = 1
AS_JSON = click.option("--json", "as_json", is_flag=True, help="Machine-readable output.")
ALLOW_LARGE_DELTA = click.option(
    "--allow-large-delta",
    is_flag=True,
    help="Allow a delta above 0.01, which is refused otherwise.",
)
FRESH = click.option(
    "--fresh", is_flag=True, help="Ask again, at a new charge, what was answered before."
)
AS_OF = click.option(
    "--as-of",
    default="",
    metavar="LABEL",
    help="Label of the state of the data, e.g. a date: the same question with another "
    "label is a new question, with a charge of its own.",
)
PROJECT = click.option(
    "--project",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="The project file.  [default: dpstream.toml here or in a parent]",
)
ENVIRONMENT = click.option(
    "--env", "environment", metavar="NAME", help="Use the places of [env.NAME]."
)
SETTINGS = click.option(
    "--set",
    "settings",
    multiple=True,
    metavar="FIELD=VALUE",
    help="Set another place, such as job.daily.store=daily.db; repeatable.",
)
#: Assumed numbers of units, records, keys: beyond any load, and figures of them stay in the range
#: of floats and of whole numbers of 64 bits.
MOST_ASSUMED = 10**15
COUNT = click.IntRange(1, MOST_ASSUMED)
Function = TypeVar("Function", bound=Callable[..., Any])


def examples(*lines: str) -> str:
    """Return examples for the end of a command's help, which are not re-wrapped."""
    return "\b\nExamples:\n" + "\n".join(f"  {line}" for line in lines)


def on_terminal() -> bool:
    """Return whether stdin is a terminal, so that questions can be asked."""
    return sys.stdin is not None and sys.stdin.isatty()  # none: its file was closed


class Chosen(NamedTuple):
    """The section of the project file that a command is called with.

    Attributes:
        name: the section's name; ``None``: the only one of its kind.
        project, environment, settings: values of ``--project``, ``--env`` and ``--set``.
        tries: values of ``plan --try``.
    """

    name: str | None
    project: Path | None = None
    environment: str | None = None
    settings: tuple[str, ...] = ()
    tries: tuple[str, ...] = ()

    def load(self) -> "Project":
        """Return the decoded project file, as `pipelines.project.project.load_project` does."""
        from dpstream.pipelines.project.project import load_project

        return load_project(self.project, self.environment, self.settings, self.tries)

    @property
    def flags(self) -> str:
        """The options in the form in which they are typed, with a leading space."""
        project = () if self.project is None else ("--project", str(self.project))
        environment = () if self.environment is None else ("--env", self.environment)
        settings = (word for setting in self.settings for word in ("--set", setting))
        words = shlex.join((*project, *environment, *settings))
        return f" {words}" if words else ""


def section(
    name: str, required: bool = False, metavar: str | None = None
) -> Callable[[Function], Function]:
    """Make the argument that names a section, and the options that locate the project file.

    Args:
        name: of the argument and of the function's parameter, which receives a `Chosen`.
        required: whether further arguments follow.
        metavar: how help writes the argument.
    """
    argument = click.argument(name, required=required, metavar=metavar)
    return _in_project(name, argument, _without_flag)


def _in_project(
    name: str,
    parameter: Callable[[Any], Any],
    read: Callable[[str | None], str | None] = lambda name: name,
) -> Callable[[Function], Function]:
    """Add a parameter and the options that locate the project file, which become a `Chosen`."""

    def apply(function: Function) -> Function:
        @functools.wraps(function)
        def chosen(
            project: Path | None,
            environment: str | None,
            settings: tuple[str, ...],
            **given: Any,
        ) -> Any:
            given[name] = Chosen(read(given[name]), project, environment, settings)
            return function(**given)

        return cast(Function, parameter(PROJECT(ENVIRONMENT(SETTINGS(chosen)))))

    return apply


def _without_flag(name: str | None) -> str | None:
    """Return the name; if it is a flag, pass it on to Beam and return ``None``.

    Click takes the first flag of Beam for the name where no name is given.
    """
    if name is None or not name.startswith("-"):
        return name
    click.get_current_context().args.insert(0, name)
    return None


def beam_flags(context: click.Context, runner: str) -> list[str]:
    """Return the words of the command line that pass through to Beam.

    Raises:
        UsageError: one is no flag; an option of the command may be meant.
    """
    if context.args:
        from dpstream.pipelines.runners.table import RUNNERS, refuse_unknown

        own = (name for option in context.command.params for name in option.opts)
        refuse_unknown(
            context.args,
            RUNNERS.get(runner, RUNNERS["DirectRunner"]).flags,
            [name for name in own if name[0] == "-"],
        )
    return context.args


#: The data set of a command, as a `Chosen`.
DATA_SET = _in_project(
    "data_set",
    click.option(
        "--data-set", metavar="NAME", help="Data set of the project file.  [default: the only one]"
    ),
)
#: The job of a command; without a name the only one of the project file.
JOB = section("job")


def load_job(job: Chosen, workload: bool = False) -> "Job":
    """Return the checked job; its module is imported here, because help does not need it."""
    from dpstream.pipelines.jobs import job as jobs

    return jobs.job_in(job.load(), job.name, workload)


def print_json(value: Any) -> None:
    """Print one line of JSON on stdout; an object gets the version of its names."""
    if isinstance(value, dict):
        value = {"schema_version": SCHEMA_VERSION} | value
    click.echo(json.dumps(value))


def print_figures(as_json: bool, figures: Any, text: str) -> None:
    """Print figures as `print_json` does, or their text."""
    if as_json:
        print_json(figures)
    else:
        click.echo(text, nl=not text.endswith("\n"))


def print_plan(
    as_json: bool,
    accepted: "Acceptance | None",
    verb: str,
    figures: Mapping[str, Any],
    text: str,
) -> NoReturn:
    """Print a plan below whether its command would be accepted; end with the refusal's exit code.

    Args:
        accepted: ``None``: that is no question, as of another job.
        verb: of the command, as "Can run".
        figures, text: of the plan, for ``--json`` and for people.
    """
    from dpstream.pipelines.render.account import acceptance_lines
    from dpstream.pipelines.render.layout import page

    first, code = list[str](), 0
    if accepted is not None:
        decided, code = accepted.as_dict(), accepted.exit_code
        warnings = [*figures.get("warnings", ()), *accepted.warnings]
        figures = {**figures, "acceptance": decided, "warnings": warnings}
        first = acceptance_lines(decided, verb, accepted.warnings)
    print_figures(as_json, figures, page(first) + text)
    click.get_current_context().exit(code)


def print_warnings(warnings: Iterable[str]) -> None:
    """Print each warning on a line of stderr, apart from the output.

    With --json nothing is printed: the warnings are part of the output.
    """
    if _as_json():
        return
    for warning in warnings:
        click.echo(f"Warning: {warning}", err=True)


def print_account(
    place: "AccountPlace | None", project: Path, environment: str | None = None
) -> None:
    """Print on stderr which account the command is about to charge; nothing with --json.

    Args:
        place: the account; ``None``: the job names none.
        project: the project file.
    """
    if _as_json():
        return
    from dpstream.pipelines.render.account import place_lines
    from dpstream.pipelines.render.layout import page
    from dpstream.state.ledger.open import file_of

    account = "" if place is None else place.path
    if place is not None and file_of(account) is not None:
        account = _from_here(account)
    data_set = None if place is None else place.data_set
    lines = place_lines(_from_here(project), environment, data_set, account)
    click.echo(page(lines), nl=False, err=True)


def _from_here(path: str | Path) -> str:
    """Return a path relative to the current folder, if it lies in it."""
    relative = os.path.relpath(path)
    return str(path) if relative.startswith(os.pardir) else relative


def _as_json() -> bool:
    """Whether the running command has --json: stderr has at most the object of an error then."""
    context = click.get_current_context(silent=True)
    return context is not None and bool(context.params.get("as_json"))


def print_charge(lines: Iterable[str], insecure: bool, warnings: Iterable[str] = ()) -> None:
    """Print on stderr what an answer was charged, warnings, and the mark of a test secret.

    Args:
        lines: `pipelines.render.account.charge_lines`.
    """
    from dpstream.pipelines.render.account import INSECURE

    for line in lines:
        click.echo(line, err=True)
    print_warnings(warnings)
    if insecure:
        click.echo(INSECURE, err=True)


def options(*decorators: Callable[[Function], Function]) -> Callable[[Function], Function]:
    """Combine several options into one decorator, in their order in the help."""

    def apply(function: Function) -> Function:
        for decorator in reversed(decorators):
            function = decorator(function)
        return function

    return apply


QUIET = click.option("--quiet", is_flag=True, help="No progress bar.")
TRY = click.option(
    "--try",
    "tries",
    multiple=True,
    metavar="FIELD=VALUE",
    help="Plan with another value of any field, such as job.daily.contributions=20 or "
    "census.persons.noise=rounded; repeatable.",
)
#: Of the commands whose questions end; see `runner_of`.
RUNNER = options(
    click.option("--runner", help="Beam runner whose workers answer.  [default: this process]"),
    click.option(
        "--parallelism",
        type=click.IntRange(1, 4096),
        default=1,
        help="Number of the runner's workers.",
    ),
    click.option(
        "--beam-flag",
        multiple=True,
        help="A flag of the runner, as --beam-flag=--NAME=VALUE; repeatable.",
    ),
)
#: Of the commands that make an account where none is chosen.
ACCOUNT = options(
    click.option(
        "--account",
        metavar="PATH",
        help="Path or URL of an existing account to charge.",
    ),
    click.option(
        "--new-account",
        is_flag=True,
        help="Make a new account: these are records about other people, or other records.",
    ),
)


class Commands(click.Group):
    """A group of commands whose help does not cut their descriptions off."""

    @override
    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        commands = sorted(self.commands.items())
        with formatter.section("Commands"):
            formatter.write_dl([(n, each.get_short_help_str(sys.maxsize)) for n, each in commands])


class ExtraGroup(Commands):
    """A group whose commands need an extra of the package; showing their help does not need it.

    Args:
        extra: the extra's name.
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
    """Yield an event that SIGINT and SIGTERM set while the block runs.

    Args:
        active: whether being stopped is the ordinary end; otherwise signals keep their effect.
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
    """A progress bar on stderr that counts public steps, never records.

    By default these are the steps of a run: windows x trigger times x shards.
    """

    hidden: bool
    what: str = "steps"

    def __enter__(self) -> "Bar":
        from rich import progress as shown
        from rich.console import Console

        console = Console(stderr=True)
        columns = (
            shown.TextColumn(self.what),
            shown.BarColumn(),
            shown.MofNCompleteColumn(),
            shown.TimeElapsedColumn(),
        )
        self._progress = shown.Progress(
            *columns,
            console=console,
            disable=self.hidden or not console.is_terminal,
            transient=True,
        )
        self._progress.start()
        self._task = self._progress.add_task(self.what, total=None)
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        """Remove the bar, so that other text may follow."""
        self._progress.stop()

    def update(self, done: int, total: int) -> None:
        """Show ``done`` of ``total`` steps; a total of 0 is unknown."""
        self._progress.update(self._task, completed=done, total=total or None)


def runner_of(name: str | None, parallelism: int, flags: tuple[str, ...]) -> "Runner | None":
    """Return the runner that a command's options describe; ``None`` without one.

    Raises:
        UsageError: there are flags for a runner, and no runner.
    """
    from dpstream.accounting.errors import UsageError
    from dpstream.pipelines.runners.bounded import Runner

    if name is None:
        if flags or parallelism > 1:
            raise UsageError("--runner", "is required with its flags", "name one, or omit them")
        return None
    return Runner(name, flags, parallelism)

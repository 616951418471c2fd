"""The command ``dpstream``: gathers the commands of this package, and turns errors into exit codes.

The exit code is that of the error's class (`accounting.errors`); 5: a release is overdue, or an
audit refutes the plan.  A coded error is printed as one line on stderr (JSON with ``--json``).  Of
any other error only the command and the class are printed, because its message may hold data.  Its
traceback is written to a private log (`state.private_log`), whose name is printed.
"""

import gc
import json
import logging
import os
import select
import sys
import threading
import warnings
from typing import Any

import click

from dpstream.accounting.errors import AccountWarning, DpstreamError, RunError, UsageError
from dpstream.accounting.extras import missing_extra
from dpstream.accounting.libraries import HIDDEN
from dpstream.pipelines.cli.account import account, secret
from dpstream.pipelines.cli.answer import answer
from dpstream.pipelines.cli.census import census
from dpstream.pipelines.cli.check import check, doctor
from dpstream.pipelines.cli.choose import choose
from dpstream.pipelines.cli.due import due
from dpstream.pipelines.cli.init import init
from dpstream.pipelines.cli.operate import folder, state
from dpstream.pipelines.cli.parts import SCHEMA_VERSION, examples, print_warnings
from dpstream.pipelines.cli.plan import plan
from dpstream.pipelines.cli.report import demo, report
from dpstream.pipelines.cli.run import run
from dpstream.pipelines.cli.sql import sql
from dpstream.pipelines.cli.table import tables
from dpstream.pipelines.cli.workload import workload
from dpstream.pipelines.runners.memory import share_one_heap
from dpstream.state.connecting import show_connecting
from dpstream.state.disk_errors import require_memory
from dpstream.state.private_log import keep_in, lost_connection, unexpected

#: The commands by what they are for, in the order in which a newcomer meets them.
GROUPS = {
    "Start": (init, check, plan, run, report, due, demo, doctor),
    "Ask": (sql, tables, workload, census, choose),
    "Account": (account, secret),
    "Operate": (state, folder),
}

#: Commands that read data, and words after which they only look at what is public.
_READS = frozenset(("check", "choose", "demo", "run", "table", "sql", "census", "workload"))
_READS_NOTHING = frozenset(("-h", "--help", "plan", "--dry-run"))


class Coded(click.Group):
    """A group of commands that ends with the exit code of an error, never with a traceback."""

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command; turn errors into one line and an exit code."""
        words = [*ctx.args]
        as_json = "--json" in words
        show_connecting(not as_json and "--quiet" not in words)
        keep_in(None)  # until the command knows its store or account
        try:
            return super().invoke(ctx)
        except click.UsageError as one:
            error = _all_missing(one, words)
            if not as_json:
                raise error from None
            option = _option_of(error)
            rule = error.format_message().rstrip(".").removeprefix(f"{option} ")
            coded: DpstreamError = UsageError(option, rule, _HELP)
        except (click.exceptions.Exit, click.ClickException):
            raise
        except DpstreamError as error:
            coded = error
        except BrokenPipeError as error:
            if _reader_left():  # `| head`: click ends the command without a message
                raise
            coded = unexpected(f"dpstream {ctx.invoked_subcommand}", error)
        except KeyboardInterrupt:
            again = "type it again: it continues what it has charged, at no further charge"
            coded = RunError("command", "was interrupted", again)
        except click.Abort:  # at a prompt
            coded = RunError("command", "was interrupted", "type it again")
        except Exception as error:
            stage = f"dpstream {ctx.invoked_subcommand}"
            absent = missing_extra(error, stage) if isinstance(error, ImportError) else None
            coded = absent or unexpected(stage, error)
        fields = {"schema_version": SCHEMA_VERSION} | coded.as_dict()
        text = json.dumps(fields) if as_json else f"{coded.kind}: {coded}"
        click.echo(text, err=True)
        ctx.exit(coded.exit_code)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the commands group by group."""
        width = max(len(name) for name in self.commands)
        for title, group in GROUPS.items():
            with formatter.section(title):
                lines = [(each.name or "", each.get_short_help_str(80)) for each in group]
                formatter.write_dl([(name.ljust(width), text) for name, text in lines])

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Look a command up; refuse it at once if there is too little memory to read data."""
        if args[:1] and args[0] in _READS and not _READS_NOTHING & {*args}:
            require_memory(f"dpstream {args[0]}")
        return super().resolve_command(ctx, args)


#: The fix of options that click refuses.
_HELP = "type the command with --help"


def _all_missing(error: click.UsageError, words: list[str]) -> click.UsageError:
    """Return an error of one missing option as that of all that are missing, with an example."""
    if not isinstance(error, click.MissingParameter) or error.ctx is None:
        return error
    command = error.ctx.command
    there = {word.partition("=")[0] for word in words}
    names = [
        each.opts[0]
        for each in command.params
        if each.required and isinstance(each, click.Option) and not there & {*each.opts}
    ]
    if isinstance(error.param, click.Argument):
        names.insert(0, error.param.human_readable_name)
    lines = (line.strip() for line in (command.epilog or "").splitlines())
    example = next((line for line in lines if line.startswith("dpstream ")), "")
    text = f"{', '.join(names)} must be given" + (f", as in `{example}`" if example else "")
    return click.BadOptionUsage(", ".join(names), text, error.ctx)


def _option_of(error: click.UsageError) -> str:
    """Return the option that click refuses, or the command."""
    if isinstance(error, click.BadParameter) and error.param is not None:
        return error.param.opts[0]
    return str(getattr(error, "option_name", None) or "command")


def _reader_left() -> bool:
    """Return whether whoever read this command's stdout has closed it."""
    poll = select.poll()
    poll.register(1, select.POLLOUT)
    return any(event & select.POLLERR for _, event in poll.poll(0))


@click.group(
    cls=Coded,
    epilog=examples("dpstream init visits.parquet", "dpstream plan visits", "dpstream run visits"),
    context_settings={"help_option_names": ["-h", "--help"]},
)
@click.version_option(package_name="dpstream")
def cli() -> None:
    """Differentially private streams: counts and sums per key, again and again as time passes,
    without revealing any user."""
    silence()


for commands in GROUPS.values():
    for command in commands:
        cli.add_command(command)
workload.add_command(answer)


def silence() -> None:
    """Keep Beam's logs and warnings off the terminal: they quote tracebacks."""
    logging.disable(logging.CRITICAL)
    warnings.simplefilter("ignore")
    warnings.simplefilter("default", AccountWarning)  # once, however often it is opened
    warnings.showwarning = _warn  # type: ignore[assignment]


def _warn(message: Warning | str, *_: object) -> None:
    """Print a library's message about an account, as any other warning."""
    print_warnings([str(message)])


def _print_thread_error(failed: threading.ExceptHookArgs) -> None:
    """Print the class of a failed thread's error, without its text, which may hold data.

    A thread that only lost the connection to an ended runner prints nothing, because the command
    reports that end.
    """
    error = failed.exc_value or failed.exc_type()
    if failed.exc_type is not SystemExit and not lost_connection(error):
        name = "" if failed.thread is None else failed.thread.name
        click.echo(f"failed: {unexpected(f'thread {name}', error)}", err=True)


def main() -> None:
    """Entry point of the console script."""
    share_one_heap()
    # Beam and Arrow import these where they are installed, and no command needs them: a third of a
    # CPU second.  A program that calls dpstream may need them.
    HIDDEN.update(("IPython", "apache_beam.io.gcp.bigquery", "pandas", "pymongo"))
    gc.set_threshold(500_000)  # new objects: more than all imports make
    threading.excepthook = _print_thread_error
    # Files that libraries make, as charts, are written by their owner alone too.
    os.umask(os.umask(0o077) | 0o022)
    try:
        cli(prog_name="dpstream")
    finally:
        # The interpreter would look through all that is loaded once more.  With DuckDB it has to:
        # its binding reports every object that is not collected as a leak.
        if "duckdb" not in sys.modules:
            gc.freeze()


if __name__ == "__main__":
    main()

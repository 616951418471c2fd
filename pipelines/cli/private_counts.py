"""Exact counts of private records: printed only with ``--operator`` or on a terminal.

A scheduler or a CI system stores what a command prints, where others can read it.  So the default
output (stdout, stderr and ``--json``) depends only on the arguments and on what was released: two
inputs that differ in one unit, or in refused rows, print the same except for released values.  Only
this module prints private counts; a test checks the source of the other commands.
"""

import sys
from collections.abc import Mapping
from typing import Any

import click

_REQUESTED = "dpstream.operator"


def _remember(ctx: click.Context, _: click.Parameter, value: bool) -> None:
    ctx.meta[_REQUESTED] = value


#: The option of every command that counts private records.
OPERATOR = click.option(
    "--operator",
    "show_private_counts",
    is_flag=True,
    expose_value=False,
    callback=_remember,
    help="Also show exact counts of private records; for the operator, not to be published.",
)


#: The first words of what is printed for the operator.
LABEL = "Operator only, do not publish:"


def requested() -> bool:
    """Return whether ``--operator`` was given to the running command."""
    return bool(click.get_current_context().meta.get(_REQUESTED))


def visible() -> bool:
    """Return whether stderr may show exact counts: with ``--operator``, or on a terminal."""
    return requested() or sys.stderr.isatty()


def echo_private(text: str) -> None:
    """Print a line on stderr for the operator, if exact counts may be printed."""
    if visible():
        click.echo(f"{LABEL} {text}", err=True)


def with_private(public: Mapping[str, Any], private: Mapping[str, Any]) -> dict[str, Any]:
    """Return an object for ``--json``; with ``--operator`` it gets ``operator_only``."""
    return {**public, "operator_only": dict(private)} if requested() else dict(public)

"""``options`` of a Kafka source or sink: settings of librdkafka, secrets by reference.

A literal secret would stand in the job file and be shipped to the workers with the pipeline, so
settings that hold one must name an environment variable: ``env:NAME``.
"""

import os
from collections.abc import Iterable, Mapping

from accounting.errors import UsageError

_ENV = "env:"
#: What the names of librdkafka's settings with secrets end in.
_SECRET = ("password", "passphrase", "secret", ".pem", "oauthbearer.config")


def check_options(table: str, options: Mapping[str, str], ours: Iterable[str]) -> None:
    """Refuse settings that a guarantee rests on, and secrets that are written out.

    Args:
        table: ``source`` or ``sink``, for the message.
        options: of the job.
        ours: names that dpstream sets.

    Raises:
        UsageError: names the option.
    """
    fixed = set(ours)
    for name, value in options.items():
        if name in fixed or name.startswith("log"):
            raise UsageError(f"{table}.options.{name}", "is set by dpstream", "remove it")
        if name.endswith(_SECRET) and not value.startswith(_ENV):
            raise UsageError(
                f"{table}.options.{name}",
                "is a secret, and a literal would travel with the pipeline",
                "write env:NAME and set that variable on the launcher and on every worker",
            )


def looked_up(table: str, options: Mapping[str, str]) -> dict[str, str]:
    """The settings with their secrets: never to be shown.

    Raises:
        UsageError: a variable is not set here.
    """
    found = {}
    for name, value in options.items():
        variable = value.removeprefix(_ENV)
        if variable != value and variable not in os.environ:
            raise UsageError(
                f"{table}.options.{name}",
                "names an environment variable that is not set",
                "set it on the launcher and on every worker",
            )
        found[name] = os.environ[variable] if variable != value else value
    return found

"""``options`` of a Kafka source or sink: settings of librdkafka, secrets by reference.

A literal secret would stand in the job file and be shipped to the workers with the pipeline, so
settings that hold one must name an environment variable: ``env:NAME``.  Settings that make the
client load code, run a command, or open files other than certificates are refused: whoever may
write a job's options must not get more than the job.
"""

import os
import re
from collections.abc import Iterable, Mapping

from dpstream.accounting.errors import UsageError

_ENV = "env:"
#: What the names of librdkafka's settings with secrets end in.
_SECRET = ("password", "passphrase", "secret", ".pem", "oauthbearer.config")
#: Files that a client may read.
CERTIFICATES = frozenset(
    f"{name}.location"
    for name in ("ssl.key", "ssl.certificate", "ssl.ca", "ssl.crl", "ssl.keystore", "https.ca")
)
#: Others that name files, and plugins, engines and providers, which are code.  Functions cannot be
#: given as text: the client refuses them.
_REACHING = re.compile(
    r".*\.(location|file|path|paths|cmd)|plugin\..*|ssl\.engine\..*|ssl\.providers"
    r"|offset\.store\.method"
)
#: Kerberos: the client runs ``kinit`` in a shell, with some of these settings in its line.
_KERBEROS = "sasl.kerberos."
_MECHANISMS = ("sasl.mechanism", "sasl.mechanisms")


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
        _refuse_reaching(table, name)
        if name.endswith(_SECRET) and not value.startswith(_ENV):
            raise UsageError(
                f"{table}.options.{name}",
                "is a secret, and a literal would travel with the pipeline",
                "write env:NAME and set that variable on the launcher and on every worker",
            )
    _refuse_kerberos(table, options)


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
    _refuse_kerberos(table, found)
    return found


def _refuse_reaching(table: str, name: str) -> None:
    """Refuse a setting that reaches beyond the connection."""
    if name not in CERTIFICATES and (name.startswith(_KERBEROS) or _REACHING.fullmatch(name)):
        raise UsageError(
            f"{table}.options.{name}",
            "would load code, run a command or open files of this machine",
            "remove it; certificates go into ssl.*.location",
        )


def _refuse_kerberos(table: str, options: Mapping[str, str]) -> None:
    """Refuse the mechanism that runs a command; it is what the client takes if none is named."""
    protocol = options.get("security.protocol", "").upper()
    named = [name for name in _MECHANISMS if name in options]
    asked = protocol.startswith("SASL") and not named
    if asked or any(options[name].upper() == "GSSAPI" for name in named):
        raise UsageError(
            f"{table}.options.sasl.mechanism",
            "must be named, and not GSSAPI, which runs a command",
            "use PLAIN, SCRAM-SHA-256, SCRAM-SHA-512 or OAUTHBEARER",
        )

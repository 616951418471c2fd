"""What the clients of Google's services share: their absence, what is tried again, their errors."""

import importlib
from typing import Any

from dpstream.accounting.errors import RunError, UsageError
from dpstream.state.google_errors import may_pass

#: Looking at the place when a run begins: nothing is lost by giving up early.
LOOK_SECONDS = 30.0
_ERRORS = "google.api_core.exceptions"


def imported(kind: str, module: str, field: str = "sink.kind") -> Any:
    """A service's client, with what its errors are made of.

    Args:
        kind: of the sink, by which its packages are installed.
        module: the client's.
        field: that names the kind, for the error.

    Raises:
        UsageError: they are not installed.
    """
    try:
        importlib.import_module(_ERRORS)
        return importlib.import_module(module)
    except ImportError:
        raise UsageError(
            field, f"'{kind}' needs its client", f"pip install 'dpstream[{kind}]'"
        ) from None


def retry(seconds: float) -> Any:
    """What may pass is tried again for so long, at most ten seconds apart."""
    from google.api_core.retry import Retry

    return Retry(predicate=may_pass(), initial=0.1, maximum=10.0, multiplier=1.5, timeout=seconds)


def failed(field: str, error: BaseException | None, what: str) -> RunError:
    """The class of a client's error only: its text can quote what was sent."""
    fix = "check the place and the account's rights, then run again"
    if field.startswith("sink."):
        fix += ": the store has every release"
    return RunError(field, f"{what}: {type(error).__name__}", fix)

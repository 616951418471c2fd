"""Fixed run ids, for tests whose released bytes are compared with other ones."""

import contextlib
import itertools
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from unittest import mock

from dpstream.state import run_ids


@contextlib.contextmanager
def fixed_run_ids(draw: Callable[[], str] | None = None) -> Iterator[None]:
    """Every run id that this process draws is given here.

    Args:
        draw: gives the next one; by default 1, 2, 3, .. as 128-bit numbers.
    """
    numbers = itertools.count(1)
    ours = draw or (lambda: f"{next(numbers):032x}")
    with mock.patch.object(run_ids, "secrets", SimpleNamespace(token_hex=lambda _: ours())):
        yield

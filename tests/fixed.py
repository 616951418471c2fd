"""Fixed run ids, for tests whose released bytes are compared with other ones, and noise that stays
the same when the exact numbers change, for tests of sensitivity and of laws."""

import contextlib
import itertools
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from types import SimpleNamespace
from unittest import mock

from dpstream.dp_transforms.noise.inputs import InputDigest
from dpstream.pipelines.connectors import input_files
from dpstream.pipelines.formats import receipt
from dpstream.state.ledger import contract, events

#: A digest of exact numbers, for tests that draw by name and have none.
INPUTS = bytes(range(16))


@contextlib.contextmanager
def fixed_run_ids(draw: Callable[[], str] | None = None) -> Iterator[None]:
    """Every run id that this process draws is given here, and every answer has one date.

    Args:
        draw: gives the next one; by default 1, 2, 3, .. as 128-bit numbers.
    """
    numbers = itertools.count(1)
    ours = draw or (lambda: f"{next(numbers):032x}")
    drawn = SimpleNamespace(token_hex=lambda _: ours())
    with fixed_date(), mock.patch.object(events, "secrets", drawn):
        yield


@contextlib.contextmanager
def fixed_date() -> Iterator[None]:
    """Every answer, every charge and every run's end of this process has one date."""
    clock = SimpleNamespace(now=lambda zone: datetime(2024, 1, 5, tzinfo=zone))
    instant = int(clock.now(UTC).timestamp() * 1e6)
    with (
        mock.patch.object(receipt, "datetime", clock),
        mock.patch.object(contract, "now_micros", lambda: instant),
        mock.patch.object(input_files, "now_micros", lambda: instant),
    ):
        yield


@contextlib.contextmanager
def held_noise() -> Iterator[None]:
    """Give all numbers one digest: the answers of two inputs of a run then have the same noise, and
    their difference is the exact one."""
    with mock.patch.object(InputDigest, "value", property(lambda _: bytes(16))):
        yield

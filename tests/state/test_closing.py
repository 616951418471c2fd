"""A context is closed whether its block succeeds or fails."""

import pytest

from dpstream.state.closing import Closing


class Counted(Closing):
    def __init__(self) -> None:
        self.closed = 0

    def close(self) -> None:
        self.closed += 1


def test_it_is_closed_once_by_its_block() -> None:
    with Counted() as counted:
        assert counted.closed == 0
    assert counted.closed == 1


def test_it_is_closed_where_the_block_fails_and_the_error_goes_on() -> None:
    counted = Counted()
    with pytest.raises(KeyError), counted:
        raise KeyError
    assert counted.closed == 1


def test_what_cannot_be_closed_cannot_be_made() -> None:
    with pytest.raises(TypeError):
        type("Open", (Closing,), {})()

"""Readers that are kept between bundles: one caller each, as many as may wait, none for ever."""

import pytest

from dpstream.pipelines.connectors import unbounded
from dpstream.pipelines.connectors.unbounded import ReaderPool


class Counted:
    """A reader that knows whether it is closed."""

    made: list["Counted"]

    def __init__(self) -> None:
        self.used, self.closed = 0.0, False
        self.made.append(self)

    def close(self) -> None:
        self.closed = True


@pytest.fixture(autouse=True)
def none_made() -> None:
    Counted.made = []


def test_a_reader_has_one_caller_and_goes_on() -> None:
    readers = ReaderPool[Counted]()
    with readers.lend("a", Counted) as first, readers.lend("a", Counted) as second:
        assert first is not second
    with readers.lend("b", Counted) as other, readers.lend("a", Counted) as again:
        assert again in (first, second) and other not in (first, second)
    assert len(Counted.made) == 3 and not any(reader.closed for reader in Counted.made)


def test_one_that_fails_is_not_used_again() -> None:
    readers = ReaderPool[Counted]()
    with pytest.raises(ValueError), readers.lend("a", Counted) as first:
        raise ValueError
    with readers.lend("a", Counted) as second:
        assert first.closed and second is not first


def test_no_more_are_kept_than_may_wait() -> None:
    """What waits in a second reader of the same would come late."""
    readers = ReaderPool[Counted](keep=1)
    with readers.lend("a", Counted), readers.lend("a", Counted):
        pass
    assert [reader.closed for reader in Counted.made].count(False) == 1
    with readers.lend("a", Counted) as lent_reader:
        assert not lent_reader.closed and len(Counted.made) == 2


def test_unused_ones_are_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    readers = ReaderPool[Counted]()
    with readers.lend("a", Counted) as first:
        pass
    with readers.lend("b", Counted):
        assert not first.closed
    monkeypatch.setattr(unbounded, "UNUSED_SECONDS", -1.0)
    with readers.lend("c", Counted):
        assert first.closed
    with readers.lend("a", Counted) as second:
        assert second is not first
    readers.close()
    assert all(reader.closed for reader in Counted.made)

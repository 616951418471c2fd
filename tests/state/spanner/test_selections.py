"""Rows of what tests selected: numbers that no two commits share, large steps in parts."""

from unittest import mock

import pytest

from dpstream.state.spanner import store as spanner_store
from dpstream.state.spanner.selections import COPIED, piece_of
from tests.state.conformance import Bench, ids, log_of, named, take_step


def test_numbers_keep_windows_and_copies_apart() -> None:
    numbers = [
        piece_of(window, number)
        for window in (0, 1, (1 << 31) - 1)
        for number in (0, 5 << 12, (5 << 12) + 4095, COPIED, (1 << 32) - 1)
    ]
    assert numbers == sorted(set(numbers)) and numbers[-1] < 1 << 63


def test_a_step_in_parts_notes_each_key_once(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Cut short after some commits: a key is in the log when it has taken its step."""
    monkeypatch.setattr("dpstream.state.spanner.commits.COMMIT_MUTATIONS", 60)
    store, keys = bench.open(), list(range(12))
    real, left = spanner_store.SpannerStore._commit, [2]

    def dies(self: object, *rest: object) -> None:
        left[0] -= 1
        if left[0] < 0:
            raise InterruptedError
        real(self, *rest)  # type: ignore[arg-type]

    cut = mock.patch.object(spanner_store.SpannerStore, "_commit", dies)
    with cut, pytest.raises(InterruptedError):
        take_step(store, 1, keys, 1, selected=keys)
    there = log_of(bench.open())
    noted = sorted(key for _, _, selected_keys in there for key in selected_keys)
    assert noted and len(noted) < 12
    again = bench.open()
    states = again.key_shard(0, 0)
    again.load_keys(0, 0, 1, states, ids(keys))
    done = {int(k) for k in states.table.ids[states.done[: states.size].nonzero()[0], 0]}
    assert noted == named(*done)
    rest = [key for key in keys if key not in done]
    again.forget(0, 0)
    take_step(again, 1, rest, 1, selected=rest)
    assert sorted(
        k for _, _, selected_keys in log_of(bench.open()) for k in selected_keys
    ) == named(*keys)

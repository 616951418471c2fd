"""Memory of a run: what the program around it has decided stays (see also tests/runners)."""

import gc

import pytest

from dpstream.pipelines.runners import memory
from dpstream.pipelines.runners.memory import sparing_memory

pytestmark = pytest.mark.usefixtures("unfrozen")


@pytest.mark.parametrize("name", ["", *memory._SET])
def test_who_has_set_the_allocator_has_decided(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for other in memory._SET:
        monkeypatch.delenv(other, raising=False)
    if name:
        monkeypatch.setenv(name, "1")
    calls: list[bool] = []
    monkeypatch.setattr(memory, "_keep_freed", lambda: calls.append(True))
    with sparing_memory():
        assert gc.get_freeze_count() > 0
    assert gc.get_freeze_count() == 0
    assert calls == ([] if name else [True])


def test_objects_frozen_by_others_stay_so() -> None:
    gc.freeze()
    try:
        with sparing_memory():
            pass
        assert gc.get_freeze_count() > 0
    finally:
        gc.unfreeze()

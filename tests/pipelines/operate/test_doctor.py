"""What a machine can run: versions by name, faults in words, no path."""

import pytest

from dpstream.pipelines.operate import doctor
from dpstream.pipelines.operate.doctor import examine, installed


def test_versions_and_what_is_missing() -> None:
    assert (installed("numpy") or "").count(".") >= 1
    assert installed("no-such-package-at-all") is None


def test_what_is_missing_is_a_fault_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "PACKAGES", ("numpy", "no-such-package"))
    found = examine()
    assert not found["ready"] and "missing packages: no-such-package" in found["verdict"][0]
    monkeypatch.setattr(doctor, "PACKAGES", ("numpy",))
    found = examine()
    assert found["ready"] and found["disk"]["fsync"] and "/" not in found["verdict"][0]


def test_each_fix_is_of_something_that_is_looked_for() -> None:
    found = examine()
    assert set(doctor.HOW) <= {*found["runners"], *found["emulators"]}

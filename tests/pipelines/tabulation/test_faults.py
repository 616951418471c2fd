"""Faults name places and rules, never values."""

import numpy as np
import pytest

from dpstream.accounting.errors import UsageError
from dpstream.pipelines.tabulation.faults import MAX_LISTED, Fault, Faults, refuse


def test_a_fault_says_where_what_and_how() -> None:
    faults = Faults("GRF-C.txt")
    faults.rows(
        np.array([False, True]), np.array([2, 3]), "TABBLK", "is not 4 digits", "correct it"
    )
    [fault] = faults.faults
    assert str(fault) == "GRF-C.txt, row 3, TABBLK: is not 4 digits. Fix: correct it."
    assert fault.as_dict()["row"] == 3
    assert str(Fault("config.json", None, "", "is missing", "add it")).startswith("config.json: is")


def test_very_many_are_counted() -> None:
    faults = Faults("x")
    many = MAX_LISTED + 7
    faults.rows(np.ones(many, np.bool_), np.arange(many), "A", "is wrong", "correct it")
    assert len(faults.faults) == MAX_LISTED + 1
    assert faults.faults[-1].row is None and "7 more rows" in faults.faults[-1].rule


def test_a_refusal_shows_the_first_and_counts_the_others() -> None:
    refuse([])
    one = Fault("config.json", None, "run_us", "is required", "add it")
    with pytest.raises(UsageError, match=r"^config.json run_us: is required. Fix: add it.$"):
        refuse([one])
    with pytest.raises(UsageError, match=r"\(2 faults\). Fix: add it; `dpstream census validate"):
        refuse([one, Fault("GRF-C.txt", 2, "", "", "")])

"""Coded errors: a field, a rule and a fix, for people, machines and other processes."""

import pytest

from dpstream.accounting.errors import (
    DpstreamError,
    InvariantError,
    PolicyError,
    RunError,
    UsageError,
    closest,
    column_list,
    instance,
    required,
)


def test_errors_travel_between_processes() -> None:
    import pickle

    error = UsageError("a.b", "rule", "fix")
    copy = pickle.loads(pickle.dumps(error))  # noqa: S301
    assert isinstance(copy, DpstreamError)
    assert copy.as_dict() == error.as_dict() and str(copy) == "a.b: rule. Fix: fix."
    assert error.as_dict() == {
        "error": "usage", "exit_code": 2, "field": "a.b", "rule": "rule", "fix": "fix",
    }  # fmt: skip


def test_a_near_name_is_suggested_and_the_others_are_listed() -> None:
    fix = "did you mean 'epsilon'? known here: delta, epsilon"
    assert closest("epsilom", ["epsilon", "delta"]) == fix
    assert closest("zzz", ["b", "a"]) == "known here: a, b"
    assert column_list(["Patient ID", "ward", "", "a\nb", "x" * 101]) == "'Patient ID', ward"
    assert column_list(f"c{n}" for n in range(60)).endswith("c49, ...")
    assert closest("zzz", []) == "known here: none"
    assert closest("zzz", (f"c{k:04}" for k in range(1_050))).endswith("c0049, and 1,000 more")


@pytest.mark.parametrize(
    ("kind", "code", "word"),
    [(UsageError, 2, "usage"), (PolicyError, 3, "refused"), (RunError, 4, "failed")],
)
def test_scripts_tell_them_apart_by_exit_code_and_word(
    kind: type[DpstreamError], code: int, word: str
) -> None:
    error = kind("store", "is busy", "wait")
    assert error.exit_code == code and error.as_dict()["exit_code"] == code
    assert error.as_dict()["error"] == word
    assert isinstance(error, DpstreamError) and (error.field, error.rule, error.fix) == (
        "store", "is busy", "wait",
    )  # fmt: skip


def test_values_that_must_be_there_and_of_a_kind() -> None:
    assert required(0, "a number is there") == 0 and instance(True, int) is True
    with pytest.raises(InvariantError, match="a number is there"):
        required(None, "a number is there")
    with pytest.raises(InvariantError, match="str is no int"):
        instance("1", int)

"""Which noise a question about a table takes, and what its account keeps of the choice."""

from pathlib import Path
from typing import Any

import pytest

import dpstream
from dpstream.accounting.errors import UsageError
from dpstream.pipelines.frames import answer as module
from tests.pipelines.frames.visits import account, visits
from tests.pipelines.stream.test_begin import CutOff, cut_off

TABLE = visits()
ONE: dict[str, Any] = {
    "unit": "user", "key": "page", "public_keys": ["p0", "p1"], "max_keys": 1, "epsilon": 1.0,
}  # fmt: skip


def sds(plan: Any) -> dict[str, tuple[Any, int | None]]:
    """sd of the first part, and how many such questions the limit allows, by family."""
    return {
        row["mechanism"]: (row["columns"][0]["parts"][0]["sd"], row["questions"])
        for row in plan.families
    }


@pytest.mark.parametrize(
    ("given", "gaussian", "geometric"),
    [({}, 5.503, 1.357), ({"max_keys": 8}, 15.55, 11.31), ({"epsilon": 6.0}, 1.066, 0.0706)],
    ids=["one key", "eight keys", "epsilon 6"],
)
def test_without_an_account_the_answer_alone_is_compared(
    given: dict[str, Any], gaussian: float, geometric: float
) -> None:
    plan = dpstream.plan("histogram", TABLE, **ONE | given)
    assert sds(plan)["gaussian"] == (pytest.approx(gaussian, rel=1e-3), None)
    assert sds(plan)["geometric"] == (pytest.approx(geometric, rel=1e-3), None)
    assert plan.cost is not None and plan.cost["mu"] is None and plan.cost["delta"] == 0
    answer = dpstream.histogram(TABLE, **ONE | given)
    assert answer.table["units_sd"][0].as_py() == pytest.approx(geometric, rel=1e-3)
    assert answer.table.schema.metadata[b"dpstream.mechanism"] == b"geometric"
    assert answer.header.mu is None and answer.delta == 0


def test_a_family_that_is_asked_for_is_taken() -> None:
    for mechanism, sd in (("gaussian", 5.503), ("geometric", 1.357)):
        answer = dpstream.histogram(TABLE, **ONE, mechanism=mechanism)  # type: ignore[arg-type]
        assert answer.table["units_sd"][0].as_py() == pytest.approx(sd, rel=1e-3)
    selected = dpstream.count(TABLE, unit="user", key="page", epsilon=4.0, mechanism="geometric")
    assert selected.header.mu is None and selected.delta == 1e-9 and len(selected) > 3


@pytest.mark.parametrize(
    ("given", "field"),
    [({"mechanism": "laplace"}, "mechanism"), ({"mechanism": None}, "mechanism"),
     ({"optimise": "both"}, "optimise"), ({"optimise": "limit"}, "optimise"),
     ({"mechanism": "gaussian", "delta": 0}, "mechanism")],
)  # fmt: skip
def test_refused(given: dict[str, Any], field: str) -> None:
    with pytest.raises(UsageError) as error:
        dpstream.histogram(TABLE, **ONE | given)
    assert error.value.field == field
    refusal = dpstream.plan("histogram", TABLE, **ONE | given).refusal
    assert refusal is not None and refusal.as_dict() == error.value.as_dict()


def test_with_an_account_the_limit_is_shared(tmp_path: Path) -> None:
    paid = account(tmp_path, epsilon=8.0)
    plan = dpstream.plan("histogram", TABLE, **ONE, **paid)
    assert {name: row[1] for name, row in sds(plan).items()} == {"gaussian": 76, "geometric": 8}
    assert plan.cost is not None and plan.cost["mu"] is not None
    assert "76 such questions" in repr(plan) and "8 such questions" in repr(plan)
    answer = dpstream.histogram(TABLE, **ONE, **paid)
    assert answer.header.mu == plan.cost["mu"]
    after = dpstream.plan("histogram", TABLE, **ONE | {"epsilon": 1.5}, **paid)
    assert sds(dpstream.plan("histogram", TABLE, **ONE, **paid, fresh=True))["gaussian"][1] == 75
    assert after.accepted
    # Another way to choose is another question.
    alone = dpstream.histogram(TABLE, **ONE, **paid, optimise="answer")
    assert alone.charged and alone.header.mu is None
    assert alone.table["units_sd"][0].as_py() == pytest.approx(1.357, rel=1e-3)


def test_the_charge_fixes_the_family(tmp_path: Path) -> None:
    """What was cut off goes on with the noise that was charged, whatever a new one would take."""
    paid, large = account(tmp_path, epsilon=8.0), ONE | {"epsilon": 7.9, "max_keys": 8}
    with cut_off(module, "_drawn", 1, False), pytest.raises(CutOff):
        dpstream.histogram(TABLE, **large, **paid)
    account(tmp_path, epsilon=100.0)  # of which a question takes a small share
    for label, mechanism in (("later", "gaussian"), ("", "geometric")):
        plan = dpstream.plan("histogram", TABLE, **large, **paid, as_of=label)
        assert [row["mechanism"] for row in plan.families if row["taken"]] == [mechanism]
        assert plan.cost is not None and (plan.cost["mu"] is None) is (mechanism == "geometric")
        assert plan.accepted and (plan.charge is None) is (label == "")
    answer = dpstream.histogram(TABLE, **large, **paid)
    assert not answer.charged and answer.header.mu is None
    assert answer.table["units_sd"][0].as_py() == pytest.approx(1.3755, rel=1e-3)

"""What an account accepts, was charged and has left, as text."""

import math
from typing import Any

import pytest

from dpstream.pipelines.render.account import (
    acceptance_lines,
    accepted_lines,
    budget_text,
    charge_lines,
    place_lines,
    points_text,
    run_lines,
    view_text,
)

ACCOUNT: dict[str, Any] = {
    "data_set": "shop", "charges": 1, "used": 0.12345, "with_this": 0.25, "more": 3,
    "counted_as": 1, "filter": "plain", "period": None, "person": None,
    "limit": {"epsilon": 8.0, "delta": 1e-5},
}  # fmt: skip
ACCEPTED: dict[str, Any] = {
    "accepted": True, "refusal": None, "charged": {"epsilon": 1.0, "delta": 1e-9}, "run_id": None,
    "answered": False, "account": ACCOUNT,
}  # fmt: skip
REFUSED = ACCEPTED | {
    "accepted": False, "charged": None, "account": None,
    "refusal": {"field": "store", "rule": "is missing", "fix": "name one"},
}  # fmt: skip


def test_what_would_be_accepted() -> None:
    first, account, warning = acceptance_lines(ACCEPTED, "Can ask", ["weak"])
    assert first == "Can ask     yes: (1, 1e-09) would be charged before a record is read"
    assert account == (
        "Account     shop: 1 charge used 12.4% of epsilon 8 at delta 1e-05, 25% after this one, "
        "then room for 3 like it (filter: sum of epsilons)"
    )
    assert warning == "Warning     weak"
    free = accepted_lines(ACCEPTED | {"charged": None}, "Can run")
    assert free == ["Can run     yes: nothing more is charged"]
    [resumed] = accepted_lines(ACCEPTED | {"charged": None, "run_id": "ab"}, "Can run")
    assert resumed == "Can run     yes: run ab continues, and nothing more is charged"
    [again] = accepted_lines(ACCEPTED | {"run_id": "ab", "answered": True}, "Can ask")
    assert "run ab" in again and again.endswith("no further charge")


def test_a_refusal_has_its_fix_and_no_account() -> None:
    assert acceptance_lines(REFUSED) == [
        "Can run     NO. store: is missing", "            Fix: name one",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("with_this", "words"),
    [(None, "epsilon 8 at delta 1e-05"), (math.inf, "more than all after this one")],
)
def test_what_an_account_would_have_spent(with_this: float | None, words: str) -> None:
    account = ACCOUNT | {"with_this": with_this, "charges": 2_000, "filter": None}
    line = acceptance_lines(ACCEPTED | {"account": account})[1]
    assert words in line and "2,000 charges" in line
    line = acceptance_lines(ACCEPTED | {"account": ACCOUNT | {"counted_as": 2}})[1]
    assert "25% after this one, which counts 2 times, then" in line


def test_without_an_account_it_says_what_is_missing() -> None:
    [_, account] = acceptance_lines(ACCEPTED | {"account": None})
    assert account.startswith("Account     none")


def test_what_was_charged_now_or_before() -> None:
    cost = "(1, 1e-09) per unit"
    assert charge_lines(cost, True, "ab") == [f"Charged {cost}; run ab"]
    before, how = charge_lines(cost, False, "ab", "2024-01-01T00:00:00Z")
    assert before == f"Charged before {cost}; first answered 2024-01-01T00:00:00Z"
    assert "--fresh" in how and "--as-of" in how
    assert charge_lines(cost, False, "ab")[0] == f"Charged before {cost}; run ab"
    assert charge_lines(cost, None, "ab") == [f"Costs {cost}, no account adds it up; run ab"]
    assert run_lines(cost, True, "ab") == [f"Costs {cost}, charged once; run ab"]


def test_project_environment_and_account_are_named() -> None:
    assert place_lines("dpstream.toml", "prod", "shop", "shop.account.db") == [
        "Project     dpstream.toml, environment prod", "Account     shop (shop.account.db)",
    ]  # fmt: skip
    project, account = place_lines("a/dpstream.toml", None, None, "")
    assert project == "Project     a/dpstream.toml" and account.startswith("Account     none")


def test_a_charge_that_only_its_own_guarantee_fits_says_that_nothing_may_follow() -> None:
    account = ACCOUNT | {"with_this": 1.0, "filter": "first", "more": 0}
    [_, line] = acceptance_lines(ACCEPTED | {"account": account})
    assert line.endswith("every later one is refused")
    account = ACCOUNT | {"filter": "renyi", "more": 0}
    [_, line] = acceptance_lines(ACCEPTED | {"account": account})
    assert line.endswith("then no more like it (filter: Renyi divergence)")


LEFT = {"epsilon": 1.0, "mu": 0.3, "rho": 0.05, "delta": 4e-6}


def test_what_is_left() -> None:
    figures = ACCOUNT | {
        "unit": "user", "spent": {"epsilon": 7.0000001, "delta": 1e-5}, "used": 0.51234,
        "left": LEFT, "warnings": ["weak"],
    }  # fmt: skip
    assert budget_text(figures).splitlines() == [
        "Data set    shop, unit user, 1 charge",
        "Limit       epsilon 8 at delta 1e-05 per unit",
        "Spent       51.3% of the limit; epsilon 7.00001 at delta 1e-05 per unit, for charges "
        "fixed beforehand",
        "Left        a plain epsilon 1, Gaussian noise of mu 0.3, or zCDP of rho 0.05; thresholds "
        "of delta 4e-06",
        "Warning     weak",
    ]


def test_events_are_listed_in_order() -> None:
    charge = {
        "event": "charge", "kind": "stream", "run_id": "ab", "epoch": 1, "epsilon": 1.0,
        "delta": 1e-9, "mu": 0.21291, "rho": None, "counted_as": 1, "at": "2024-01-01T00:00:00Z",
    }  # fmt: skip
    events: list[dict[str, Any]] = [
        {"event": "created", "limit": [8.0, 1e-5]}, charge, {"event": "receipt", "run_id": "ab"},
        {"event": "limit", "limit": [9.0, 1e-5]}, {"event": "closed", "run_ids": ["ab", "cd"]},
        {"event": "widened", "old": "m1", "new": "m2"}, {"event": "table", "id": "t"},
        {"event": "created", "limit": None},
    ]  # fmt: skip
    figures = {
        "id": "a7", "data_set": "shop", "unit": {"text": "user (string), all records"},
        "entries": [{"seq": n, **event} for n, event in enumerate(events)],
        "spent": {"epsilon": None, "delta": 1e-5}, "limit": None, "left": None, "warnings": [],
    }  # fmt: skip
    assert view_text(figures).splitlines() == [
        "Account     a7", "Data set    shop", "Unit        user (string), all records",
        "      0     created  limit epsilon 8, delta 1e-05",
        "      1     stream   ab epoch 1  2024-01-01T00:00:00Z  (1, 1e-09), mu 0.213",
        "      2     answered ab",
        "      3     limit    limit epsilon 9, delta 1e-05",
        "      4     closed   ab, cd",
        "      5     widened  table model m1 into m2",
        "      6     table    t",
        "      7     created",
        "Spent       more than any epsilon at delta 1e-05 per unit, for charges fixed beforehand",
        "Limit       none: each record has a budget of its own",
    ]  # fmt: skip


def test_what_points_have_spent() -> None:
    part = {
        "most_spent": 0.75, "least_spent": 0.0, "most_initial": 2.0, "regions": 1,
        "rows": [{"where": "a = 1", "spent": 0.75}, {"where": "a = 2", "spent": None}],
    }  # fmt: skip
    quota = {"analyst": "alice", "quota": 1.0, "most_charged": 0.5}
    figures = {
        "table": "rides", "data_set": "taxis", "unit": "one record", "entries": 3,
        "budgets": {"epsilon": part}, "quotas": {"epsilon": quota},
    }  # fmt: skip
    assert points_text(figures).splitlines() == [
        "Table       rides, data set taxis, unit one record",
        "Entries     3",
        "epsilon     spent by a point at most 0.75, at least 0, of initial budgets up to 2; in 1 "
        "region",
        "                  0.75  where a = 1",
        "                closed  where a = 2",
        "Quota       alice: epsilon 1 of a point, charged to one at most 0.5",
    ]

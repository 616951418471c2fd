"""The state: nothing spent, what is most, and which arrays are one.

Decisions against all points of a small space.

The account of regions against one of every point, over many queries, and its cap.
"""

from typing import Any

import numpy as np
import pytest

from dpstream.accounting.arrays import Int64
from dpstream.accounting.regions import space
from dpstream.accounting.regions import spent as charging
from dpstream.accounting.regions import spent as coarsening
from dpstream.accounting.regions import spent as spending
from dpstream.accounting.regions.amounts import CLOSED, MICRO, MOST
from dpstream.accounting.regions.boxes import disjoint
from dpstream.accounting.regions.space import Budget, Integer, Space
from dpstream.accounting.regions.spent import (
    Own,
    Spent,
    charge,
    closable,
    close,
    decide,
    outward,
    restored,
    snapped,
    untouched,
)
from tests.accounting.regions.spaces import (
    amounts_of,
    ask,
    members,
    small,
    some_box,
    some_boxes,
    wide,
)  # fmt: skip
from tests.golden.refusals import Refused


def sample_spent() -> Spent:
    """A state of several boxes."""
    spent, rng = untouched(small(), "epsilon"), np.random.default_rng(0)
    for amount in (1, 2, 3, 1):
        spent = charge(spent, some_boxes(rng, spent.space.sizes), amount)
    assert len(spent.boxes) > 5
    return spent


def test_most_in_boxes(refused: Refused) -> None:
    spent, rng = sample_spent(), np.random.default_rng(1)
    for _ in range(50):
        boxes = some_boxes(rng, spent.space.sizes)
        inside = members(boxes, spent.space.sizes)
        assert spent.most_in(boxes) == amounts_of(spent)[inside].max()
    refused(lambda: spent.most_in(boxes[:0]))


def without_last(boxes: Any, amounts: Any) -> Any:
    return boxes[:-1], amounts[:-1]


def doubled(boxes: Any, amounts: Any) -> Any:
    """As many points as the space has, one of them twice and one never."""
    boxes = np.concatenate([boxes, boxes[:1]])
    return boxes, np.concatenate([amounts, amounts[:1]])


def exchanged(boxes: Any, amounts: Any) -> Any:
    """As many points, but two boxes of one size lie on each other."""
    size = (boxes[:, :, 1] - boxes[:, :, 0]).prod(axis=1)
    one = int(np.argmin(size))
    boxes = boxes.copy()
    other = next(n for n in range(len(boxes)) if n != one and size[n] == size[one])
    boxes[other] = boxes[one]
    return boxes, amounts


@pytest.mark.parametrize("broken", [
    without_last, doubled, exchanged,
    lambda b, a: (b.astype(float), a), lambda b, a: (b, a.astype(float)),
    lambda b, a: (b, a[:-1]), lambda b, a: (b[:, :2], a), lambda b, a: (b, a - 100),
    lambda b, a: (b, a + (1 << 62)), lambda b, a: (b[:, :, ::-1], a), lambda b, a: (b + 1, a),
    lambda b, a: (np.concatenate([b] * 40), np.concatenate([a] * 40)),
])  # fmt: skip
def test_arrays_that_are_no_state_are_refused(broken: Any, refused: Refused) -> None:
    spent = sample_spent()
    boxes, amounts = broken(np.array(spent.boxes), np.array(spent.amounts))
    refused(lambda: restored(spent.space, "epsilon", boxes, amounts, 400))


@pytest.mark.parametrize("cap", [0, -1, 100_001])
def test_caps_that_are_none(cap: int, refused: Refused) -> None:
    refused(lambda: untouched(small(), "epsilon", cap))


def test_a_kind_that_records_do_not_have_is_refused(refused: Refused) -> None:
    refused(lambda: untouched(small(), "rho"))


def test_every_asked_point_is_in_the_snapped_boxes() -> None:
    rng = np.random.default_rng(0)
    space = small(grid=4)
    for _ in range(100):
        boxes = some_boxes(rng, space.sizes, 6)
        snapped_boxes = snapped(space, boxes)
        assert disjoint(snapped_boxes)
        inside = members(boxes, space.sizes)
        charged = members(snapped_boxes, space.sizes)
        assert (charged | ~inside).all()
        for edges in snapped_boxes:
            assert set(edges[0].tolist()) <= {0, 4, 6, 7}
        # No cell that no asked box has a point in.
        for low, high in ((0, 4), (4, 6), (6, 7)):
            met = inside[low:high].any(axis=0)
            assert (charged[low:high] == met).all()


def inward(space: Space, boxes: Int64) -> Int64:
    """Sabotaged: edges move to the grid line inside."""
    snapped_boxes = outward(space, boxes)
    snapped_boxes[:, 0, 0] = np.minimum(-(-boxes[:, 0, 0] // 4) * 4, boxes[:, 0, 1] - 1)
    return snapped_boxes


def test_snapping_inward_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spending, "outward", inward)
    with pytest.raises(AssertionError):
        test_every_asked_point_is_in_the_snapped_boxes()


def test_a_grid_of_one_changes_nothing_but_the_number() -> None:
    rng = np.random.default_rng(1)
    space = small()
    for _ in range(30):
        boxes = some_boxes(rng, space.sizes, 6)
        snapped_boxes = snapped(space, boxes)
        assert len(snapped_boxes) <= len(boxes)
        assert (members(snapped_boxes, space.sizes) == members(boxes, space.sizes)).all()


def test_missing_values_are_a_cell_of_their_own() -> None:
    space = small(grid=4)
    assert outward(space, space.box(age=(15, 16)))[0, 0].tolist() == [4, 6]
    assert outward(space, np.array([[[6, 7], [0, 1], [0, 1]]]))[0, 0].tolist() == [6, 7]


def left_of(spent: Spent) -> Int64:
    """initial - spent of every point."""
    sizes = spent.space.sizes
    initial = np.arange(sizes[2]) * spent.step
    return np.broadcast_to(initial, tuple(sizes)) - amounts_of(spent)


def check_against_points(spent: Spent, boxes: Int64, amount: int) -> None:
    """All of a decision, with and without drop, on a grid of one."""
    sizes, left = spent.space.sizes, left_of(spent)
    inside = members(boxes, sizes)
    enough = inside & (left >= amount)
    strict, loose = (decide(spent, boxes, amount, drop) for drop in (False, True))
    for outcome in (strict, loose):
        assert (members(outcome.boxes, sizes) == inside).all()
        assert outcome.largest == max(left[inside].min(), 0)
        assert (members(outcome.lacking, sizes) == inside & ~enough).all()
        for box, least in zip(outcome.lacking, outcome.left.tolist(), strict=True):
            assert least == max(left[members(box[None], sizes)].min(), 0)
    assert strict.accepted == enough[inside].all()
    assert (members(strict.charged, sizes) == (inside & strict.accepted)).all()
    assert loose.accepted == enough.any()
    assert (members(loose.charged, sizes) == enough).all()


def test_decisions_are_those_of_every_point() -> None:
    rng = np.random.default_rng(0)
    for step in (1, 2, 3):
        spent = untouched(small(step=step), "epsilon")
        for amount in (1, 3, 2, 1, 5):
            for _ in range(12):
                boxes = some_boxes(rng, spent.space.sizes)
                check_against_points(spent, boxes, int(rng.integers(1, 12)))
            spent = charge(spent, some_boxes(rng, spent.space.sizes), amount)


def check_rules(
    spent: Spent, own: Spent, boxes: Int64, amount: int, usable: int, quota: int
) -> bool:
    """All of a decision under an unlock schedule and a quota; whether both were short somewhere."""
    sizes = spent.space.sizes
    initial = np.arange(sizes[2]) * spent.step * usable // MICRO
    budget = np.broadcast_to(initial, tuple(sizes)) - amounts_of(spent)
    rest = quota - amounts_of(own)
    inside = members(boxes, sizes)
    enough = inside & (np.minimum(budget, rest) >= amount)
    for drop in (False, True):
        outcome = decide(spent, boxes, amount, drop, usable, Own(own, quota))
        assert outcome.largest == max(np.minimum(budget, rest)[inside].min(), 0)
        assert (members(outcome.lacking, sizes) == inside & ~enough).all()
        for box, least in zip(outcome.lacking, outcome.left.tolist(), strict=True):
            here = members(box[None], sizes)
            short = budget if (budget[here] < amount).all() else rest
            assert least == max(short[here].min(), 0)
        accepted = enough.any() if drop else enough[inside].all()
        assert outcome.accepted == accepted
        assert (members(outcome.charged, sizes) == (enough if drop else inside & accepted)).all()
    return bool((inside & (budget < amount)).any() and (inside & (rest < amount)).any())


def rule_history() -> None:
    rng, both = np.random.default_rng(3), 0
    for step in (1, 2, 3):
        spent = own = untouched(small(step=step), "epsilon")
        for amount in (1, 3, 2, 1):
            for _ in range(8):
                boxes = some_boxes(rng, spent.space.sizes)
                usable = int(rng.choice([0, 1, 299_999, 500_000, MICRO]))
                both += check_rules(spent, own, boxes, int(rng.integers(1, 7)), usable, 4)
            boxes = some_boxes(rng, spent.space.sizes)
            spent, mine = charge(spent, boxes, amount), bool(rng.integers(2))
            own = charge(own, boxes, amount) if mine else own
    assert both > 10


def test_rules_of_the_steward_are_those_of_every_point() -> None:
    rule_history()


def test_a_share_rounded_up_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    real = spending._left
    monkeypatch.setattr(spending, "_left", lambda *given: real(*given) + (given[-1] < MICRO))
    with pytest.raises(AssertionError):
        rule_history()


def test_the_largest_budgets_do_not_overflow() -> None:
    space = Space((Budget(name="initial", most=1_000.0),))
    spent = restored(space, "epsilon", space.everything, np.array([1 << 61]), 10)
    for usable in (1, MICRO - 1, MICRO):
        assert not decide(spent, space.everything, MOST, True, usable).accepted
    top = space.box(initial=(1_000, None))
    assert decide(untouched(space, "epsilon"), top, MOST).accepted
    assert decide(untouched(space, "epsilon"), top, MOST - 1_000, True, MICRO - 1).accepted
    for drop in (False, True):  # nothing is unlocked, whatever the initial budget
        assert not decide(untouched(space, "epsilon"), top, 1, drop, 0).accepted


def test_the_largest_amount_passes_and_one_more_does_not() -> None:
    spent = charge(untouched(small(), "epsilon"), small().box(age=(12, 14)), 3)
    box = small().box(age=(11, 13), initial=("0.000008", None))
    largest = decide(spent, box, 100).largest
    assert largest == 5 and decide(spent, box, 5).accepted and not decide(spent, box, 6).accepted


def test_the_snapped_box_is_checked() -> None:
    space = small(grid=4)
    spent = charge(untouched(space, "epsilon"), space.box(age=(10, 11)), 9)
    box = space.box(age=(12, 13), initial=("0.000010", None))
    assert not decide(spent, box, 5).accepted
    assert decide(spent, space.box(age=(14, 15), initial=("0.000010", None)), 5).accepted


def test_a_record_without_budget_is_never_used() -> None:
    spent = untouched(small(), "epsilon")
    assert not decide(spent, small().everything, 1).accepted
    assert decide(spent, small().everything, 1, drop=True).charged[:, 2, 0].tolist() == [1]


@pytest.mark.parametrize("amount", [0, -5, 1 << 40, 0.5])
def test_amounts_that_are_none(amount: int, refused: Refused) -> None:
    refused(lambda: decide(untouched(small(), "epsilon"), small().everything, amount))


def test_no_boxes_are_no_query(refused: Refused) -> None:
    refused(lambda: decide(untouched(small(), "epsilon"), small().everything[:0], 1))


def exact_history(queries: int, seed: int) -> None:
    """Charges of accepted queries are those of every point; a new table after each 40."""
    rng, accepted, refused, dropped = np.random.default_rng(seed), 0, 0, 0
    for number in range(queries):
        if number % 40 == 0:
            spent = untouched(small(step=int(rng.integers(1, 4))), "epsilon")
            sizes = spent.space.sizes
            truth = np.zeros(sizes, np.int64)
            initial = np.arange(sizes[2]) * spent.step
        boxes, amount = some_boxes(rng, sizes), int(rng.integers(1, 5))
        if number % 7 == 0:
            check_against_points(spent, boxes, amount)
        inside = members(boxes, sizes)
        enough = inside & (initial - truth >= amount)
        drop = bool(rng.integers(2))
        decision, after = ask(spent, boxes, amount, drop)
        assert decision.accepted == (enough.any() if drop else enough[inside].all())
        truth[enough] += amount * decision.accepted
        assert (amounts_of(after) == truth).all() and (truth <= initial).all()
        accepted, refused = accepted + decision.accepted, refused + (not decision.accepted)
        dropped += drop and decision.accepted and bool(decision.lacking.size)
        spent = after
    assert min(accepted, refused, dropped) > queries // 20


def test_charges_are_those_of_every_point() -> None:
    exact_history(400, 0)


@pytest.mark.slow
def test_charges_are_those_of_every_point_over_10000_queries() -> None:
    exact_history(10_000, 1)


def coarse_history(queries: int, cap: int, seed: int) -> Spent:
    """With a grid and a cap no point is ever charged less, none beyond its initial budget."""
    rng = np.random.default_rng(seed)
    for number in range(queries):
        if number % 60 == 0:
            spent = untouched(small(grid=4 if number % 120 else 1), "epsilon", cap)
            sizes = spent.space.sizes
            truth = np.zeros(sizes, np.int64)
            initial = np.arange(sizes[2]) * spent.step
        boxes, amount = some_boxes(rng, sizes), int(rng.integers(1, 4))
        decision, spent = ask(spent, boxes, amount, drop=True)
        # The query runs on the asked points that are charged, and those alone really pay.
        truth[members(boxes, sizes) & members(decision.charged, sizes)] += amount
        assert len(spent.boxes) <= cap
        assert (amounts_of(spent) >= truth).all() and (truth <= initial).all()
    return spent


@pytest.mark.parametrize("cap", [1, 7, 20])
def test_a_cap_and_a_grid_only_over_charge(cap: int) -> None:
    coarse_history(120, cap, cap)


@pytest.mark.slow
def test_a_cap_and_a_grid_only_over_charge_over_10000_queries() -> None:
    coarse_history(10_000, 15, 5)


def test_a_full_state_keeps_three_quarters_of_its_regions() -> None:
    """Joined regions over-charge, so no more of them are joined than a full state needs."""
    rng, spent, counts = np.random.default_rng(6), untouched(wide(4, 50), "epsilon", 40), [1]
    for _ in range(40):
        boxes, amount = some_box(rng, wide(4, 50).sizes), int(rng.integers(1, 1_000))
        spent = charge(spent, boxes, amount)
        counts.append(len(spent.boxes))
    assert counts[3] < 30 <= min(counts[4:]) and max(counts) <= 40  # the fourth charge fills it


def test_joining_at_the_smaller_amount_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(coarsening, "joined", np.minimum)
    with pytest.raises(AssertionError):
        coarse_history(120, 20, 20)


def grid_history() -> None:
    """What a query reads has paid."""
    space = small(grid=4)
    spent = untouched(space, "epsilon")
    box = space.box(age=(11, 13), initial=("0.000004", None))
    decision, spent = ask(spent, box, 2)
    assert decision.accepted
    assert (amounts_of(spent)[members(box, space.sizes)] == 2).all()


def test_charging_snapping_inward_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    grid_history()
    monkeypatch.setattr(spending, "outward", inward)
    with pytest.raises(AssertionError):
        grid_history()


def overspent() -> None:
    """A record of .0000039 cannot pay 4 millionths."""
    space = small(step=1)
    at, _ = space.coordinates(
        {"age": np.array([12]), "city": np.array(["A"]), "initial": np.array([3.9e-6])}
    )
    box = np.stack([at, at + 1], axis=2)
    assert not decide(untouched(space, "epsilon"), box, 4).accepted
    assert decide(untouched(space, "epsilon"), box, 3).accepted


def test_budgets_rounded_up_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    overspent()
    monkeypatch.setattr(space, "initials_of", lambda v: (np.ceil(v * 1e6).astype(np.int64), v >= 0))
    with pytest.raises(AssertionError):
        overspent()


def test_the_boxes_of_a_charge_pay_once_under_a_cap() -> None:
    """Two boxes in one region that cannot be divided: it pays once."""
    space = small()
    spent = untouched(space, "epsilon", cap=1)
    boxes = np.concatenate([space.box(age=(10, 12)), space.box(age=(13, 15))])
    new_spend = charge(spent, boxes, 3)
    assert (amounts_of(new_spend) == 3).all() and (amounts_of(spent) == 0).all()


def test_a_replay_makes_the_same_bytes() -> None:
    rng, states = np.random.default_rng(6), [untouched(wide(4, 50), "epsilon", 200)]
    entries = []
    for _ in range(60):
        boxes, amount = some_box(rng, wide(4, 50).sizes), int(rng.integers(1, 1_000))
        decision, after = ask(states[-1], boxes, amount, drop=True)
        entries.append((decision.charged.copy(order="C"), amount))
        states.append(after)
    again = untouched(wide(4, 50), "epsilon", 200)
    for number, (boxes, amount) in enumerate(entries):
        if number == 30:  # from a snapshot on
            again = restored(again.space, "epsilon", again.boxes, again.amounts, 200)
        again = charge(again, boxes, amount)
    assert again.boxes.tobytes() == states[-1].boxes.tobytes()
    assert again.amounts.tobytes() == states[-1].amounts.tobytes()


def test_bars_of_a_histogram_are_one_region() -> None:
    space = wide(3, 100)
    spent, budget = untouched(space, "epsilon"), (1, None)
    for low in range(0, 100, 10):
        _, spent = ask(spent, space.box(x0=(low, low + 10), initial=budget), 1_000)
    assert len(spent.boxes) == 2
    bars = np.concatenate([space.box(x1=(n, n + 1), initial=budget) for n in range(100)])
    decision, spent = ask(spent, bars, 1_000)
    assert len(decision.boxes) == 1 and len(spent.boxes) == 2


@pytest.mark.parametrize("queries", [60, pytest.param(10_000, marks=pytest.mark.slow)])
def test_unaligned_boxes_of_six_dimensions_stay_under_the_cap(queries: int) -> None:
    rng, space = np.random.default_rng(7), wide(6)
    spent, probes = untouched(space, "epsilon", 1_000), rng.integers(0, space.sizes, (200, 6))
    truth = np.zeros(len(probes), np.int64)
    for _ in range(queries):
        box = some_box(rng, space.sizes)
        decision, spent = ask(spent, box, 1_000, drop=True)
        assert len(spent.boxes) <= 1_000
        for part in decision.charged:
            truth += 1_000 * ((probes >= part[:, 0]) & (probes < part[:, 1])).all(axis=1)
    held = np.array([spent.most_in(np.stack([p, p + 1], axis=1)[None]) for p in probes])
    assert (held >= truth).all() and len(spent.boxes) > 300 and truth.max() > 0


def test_charges_that_are_none(refused: Refused) -> None:
    spent = untouched(small(), "epsilon")
    refused(lambda: charge(spent, small().everything, 0))
    refused(lambda: charge(spent, np.concatenate([small().everything] * 2), 1))
    assert charge(spent, small().everything[:0], 1) is spent


def test_sums_beyond_all_budgets_are_refused(refused: Refused) -> None:
    full = restored(small(), "epsilon", small().everything, np.array([1 << 61]), 10)
    refused(lambda: charge(full, small().everything, 1))


def closings(histories: int) -> None:
    rng = np.random.default_rng(3)
    for _ in range(histories):
        space = small()
        spent = untouched(space, "epsilon")
        for _ in range(6):
            spent = charge(spent, some_boxes(rng, space.sizes), int(rng.integers(1, 4)))
        before, boxes = amounts_of(spent), some_boxes(rng, space.sizes)
        inside = members(boxes, space.sizes)
        after = amounts_of(close(spent, boxes))
        assert (after[inside] == CLOSED).all() and (after[~inside] == before[~inside]).all()


def test_closed_points_have_spent_everything_and_no_other() -> None:
    closings(40)


def test_closed_points_are_told_from_those_that_have_spent_the_largest_budget() -> None:
    few = Space(
        (Integer(name="x", low=0, high=3), Budget(name="initial", most=1_000.0, step=MICRO))
    )
    spent = charge(untouched(few, "epsilon"), few.box(x=(0, 2), initial=(1_000, None)), MOST)
    spent = close(spent, few.box(x=(1, 3)))
    assert MOST < CLOSED
    assert [amounts_of(spent)[x, -1] for x in range(3)] == [MOST, CLOSED, CLOSED]
    assert spent.most_in(few.box(x=(2, 3))) == spent.most_in(few.box(x=(0, 1))) == MOST
    for x in range(3):
        assert not decide(spent, few.box(x=(x, x + 1), initial=(1_000, None)), 1).accepted


def test_closing_at_a_small_amount_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(charging, "CLOSED", 3)
    with pytest.raises(AssertionError):
        closings(40)


def test_ranges_closed_one_after_the_other_are_one_region() -> None:
    space = wide(3, 100)
    spent = untouched(space, "epsilon")
    for low in range(0, 60, 10):
        spent = charge(spent, space.box(x0=(low, low + 7), x1=(3, 60), initial=(1, None)), 1_000)
        spent = close(spent, space.box(x0=(low, low + 10)))
    assert len(spent.boxes) == 2 and spent.amounts.max() == CLOSED
    box = space.box(x0=(50, 70), initial=(1_000, None))
    decision = decide(spent, box, 1, drop=True)
    assert decision.accepted and not decide(spent, box, 1).accepted
    assert decision.charged[:, 0].tolist() == [[60, 70]]
    assert decision.left.tolist() == [0] and decision.lacking[:, 0].tolist() == [[50, 60]]


def test_under_a_full_cap_more_is_closed_never_less() -> None:
    rng = np.random.default_rng(4)
    for cap in (1, 3, 8):
        space = small()
        spent = untouched(space, "epsilon", cap)
        for _ in range(4):
            spent = charge(spent, some_boxes(rng, space.sizes), 2)
        boxes = some_boxes(rng, space.sizes)
        after = close(spent, boxes)
        assert len(after.boxes) <= cap
        assert (amounts_of(after)[members(boxes, space.sizes)] == CLOSED).all()
        assert (amounts_of(after) >= amounts_of(spent)).all()


def test_only_whole_cells_are_closed(refused: Refused) -> None:
    space = small(grid=4)
    for box in (space.box(age=(10, 12)), space.everything[:0]):
        refused(closable, space, box)
    assert len(closable(space, space.box(age=(10, 14)))) == 1
    spent = untouched(space, "epsilon")
    assert close(spent, space.everything[:0]) is spent

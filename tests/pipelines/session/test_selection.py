"""Selections: predicates joined, boxes cut, and identities that mean the same points."""

import zlib

import numpy as np
import pytest

from dpstream.accounting.errors import UsageError
from dpstream.accounting.regions.boxes import disjoint, points
from dpstream.accounting.regions.charging import charge
from dpstream.accounting.regions.spent import Spent, untouched
from dpstream.pipelines.session.predicates import predicate_of
from dpstream.pipelines.session.selection import Selection, common
from tests.lanes import few_first
from tests.pipelines.session.people import PEOPLE, box, random_boxes

SPACE = PEOPLE.space


class Views:
    """An account that was charged once."""

    def spent(self, kind: str) -> Spent:
        return charge(untouched(SPACE, "epsilon"), box(age=(0, 50)), 500_000)


@pytest.mark.parametrize("seed", few_first(range(20)))
def test_common_points_are_those_of_both(seed: int) -> None:
    boxes = np.concatenate([box(age=(n, n + 10)) for n in (0, 20, 40)])
    others = random_boxes(seed)
    overlap = common(boxes, others)
    assert disjoint(overlap) if len(overlap) else True
    size = sum(points(common(one[None], others)) for one in boxes)
    assert points(overlap) == size == points(common(others, boxes))


def test_predicates_are_joined_and_cut() -> None:
    both = Selection(SPACE).where("age < 10 OR age >= 90").where("smoker = 'yes'")
    assert both.text == "(age < 10 OR age >= 90) AND (smoker = 'yes')"
    assert points(both.boxes()) * 10 == points(Selection(SPACE).where("smoker = 'yes' AND "
                                                                      "age IS NOT NULL").boxes()
                                               ) * 2  # fmt: skip
    fixed = both.cut_to(box(age=(5, 20)))
    assert fixed.boxes()[:, 0].tolist() == [[5, 10]]
    assert fixed.cut_to(box(age=(30, 40))).boxes().tolist() == []
    with pytest.raises(UsageError):
        Selection(SPACE).where("age <")


@pytest.mark.parametrize(
    "texts",
    [
        ("age < 10 OR age >= 90", "smoker = 'yes'"),
        ("NOT (age < 10 OR age IS NULL)", "age <> 40", "smoker IN ('yes', 'no') OR age = 3"),
        ("consumed_epsilon > 0", "age < 10 OR consumed_epsilon >= 0.5", "TRUE"),
    ],
)
def test_joined_predicates_are_those_of_the_joined_text(texts: tuple[str, ...]) -> None:
    joined = Selection(SPACE)
    for text in texts:
        joined = joined.where(text)
    assert joined.predicate == predicate_of(joined.text, SPACE)  # as large and as deep, too
    assert joined.identity == Selection(SPACE, joined.text).identity
    assert joined.cut_to(box(age=(0, 9))).predicate is joined.predicate
    assert joined.where(" ").text == joined.text


@pytest.mark.parametrize(
    ("first", "second", "more"),
    [
        # 19,999 words, then 20,001; 200,000 characters, then one more.
        ("age = 1 OR " * 3_000 + "age = 1", "age = 1 OR " * 1_997 + "age = 1", " OR TRUE"),
        ("age = 1" + " " * 100_000, "age = 1" + " " * 99_977, " "),
    ],
)
def test_what_is_joined_is_as_limited_as_its_text(first: str, second: str, more: str) -> None:
    joined = Selection(SPACE).where(first).where(second)
    assert joined.predicate == predicate_of(joined.text, SPACE)
    with pytest.raises(UsageError) as parsed:
        predicate_of(f"({first}) AND ({second + more})", SPACE)
    with pytest.raises(UsageError) as caught:
        Selection(SPACE).where(first).where(second + more)
    assert str(caught.value) == str(parsed.value)


def test_what_is_joined_is_nested_as_deep_as_one_text_may_be() -> None:
    joined = Selection(SPACE).where("(age < 50)")
    for _ in range(49):
        joined = joined.where("age >= 10")
    assert joined.boxes()[:, 0].tolist() == [[10, 50]]
    with pytest.raises(UsageError, match="nested deeper than 50"):
        joined.where("age >= 10")


def test_an_identity_is_that_of_every_zlib(monkeypatch: pytest.MonkeyPatch) -> None:
    def identity() -> bytes:
        return Selection(SPACE).where("age < 10 OR age >= 90").identity

    here, compress = identity(), zlib.compress
    monkeypatch.setattr(zlib, "compress", lambda data, level=-1: compress(data, 0))
    assert identity() == here


def test_identities() -> None:
    one = Selection(SPACE).where("age >= 10 AND age < 20")
    other = Selection(SPACE).cut_to(box(age=(10, 20)))
    assert one.identity == other.identity != Selection(SPACE).where("age < 20").identity
    spoken = Selection(SPACE).where("consumed_epsilon > 0")
    assert spoken.moves and not one.moves
    assert spoken.identity == Selection(SPACE).where("consumed_epsilon > 0").identity
    assert spoken.identity != spoken.cut_to(box(age=(10, 20))).identity
    # Texts that differ within a literal are not the same question.
    spaced = [Selection(SPACE).where(f"consumed_epsilon > 0 AND smoker = '{code}'").identity
              for code in ("no", "yes")]  # fmt: skip
    assert len({*spaced}) == 2


def test_consumption_is_as_the_account_stands() -> None:
    spoken = Selection(SPACE).where("consumed_epsilon >= 0.5")
    assert spoken.boxes(Views()).tolist() == box(age=(0, 50)).tolist()

"""What of a unit counts is chosen privately, and the answer says what that cuts."""

import math
from random import Random
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import pytest

import dpstream
from dpstream.accounting.query.bounds import Cut
from dpstream.accounting.query.plan import GROUPS

DRAW = np.random.default_rng(8)


def table(rows: np.ndarray, pages: int = 1) -> pa.Table:
    """So many rows of each user, spread over pages."""
    user = np.repeat(np.arange(len(rows)), rows)
    return pa.table({
        "user": user, "page": DRAW.integers(0, pages, len(user)),
        "value": DRAW.lognormal(3, 1, len(user)),
    })  # fmt: skip


@pytest.fixture(autouse=True)
def fixed_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    """Secrets and run ids from one seed: these tests are of one draw each."""
    random = Random(3)
    monkeypatch.setattr("os.urandom", random.randbytes)
    monkeypatch.setattr("secrets.token_hex", lambda size: random.randbytes(size).hex())


HEAVY = table(np.ceil(DRAW.lognormal(2, 1.8, 6_000)).astype(int))


def test_a_count_of_heavy_users_does_not_cut_most_rows_unseen() -> None:
    """With the public bound of 5 rows it was a tenth of the truth, and its interval said so."""
    answer = dpstream.count(HEAVY, unit="user", epsilon=1.0)
    [count], cut = answer.table["count"].to_pylist(), answer.cuts["count"]
    truth = HEAVY.num_rows
    assert cut.of == "rows" and cut.high > 5 and cut.amount is not None
    sizes = np.bincount(HEAVY["user"].to_numpy())
    assert abs(cut.above - np.mean(sizes > cut.high)) <= cut.within
    assert count > 0.5 * truth
    # The interval holds the rows that count; with the share that is cut it tells of all.
    [low], [high] = (answer.table[f"count_noise_{end}"].to_pylist() for end in ("low", "high"))
    counted_rows = np.minimum(sizes, cut.high).sum()
    sd = answer.table["count_sd"][0].as_py()
    assert low - 2 * sd < counted_rows < high + 2 * sd and high < truth
    assert count / (1 - cut.amount) == pytest.approx(truth, rel=0.25)
    few = dpstream.count(HEAVY, unit="user", epsilon=1.0, max_rows=5)
    assert few.table["count"][0].as_py() < 0.3 * truth
    assert not few.cuts and few.header.not_estimated == ("bounds of count",)


@pytest.mark.parametrize("sigma", [1.0, 1.5])
def test_the_reported_cut_of_log_normal_sums_is_near_the_true_one(sigma: float) -> None:
    values = DRAW.lognormal(4, sigma, 40_000)
    data = pa.table({"user": np.arange(len(values)), "value": values})
    answer = dpstream.sum(data, unit="user", value="value", epsilon=1.0)
    cut, [total] = answer.cuts["sum"], answer.table["sum"].to_pylist()
    assert cut.of == "values" and cut.amount is not None
    assert abs(cut.above - np.mean(values > cut.high)) <= cut.within
    assert abs(cut.below - np.mean(values < cut.low)) <= cut.within
    truth = np.maximum(values - cut.high, 0).sum() / values.sum()
    assert cut.amount == pytest.approx(truth, abs=0.06)
    sd = answer.table["sum_sd"][0].as_py()
    assert abs(total - (1 - truth) * values.sum()) < 5 * sd + max(cut.low, 0) * len(values) / 100


def test_keys_and_rows_of_each_are_chosen_together() -> None:
    data = table(np.full(8_000, 3), pages=40)
    answer = dpstream.count(data, unit="user", key="page", epsilon=2.0, public_keys=range(40))
    groups, rows = answer.cuts[GROUPS], answer.cuts["count"]
    assert groups.of == "groups" and groups.high == 3 and rows.of == "rows" and rows.high <= 2
    assert groups.above <= groups.within and not answer.header.not_estimated
    assert sum(answer.table["count"].to_pylist()) == pytest.approx(data.num_rows, rel=0.2)


def test_with_few_rows_of_a_user_the_noise_is_less_than_with_the_public_bound() -> None:
    data = table(np.full(5_000, 2), pages=5)
    both: dict[str, Any] = {"unit": "user", "epsilon": 1.0}
    of_keys: dict[str, Any] = {"key": "page", "public_keys": range(5)}
    for more in ({}, of_keys):
        chosen = dpstream.count(data, **both, **more)
        public = dpstream.count(data, **both, **more, max_rows=5, max_keys=8)
        assert chosen.table["count_sd"][0].as_py() < 0.6 * public.table["count_sd"][0].as_py()


def test_rows_are_chosen_for_values_within_given_bounds() -> None:
    """Medians of many answers: each by itself errs by its noise.

    Values are about 30 of at most 100, so that a third of a unit's rows bounds its sum; the whole
    error is least at 496.  A mean has more rows than its bound from one unit in ten.
    """
    rows = np.bincount(HEAVY["user"].to_numpy())
    for call, low, high, of in (
        (dpstream.sum, 200, 500, "bounds"),
        (dpstream.mean, 48, 128, "rows"),
    ):
        answers = [
            call(HEAVY, unit="user", value="value", bounds=(0, 100), epsilon=1.0) for _ in range(15)
        ]
        kind = answers[0].table.column_names[0]
        cuts = [answer.cuts[f"rows of {kind}"] for answer in answers]
        assert low <= np.median([cut.high for cut in cuts]) <= high
        assert {cut.of for cut in cuts} == {of}
        if kind == "mean":
            shares = [np.mean(rows > cut.high) - cut.above for cut in cuts]
            assert np.median(np.abs(shares)) <= cuts[0].within and cuts[0].amount is None
        for answer in answers:
            assert set(answer.cuts) == {f"rows of {kind}"}
            assert answer.header.not_estimated == (f"bounds of {kind}",)


def test_the_rows_of_a_sum_are_counted_by_their_size() -> None:
    """20 rows of a twentieth of the bound are one row of it, of either sign."""
    user = np.repeat(np.arange(8_000), 20)
    for bounds, value in (((0, 100), 5.0), ((-100, 10), -5.0), ((-1_000, 100), 5.0)):
        data = pa.table({"user": user, "value": np.full(len(user), value)})
        highs = []
        for _ in range(7):
            answer = dpstream.sum(data, unit="user", value="value", bounds=bounds, epsilon=1.0)
            highs.append(answer.cuts["rows of sum"].high)
        assert np.median(highs) == 1


def test_too_few_users_have_the_public_bound_and_the_answer_says_so() -> None:
    data = table(np.full(50, 9))
    answer = dpstream.count(data, unit="user", epsilon=50.0, delta=1e-6)
    few = dpstream.count(data, unit="user", epsilon=0.5)
    assert answer.cuts and answer.table["count"][0].as_py() == pytest.approx(450, rel=0.2)
    assert not few.cuts and few.header.not_estimated == ("bounds of count",)
    assert not few.header.nulls and not math.isnan(few.table["count"][0].as_py())


def test_the_released_bytes_the_table_and_the_text_have_the_estimates() -> None:
    answer = dpstream.count(HEAVY, unit="user", epsilon=1.0)
    metadata = answer.table.schema.metadata
    cuts = msgspec.json.decode(metadata[b"dpstream.cuts"], type=dict[str, Cut])
    assert cuts == answer.cuts == answer.header.cuts and set(cuts) == {"count"}
    assert b'"amount_at_most"' in answer.receipt and b"noise" in metadata[b"dpstream.intervals"]
    assert f"{cuts['count'].high:,.0f} rows" in repr(answer) and "noise only" in answer.guarantee


def test_pure_noise_and_one_mechanism_of_all(monkeypatch: pytest.MonkeyPatch) -> None:
    answer = dpstream.count(HEAVY, unit="user", epsilon=1.0, delta=0)
    assert answer.delta == 0 and answer.cuts["count"].high > 5
    assert answer.table["count"][0].as_py() > 0.3 * HEAVY.num_rows


@pytest.mark.parametrize("dependent", [False, True])
def test_a_cut_of_rows_is_of_one_key_of_each_user(dependent: bool) -> None:
    """Where users of many keys have more rows in each, more of all pairs are beyond the bound."""
    keys = np.where(np.arange(6_000) % 2 == 0, 2, 12)
    user = np.repeat(np.arange(len(keys)), keys)
    heavier = dependent & (keys[user] == 12)
    rows = np.maximum(1, DRAW.lognormal(np.where(heavier, 2.2, 0.7), 1)).astype(int)
    page = np.concatenate([np.arange(n) for n in keys])
    data = pa.table({"user": np.repeat(user, rows), "page": np.repeat(page, rows)})
    answer = dpstream.count(
        data, unit="user", key="page", epsilon=20.0, public_keys=range(12), max_keys=12
    )
    cut = answer.cuts["count"]
    assert cut.amount is not None
    beyond, cut_rows = rows > cut.high, np.maximum(rows - cut.high, 0)
    of_users = (np.bincount(user, beyond) / keys).mean()
    sizes = (np.bincount(user, each) / keys for each in (cut_rows, rows))
    cut_size, size = (each.sum() for each in sizes)
    # One draw may be beyond the 95% margin; beyond half as much more it is one of 300.
    assert abs(cut.above - of_users) <= 1.5 * cut.within
    assert cut.amount == pytest.approx(cut_size / size, abs=0.025)
    assert (beyond.mean() > of_users + 2 * cut.within) == dependent

"""Which cells are measured, with which noise, and that sabotaged variants are caught.

Noise is named by run, table, level, step and cell, and by nothing else.
"""

import itertools
from typing import Any

import numpy as np
import pytest
from scipy import stats

from dpstream.accounting.tabulation.parameters import (
    TABLES,
    US_LEVELS,
    Draws,
    LawName,
    Noise,
    draws,
)
from dpstream.dp_transforms.tabulation import perturb as module
from dpstream.dp_transforms.tabulation.perturb import (
    FIRST,
    TOTAL,
    CellNoise,
    detail_step,
    perturbed,
)
from tests.dp_transforms.tabulation.worlds import (
    RUN,
    World,
    exact_counts,
    measured,
    ring,
    totals_as_published,
    world,
)
from tests.fixed import INPUTS

LEVEL = US_LEVELS[0]
WIDE = Noise("discrete gauss", 1_000.0)


def test_a_cell_has_the_same_noise_whoever_draws_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "BLOCK_GROUPS", 100)
    with ring() as keys:
        noise = CellNoise(keys, RUN, INPUTS)
        groups = np.arange(450)
        draws = noise.draw(WIDE, "t1t2", LEVEL, FIRST, groups, 3)
        rng = np.random.default_rng(0)
        for _ in range(20):
            begin, end = np.sort(rng.integers(0, 450, 2))
            subset = groups[begin:end][rng.random(end - begin) < rng.random()]
            assert (noise.draw(WIDE, "t1t2", LEVEL, FIRST, subset, 3) == draws[subset]).all()
    assert len(np.unique(draws)) > 900  # of 1,350: no cell has another's noise


def test_no_two_names_share_noise() -> None:
    groups = np.arange(200)
    steps = (FIRST, TOTAL, *(detail_step(d) for d in range(4)))
    draws = {}
    with ring() as keys, ring(8) as other:
        for ring_, (run, inputs), table, level, step in itertools.product(
            (keys, other), ((RUN, INPUTS), ("6b" * 16, INPUTS), (RUN, bytes(16))),
            ("t1t2", "t3"), US_LEVELS[:2], steps,
        ):  # fmt: skip
            drawn = CellNoise(ring_, run, inputs).draw(WIDE, table, level, step, groups, 1)[:, 0]
            draws[id(ring_), run, inputs, table, level, step] = drawn
    for (_, a), (_, b) in itertools.combinations(draws.items(), 2):
        assert (a == b).sum() < 5


def test_a_name_has_its_scale_and_law() -> None:
    groups = np.arange(400)
    laws: tuple[LawName, ...] = ("discrete gauss", "rounded gauss", "discrete laplace")
    with ring() as keys:
        noise = CellNoise(keys, RUN, INPUTS)
        drawn = [noise.draw(Noise(law, scale), "t1t2", LEVEL, FIRST, groups, 1)[:, 0]
                 for law in laws for scale in (500.0, 500.5)]  # fmt: skip
    for a, b in itertools.combinations(drawn, 2):
        assert abs(np.corrcoef(a, b)[0, 1]) < 0.25  # fresh, not the same uniforms scaled


@pytest.mark.parametrize("law", ["discrete gauss", "rounded gauss", "discrete laplace"])
def test_noise_has_its_law(law: LawName) -> None:
    scale = 3.0
    with ring() as keys:
        drawn = CellNoise(keys, RUN, INPUTS).draw(
            Noise(law, scale), "t1t2", LEVEL, FIRST, np.arange(50_000), 2
        ).reshape(-1)  # fmt: skip
    k = np.arange(-14, 15)
    if law == "discrete laplace":
        chances = np.exp(-np.abs(k) / scale)
        chances *= np.tanh(0.5 / scale)
    elif law == "rounded gauss":
        chances = np.diff(stats.norm.cdf(np.append(k - 0.5, 14.5), scale=scale))
    else:
        chances = np.exp(-(k**2) / (2 * scale**2))
        chances /= np.exp(-(np.arange(-90, 91) ** 2) / (2 * scale**2)).sum()
    inside = drawn[np.abs(drawn) <= 14]
    seen = np.bincount(inside + 14, minlength=29)
    expected = chances / chances.sum() * len(inside)
    assert stats.chisquare(seen, expected).pvalue > 1e-4
    assert abs(len(inside) / len(drawn) - chances.sum()) < 0.005


def test_without_a_scale_there_is_no_noise() -> None:
    with ring() as keys:
        drawn = CellNoise(keys, RUN, INPUTS).draw(
            Noise("discrete gauss", 0.0), "t1t2", LEVEL, FIRST, np.arange(5), 3
        )  # fmt: skip
        # As in step 1 of a shard of which the totals alone are measured.
        nobody = CellNoise(keys, RUN, INPUTS).draw(WIDE, "t1t2", LEVEL, FIRST, np.arange(0), 3)
    assert drawn.shape == (5, 3) and not drawn.any() and nobody.shape == (0, 3)


def test_pinned() -> None:
    """An execution that another version goes on with must draw what was drawn before.

    The groups lie in four blocks: one more name of a cell is one more measurement of its count.
    """
    groups = np.array([0, 1, (1 << 20) - 1, 1 << 20, 1 << 21, 3 << 20])
    laws: tuple[tuple[LawName, Any], ...] = (
        ("discrete gauss", FIRST), ("rounded gauss", detail_step(1)), ("discrete laplace", TOTAL),
    )  # fmt: skip
    with ring() as keys:
        noise = CellNoise(keys, RUN, INPUTS)
        draws = [
            noise.draw(Noise(law, 100.0), "t1t2", LEVEL, step, groups, 1)[:, 0].tolist()
            for law, step in laws
        ]
    assert draws == [
        [-94, -102, -150, -70, -172, -71],
        [217, 85, -80, -63, -112, 80],
        [38, -75, 345, -224, -30, 36],
    ]


[PERSONS] = TABLES["p"]


def test_without_noise_counts_are_exact_and_choose_the_detail() -> None:
    w = world(1_500, budget=float("inf"))
    steps = np.array((4.0, 15.0, 60.0))
    details = set[int]()
    for (level, counts), (_, parts) in zip(
        exact_counts(w, PERSONS), measured(w, PERSONS), strict=True
    ):
        seen = list[int]()
        for part in parts:
            only = level.total_only[part.groups % len(level.iterations)]
            assert only.all() if part.first is None else not only.any()
            assert (part.values == counts.cells(part.groups, PERSONS.details[part.detail])).all()
            totals = counts.totals[part.groups - counts.shard.first]
            if part.first is not None:
                assert (part.first == totals).all()
                assert (np.searchsorted(steps, totals, side="right") == part.detail).all()
                details.add(part.detail)
            else:
                assert part.detail == 0
            seen += part.groups.tolist()
        assert sorted(seen) == list(range(counts.shard.first, counts.shard.last))
    assert details == {0, 1, 2, 3}


def test_shards_do_not_change_what_is_measured() -> None:
    w = world(800)

    def by_group(most: int) -> dict[Any, Any]:
        return {
            (level.level, group): (part.detail, values)
            for level, parts in measured(w, PERSONS, most=most)
            for part in parts
            for group, values in zip(part.groups.tolist(), part.values.tolist(), strict=True)
        }

    assert by_group(30) == by_group(10**6)


def test_households_take_their_detail_from_what_is_published() -> None:
    w = world(800, program="h")
    by_level = totals_as_published(w)
    for table in TABLES["h"]:
        steps = np.array((4.0, 15.0, 60.0)[: len(table.details) - 1])
        seen, details = 0, [0] * len(table.details)
        for level, parts in measured(w, table, published=by_level):
            of = by_level[level.level]
            for part in parts:
                assert part.first is None
                totals = of.totals[np.searchsorted(of.groups, part.groups)]
                assert (np.searchsorted(steps, totals, side="right") == part.detail).all()
                seen += len(part.groups)
                only = level.total_only[part.groups % len(level.iterations)]
                details[part.detail] += int(only.sum())
        assert seen == sum(len(of.groups) for of in by_level.values())
        assert all(details), "groups of which persons have only the total have every detail"


def scores(w: World, measure: Any = perturbed, scaled: Any = lambda d: d) -> dict[str, Any]:
    """Errors of an execution in units of the planned scales, and what they have in common."""
    exact = exact_counts(w, PERSONS)
    measurements = measured(w, PERSONS, measure=measure, scaled=scaled)
    kinds = {level.level: draws(w.parameters, PERSONS, level.level, level.stability.groups)
             for level in w.domain.levels}  # fmt: skip
    errors, firsts, same, matches = [], [], [], []
    for (level, counts), (_, parts) in zip(exact, measurements, strict=True):
        for part in parts:
            truth = counts.cells(part.groups, PERSONS.details[part.detail])
            planned = kinds[level.level]
            assert planned is not None
            own = planned.total if part.first is None else planned.detail
            assert own is not None
            scale = own.scale
            errors.append(((part.values - truth) / scale).reshape(-1))
            if part.first is not None:
                totals = counts.totals[part.groups - counts.shard.first]
                firsts.append(part.first - totals)
                same.append(part.first - totals == (part.values - truth)[:, 0])
                steps = np.searchsorted(np.array((4.0, 15.0, 60.0)), totals, side="right")
                matches.append(steps == part.detail)
    flat = np.concatenate(errors)
    return {
        "sd": flat.std(), "count": len(flat), "same": np.concatenate(same).mean(),
        "known": np.concatenate(matches).mean(),
    }  # fmt: skip


def sound(score: dict[str, Any]) -> bool:
    """What a sound execution shows: noise as large as planned, steps apart, details not exact."""
    lower, upper = stats.chi2.ppf((1e-5, 1 - 1e-5), score["count"] - 1) / (score["count"] - 1)
    # The discrete Gaussian's variance is at most sigma^2 and, from sigma 2 on, that to 8 digits.
    large = lower <= score["sd"] ** 2 <= upper
    return bool(large and score["same"] < 0.1 and score["known"] < 0.9)


def _smaller(draws: Draws) -> Draws:
    return Draws(*(None if n is None else n._replace(scale=n.scale / 1.25) for n in draws))


def _one_less(draws: Draws) -> Draws:
    """The scales of s - 1 groups where s = 9, and less of a change where s is smaller."""
    part = float(np.sqrt(8 / 9))
    return Draws(*(None if n is None else n._replace(scale=n.scale * part) for n in draws))


class _Reused(CellNoise):
    """Step 1's draws again for the detail."""

    def draw(self, noise, table, level, step, groups, cells):  # type: ignore[no-untyped-def]
        return super().draw(noise, table, level, "step 1", groups, cells)


def _reusing(level: Any, table: Any, counts: Any, draws: Any, thresholds: Any, noise: Any,
             published: Any) -> Any:  # fmt: skip
    reused = _Reused(noise._ring, noise._run_id.decode(), noise._inputs)
    same = draws._replace(first=draws.detail)
    return perturbed(level, table, counts, same, thresholds, reused, published)


def _from_exact(level: Any, table: Any, counts: Any, draws: Any, thresholds: Any, noise: Any,
                published: Any) -> Any:  # fmt: skip
    none = draws._replace(first=draws.first._replace(scale=0.0))
    return perturbed(level, table, counts, none, thresholds, noise, published)


def test_a_sound_execution_passes_and_sabotaged_ones_do_not() -> None:
    w = world(1_500, budget=0.4)
    assert sound(scores(w))
    assert not sound(scores(w, scaled=_smaller))
    assert not sound(scores(w, scaled=_one_less))
    assert not sound(scores(w, measure=_reusing))
    assert not sound(scores(w, measure=_from_exact))


@pytest.mark.parametrize("noise", ["census", "rounded"])
def test_each_step_has_the_noise_of_its_share(noise: str) -> None:
    w = world(100, noise=noise)
    for level, parts in measured(w, PERSONS):
        s = level.stability.groups
        for part in parts:
            rho = 1 / (2 * part.noise.scale**2)
            share = 1.0 if part.first is None else 0.9
            assert rho == pytest.approx(share / s)
            assert rho <= share / s


def test_what_is_measured_is_the_count_and_the_draw_of_its_name() -> None:
    """Added, and under the name of its own step: drawn once more by name it is taken off again.

    With the draw of another sign a count would be measured on both sides of its exact figure by
    two versions that run one execution.
    """
    w = world(300)
    with ring() as keys:
        noise = CellNoise(keys, RUN, INPUTS)
        for (level, counts), (_, parts) in zip(
            exact_counts(w, PERSONS), measured(w, PERSONS), strict=True
        ):
            for part in parts:
                of = part.groups

                def draw(kind: Any, step: str, size: int, name: Any = level, of: Any = of) -> Any:
                    return noise.draw(kind, PERSONS.name, name.level, step, of, size)

                detail = PERSONS.details[part.detail]
                step = TOTAL if part.first is None else detail_step(part.detail)
                drawn = draw(part.noise, step, detail.size)
                assert (part.values - drawn == counts.cells(of, detail)).all()
                if part.first is not None:
                    assert part.first_noise is not None
                    totals = part.first - draw(part.first_noise, FIRST, 1)[:, 0]
                    assert (totals == counts.totals[of - counts.shard.first]).all()


def test_a_level_of_one_iteration_is_measured() -> None:
    w = world(200)
    level, counts = exact_counts(w, PERSONS, most=10**6)[0]
    alone = level._replace(iterations=level.iterations[:1], total_only=level.total_only[:1])
    kinds = draws(w.parameters, PERSONS, level.level, level.stability.groups)
    assert kinds is not None and not alone.total_only.any()
    with ring() as keys:
        parts = perturbed(
            alone, PERSONS, counts, kinds, (4.0, 15.0, 60.0), CellNoise(keys, RUN, INPUTS)
        )
    seen = sorted(group for part in parts for group in part.groups.tolist())
    assert seen == list(range(counts.shard.first, counts.shard.last)) and len(seen) > 1

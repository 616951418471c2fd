"""Thresholds of geometric noise: exact tails, and small streams enumerated with an adversary.

Streams are written here from mechanism.md, with noise of the definition.  The adversary adds units
of others after each output, as it likes: the excess is summed over outputs of the first step, and
for each the worst choice counts.
"""

import functools
import itertools
import math

import mpmath
import msgspec
import numpy as np
import numpy.typing as npt
import pytest
from typing_extensions import override

from dpstream.accounting.arrays import Float64, Int64
from dpstream.accounting.balls import ROUND_UP
from dpstream.accounting.budget.allocation import allocate
from dpstream.accounting.budget.key_tests import plain_thresholds
from dpstream.accounting.limits import DECODE_BITS
from dpstream.accounting.mechanisms.optimum import truncation
from dpstream.accounting.plan.plan import Plan
from dpstream.accounting.plan.timeline import growing
from dpstream.accounting.strategies.geometric import IDENTITY, GeometricStrategy
from dpstream.accounting.weights import MILD
from tests.accounting.plans import COUNT, MEAN, SUM, UNITS, build
from tests.golden.refusals import Refused
from tests.oracle.geometric_tails import tail_above

FAR = 60
Complex = npt.NDArray[np.complex128]


def masses(scale: float, far: int = FAR) -> Float64:
    """P[Z = z] for z = -far .. far."""
    weight = np.exp(-np.abs(np.arange(-far, far + 1)) / scale)
    return np.asarray(weight / weight.sum())


def of_steps(scale: float, steps: int) -> Float64:
    """P[Z_1 + ... + Z_steps = z] around 0."""
    out = np.ones(1)
    for _ in range(steps):
        out = np.convolve(out, masses(scale))
    return out


@functools.cache
def tails_of_steps(scale: float, steps: int) -> list[mpmath.mpf]:
    """P[Z_1 + ... + Z_steps > q] for q = -1, 0, ..., in 60 digits.

    The sum is the difference of two counts of failures before the ``steps``-th success.
    """
    with mpmath.workdps(60):
        ratio, last = mpmath.exp(-1 / mpmath.mpf(scale)), math.ceil(160 * scale) + 40
        law = [(1 - ratio) ** steps]
        for k in range(last):
            law.append(law[-1] * ratio * (k + steps) / (k + 1))
        above = list(itertools.accumulate(reversed(law)))[::-1]
        return [
            mpmath.fsum(p * more for p, more in zip(law, above[z:], strict=False))
            for z in range(last // 2)
        ]


@pytest.mark.parametrize("scale", [0.13, 0.4, 1.0, 1.5, 3.0])
@pytest.mark.parametrize("tests", [(1,), (1, 2), (2, 3, 9), tuple(range(1, 17))])
@pytest.mark.parametrize("tail", [1e-3, 1e-7, 1e-15])
def test_whole_thresholds_spend_all_of_the_chance(
    scale: float, tests: tuple[int, ...], tail: float
) -> None:
    """Tails of all tests add up to the chance of a key at most, and no threshold could be lower."""
    strategy = GeometricStrategy(tests[-1], IDENTITY)
    tau = plain_thresholds(strategy, scale, tail, 2, np.array(tests)) / 2.0**DECODE_BITS
    q = [math.floor(bound) - 3 for bound in tau.tolist()]
    laws = [tails_of_steps(scale, step) for step in tests]
    with mpmath.workdps(60):
        spent = mpmath.fsum(law[at + 1] for law, at in zip(laws, q, strict=True))
        assert spent <= mpmath.mpf(tail)
        for law, at in zip(laws, q, strict=True):
            assert at == 0 or spent + law[at] - law[at + 1] > mpmath.mpf(tail)
        assert scale < 1 or len(tests) < 3 or spent > 0.7 * mpmath.mpf(tail)


@pytest.mark.parametrize(
    ("triggers", "tests", "tail", "scale"),
    [(16, 16, 1e-3, 1e6), (100, 15, 1e-9, 1000.0), (40, 3, 1e-30, 1000.0), (24, 4, 1e-7, 200.0)],
)
def test_mixed_rows_spend_all_of_the_chance(
    triggers: int, tests: int, tail: float, scale: float
) -> None:
    strategy, at = GeometricStrategy(triggers), np.array(growing(triggers, tests))
    tau = plain_thresholds(strategy, scale, tail, 0, at) / 2.0**DECODE_BITS - 1
    rows = strategy.decoder[at - 1]
    spent = math.fsum(map(tail_of_nodes, rows, itertools.repeat(scale), tau.tolist()))
    assert 0.8 * tail < spent <= tail
    lower = math.fsum(map(tail_of_nodes, rows, itertools.repeat(scale), (0.98 * tau).tolist()))
    assert lower > tail


def tail_of_nodes(row: Float64, scale: float, least: float) -> float:
    """P[sum of row z > least] by its transform at an interval's middles, for many nodes.

    Off by less than 1e-6 of itself, as the sum of e^(-theta x) M(theta) times terms near 1.
    """
    weights = np.abs(row[row != 0])
    width = 100 / math.sqrt(2 * float((weights**2).sum())) / scale
    tilts = np.linspace(0.01, 0.995, 400) / (scale * weights.max())
    logs = node_moments(weights, scale, tilts.astype(np.complex128)) - tilts * least
    best = int(logs.real.argmin())
    points = tilts[best] + 1j * (np.arange(6_000) + 0.5) * width / 6_000
    terms = np.exp(node_moments(weights, scale, points) - points * least - logs[best]) / points
    return math.exp(logs[best].real) * float(terms.real.sum()) * width / 6_000 / math.pi


def node_moments(weights: Float64, scale: float, at: Complex) -> Complex:
    """log E[e^(at sum w z)]."""
    total = np.zeros(len(at), np.complex128)
    for weight in weights.tolist():
        up, down = np.expm1(weight * at - 1 / scale), np.expm1(-weight * at - 1 / scale)
        total += 2 * np.log(-np.expm1(-1 / scale)) - np.log(up * down)
    return total


@pytest.mark.parametrize("triggers", [3, 4])
def test_mixed_rows_pass_as_rarely_as_is_said(triggers: int) -> None:
    """Noise of three nodes, term by term; a bound that is a fifth lower does not hold."""
    scale, tail = 2.0, 1e-5
    numbers = np.zeros(1 + triggers * 3)
    numbers[0] = 1
    numbers[1 : 1 + triggers] = 2
    numbers[1 + triggers : 1 + 2 * triggers] = 1
    numbers[-1] = 0.75  # the last prefix is half of its steps and most of the mixed row
    strategy = GeometricStrategy(triggers, numbers)
    rows, at = strategy.decoder, np.array([2])
    tau = float(plain_thresholds(strategy, scale, tail, 0, at)[0]) / 2.0**DECODE_BITS
    weights = rows[1][np.abs(rows[1]) > 0]
    assert 1 < len(weights) <= 3
    total, chances = np.zeros(1), np.ones(1)
    for weight in weights.tolist():
        step = weight * np.arange(-FAR, FAR + 1)
        total = (total[:, None] + step).ravel()
        chances = np.outer(chances, masses(scale)).ravel()
    assert chances[1 + total > tau].sum() <= tail
    assert chances[1 + total > 0.8 * tau].sum() > tail


@pytest.mark.parametrize("scale", [0.3, 0.4, 0.7, 1.5, 4.0])
@pytest.mark.parametrize("numbers", [(1, 2, 2, 1, 1, 0, 1), (1, 1, 1, 1, 1, 0, 2)])
def test_rows_of_coarse_noise_pass_as_rarely_as_is_said(
    numbers: tuple[float, ...], scale: float
) -> None:
    """Whole numbers lie on their thresholds, where sums of Laplace variables pass half as often."""
    strategy = GeometricStrategy(2, np.array(numbers, np.float64))
    law = np.ones(1)
    for weight in np.abs(2 * strategy.decoder[1]).astype(np.int64).tolist():
        step = np.zeros(2 * FAR * weight + 1)
        step[:: max(weight, 1)] = masses(scale) if weight else 1.0
        law = np.convolve(law, step)
    value = (np.arange(len(law)) - len(law) // 2) / 2
    for tail in np.geomspace(1e-2, 1e-12, 40).tolist():
        tau = float(plain_thresholds(strategy, scale, tail, 0, np.array([2]))[0])
        least = tau / 2.0**DECODE_BITS - 1 - float(strategy.rounding[1])
        assert law[value > least].sum() <= tail


def test_a_mixed_row_is_not_taken_for_noise_of_steps() -> None:
    """Decoded noise that is wider than that of two steps: -2 z_1 - 2 z_2 + 3 z_3."""
    scale, tail = 1.0, 1e-4
    strategy = GeometricStrategy(2, np.array([1.0, 1, 1, 1, 1, 0, 3]))
    assert strategy.decoder[1].tolist() == [-2, -2, 3]
    tau = float(plain_thresholds(strategy, scale, tail, 0, np.array([2]))[0]) / 2.0**DECODE_BITS
    law, z = masses(scale), np.arange(-FAR, FAR + 1)
    doubled, tripled = np.zeros(6 * FAR + 1), np.zeros(6 * FAR + 1)
    doubled[2 * z + 3 * FAR], tripled[3 * z + 3 * FAR] = law, law
    chances = np.convolve(np.convolve(doubled, doubled), tripled)
    above = np.arange(len(chances)) - len(chances) // 2 + 1 > tau
    assert tail / 100 < chances[above].sum() <= tail
    # The sum of two steps passes the tail at less, which would select too often.
    steps = plain_thresholds(GeometricStrategy(2, IDENTITY), scale, tail, 0, np.array([2]))
    early = float(steps[0]) / 2.0**DECODE_BITS
    assert chances[np.arange(len(chances)) - len(chances) // 2 + 1 > early].sum() > 10 * tail


class CoarselyRounded(GeometricStrategy):
    """Noise that is published up to (1/4, 3) from its ideal."""

    @property
    @override
    def rounding(self) -> Float64:
        return np.array([0.25, 3.0])


@pytest.mark.parametrize("at", [[1], [2], [1, 2]])
def test_thresholds_leave_room_for_what_rounding_adds(at: list[int]) -> None:
    """A published count is up to D_t above the count whose tail is bounded: tau_t is D_t higher."""
    steps: Int64 = np.array(at)
    exact, coarse = (
        plain_thresholds(kind(2, IDENTITY), 1.5, 1e-5, 0, steps) / 2.0**DECODE_BITS
        for kind in (GeometricStrategy, CoarselyRounded)
    )
    added = np.array([0.25, 3.0])[steps - 1]
    assert np.abs(coarse - exact - added).max() <= 2 * 2.0**-DECODE_BITS
    # The rounding of the product is in its thresholds: q is whole and lies a part of a unit lower.
    assert (exact % 1 >= ROUND_UP / 2.0**DECODE_BITS).all()


# --- small streams ----------------------------------------------------------------------------

Joint = dict[str, Float64]
R, WIDE = 12, 16  # noise of a step, outcomes on either side of 0


def joint(
    own: tuple[int, int], tau: Float64, scale: float, extra: int, remembered: bool = False,
    noise: Float64 | None = None,
) -> Float64:  # fmt: skip
    """(outcomes, outcomes) chances of what two triggers tell of a key.

    Args:
        own: units by each trigger, of which ``extra`` more of others come for the second.
        known: published untested.
    """
    law = masses(scale, R) if noise is None else noise
    z = np.arange(-(len(law) // 2), len(law) // 2 + 1)
    first = own[0] + z  # noisy count at the first trigger
    second = own[1] + extra + z[:, None] + z
    chance = np.outer(law, law)
    none = 2 * WIDE + 1
    out = np.zeros((none + 1, none + 1))
    selected = np.full(len(z), remembered) | ((own[0] > 0) & (first > tau[0]))
    later = selected[:, None] | ((own[1] + extra > 0) & (second > tau[1]))
    one = np.where(selected, np.clip(first + WIDE, 0, none - 1), none)
    two = np.where(later, np.clip(second + WIDE, 0, none - 1), none)
    np.add.at(out, (np.repeat(one, len(z)), two.ravel()), chance.ravel())
    return out


def excess(before: list[Float64], after: list[Float64], epsilon: float) -> float:
    """The least delta, the worst choice of ``extra`` after each first outcome."""
    worst = [
        np.maximum(a - math.exp(epsilon) * b, 0).sum(axis=1)
        for a, b in zip(before, after, strict=True)
    ]
    return float(np.max(worst, axis=0).sum())


def worst_of_a_key(
    tau: Float64,
    scale: float,
    epsilon: float,
    remembered: bool = False,
    noise: Float64 | None = None,
) -> float:
    """Over counts of others, the trigger at which the unit comes, and both directions."""
    largest = 0.0
    for others, late in itertools.product((0, 1, 3), (0, 1)):
        counts = (others, others), (others + (not late), others + 1)
        one, other = (
            [joint(own, tau, scale, extra, remembered, noise) for extra in (0, 1, 2)]
            for own in counts
        )
        largest = max(largest, excess(one, other, epsilon), excess(other, one, epsilon))
    return largest


def test_two_triggers_and_one_key_with_an_adversary() -> None:
    scale, epsilon, delta = 1.0, 1.0, 0.1
    strategy = GeometricStrategy(2, IDENTITY)
    tau = plain_thresholds(strategy, scale, delta, 0, np.array([1, 2])) / 2.0**DECODE_BITS
    sound = worst_of_a_key(tau, scale, epsilon)
    assert sound <= delta + 1e-6 and sound > delta / 4
    lone = plain_thresholds(strategy, scale, delta, 0, np.array([1])) / 2.0**DECODE_BITS
    assert (lone[0] < tau).all()
    for changed in (tau - 2, np.minimum(tau, lone[0] - 1)):
        assert worst_of_a_key(changed, scale, epsilon) > delta
    # A remembered key costs its epsilon and no delta, and truncated noise would cost one.
    assert worst_of_a_key(tau, scale, epsilon, remembered=True) < 1e-5
    cut = masses(scale, truncation(scale, delta, 1).most)
    assert worst_of_a_key(tau, scale, epsilon, remembered=True, noise=cut) > 0.01
    # Half of the noise is not private at this epsilon, published or remembered.
    assert worst_of_a_key(tau, scale / 2, epsilon, remembered=True) > 0.1


def test_two_keys_of_a_unit_of_two() -> None:
    """All outcomes of both keys, and the adversary sees both: epsilon and delta of the whole."""
    scale, epsilon, delta = 2.0, 1.0, 0.2
    strategy = GeometricStrategy(2, IDENTITY)
    tau = plain_thresholds(strategy, scale, delta / 2, 0, np.array([1, 2])) / 2.0**DECODE_BITS
    assert both_keys(tau, scale, epsilon) <= delta
    assert both_keys(tau - 3, scale, epsilon) > delta


def both_keys(tau: Float64, scale: float, epsilon: float) -> float:
    largest = 0.0
    for starts in ((0, 0), (1, 0)):
        sides = []
        for unit in (0, 1):
            keys = [
                [joint((n + unit, n + unit), tau, scale, extra) for extra in (0, 1)] for n in starts
            ]
            sides.append(keys)
        for one, other in (sides, sides[::-1]):
            worst = None
            for a, b in itertools.product((0, 1), (0, 1)):
                p = np.einsum("ij,kl->ikjl", one[0][a], one[1][b])
                q = np.einsum("ij,kl->ikjl", other[0][a], other[1][b])
                part = np.maximum(p - math.exp(epsilon) * q, 0).sum(axis=(2, 3))
                worst = part if worst is None else np.maximum(worst, part)
            assert worst is not None
            largest = max(largest, float(worst.sum()))
    return largest


# --- budgets --------------------------------------------------------------------------------------


def plain(triggers: int = 1, **settings: object) -> Plan:
    given = {"strategy": "geometric", "contributions": 2, "epsilon": 2.0, "delta": 1e-7}
    return build(triggers, **(given | settings))  # type: ignore[arg-type]


def test_one_trigger_has_truncated_noise_of_the_published_count() -> None:
    budget = allocate(plain(per_key_bound=1))
    [count] = budget.values
    assert budget.selection == count and budget.streams == (count,) and budget.plain
    assert (count.scale, count.share) == (1.0, 1.0)
    assert (count.most, count.sooner) == truncation(1.0, 1e-7, 2)
    assert budget.tau is not None and budget.tau.tolist() == [count.most << DECODE_BITS]
    assert budget.delta == 1e-7 and 2 * budget.b <= 1e-7 < 2 * budget.b * (1 + 1e-9)
    later = allocate(plain(per_key_bound=1, pre_threshold=3))
    assert later.tau is not None and later.tau.tolist() == [(count.most + 3) << DECODE_BITS]


def test_a_count_of_units_is_tested_or_paid() -> None:
    units = allocate(plain(aggregates=(UNITS, SUM)))
    assert units.selection is units.units and units.selection is not None
    assert units.selection.most and [noise.most for noise in units.values] == [0]
    assert [noise.share for noise in units.streams] == [0.5, 0.5]
    paid = allocate(plain(aggregates=(COUNT, MEAN)))
    assert paid.selection is not None and paid.selection.name == "selection"
    assert sum(noise.share for noise in paid.streams) == pytest.approx(1)
    assert [noise.most > 0 for noise in paid.streams] == [True] + [False] * len(paid.values)


def test_no_unit_spends_more_than_epsilon() -> None:
    """n keys of at most C pairs: a count of units by 1 in each, other columns by L a pair."""
    for settings in ({"per_key_bound": 1}, {"aggregates": (UNITS, SUM)}, {"aggregates": (MEAN,)}):
        for triggers in (1, 8):
            chosen = plain(triggers, contributions=4, **settings)
            budget = allocate(chosen)
            most = {s.name: s.sensitivity for s in chosen.design.streams}
            spent = 0.0
            for noise in budget.streams:
                columns = np.abs(noise.strategy_object.matrix()).sum(axis=0).max()
                spent += 4 * most.get(noise.name, 1) * columns / noise.scale
            assert 0.999 * 2 < spent <= 2 * (1 + 1e-12)


def test_several_triggers_have_noise_that_is_not_truncated() -> None:
    budget = allocate(plain(4, per_key_bound=1))
    assert budget.selection == budget.values[0] and budget.selection.most == 0
    assert budget.tau is not None and len(budget.tau) == 4
    few = allocate(plain(8, per_key_bound=1, select_every=4))
    assert few.tau is not None and len(few.tau) == 2 and few.streams == few.values
    once = allocate(plain(8, select_every=8))
    assert once.selection is not None and once.selection.most and len(once.tau or ()) == 1


@pytest.mark.parametrize("tests", [(2, 5, 9), (1, 9), (3, 6, 8, 9)])
def test_a_published_count_is_tested_at_few_of_its_steps(tests: tuple[int, ...]) -> None:
    """By the law of its noise at each test, in the inversion integral."""
    job = plain(9, per_key_bound=1, tests=tests)
    budget = allocate(job)
    noise, tau = budget.selection, budget.tau
    assert noise is not None and noise is budget.values[0] and noise.triggers == 9
    assert tau is not None and len(tau) == len(tests) and noise.most == 0
    above = tau / 2.0**DECODE_BITS - 1
    spent, more = (
        sum(tail_above(noise, step, least) for step, least in zip(tests, q, strict=True))
        for q in (above.tolist(), (above - 1).tolist())
    )
    assert spent <= 1.01 * budget.b < more
    # Thresholds of the first steps would let too much pass at the tests.
    first = plain_thresholds(noise.strategy_object, noise.scale, budget.b, 0, np.arange(1, 4))  # type: ignore[arg-type]
    early = float(first[0]) / 2.0**DECODE_BITS - 1
    assert tail_above(noise, 9, early) > budget.b


@pytest.mark.parametrize("strategy", ["geometric", "blt", "tree"])
def test_what_is_published_once_is_noised_once(strategy: str) -> None:
    """A single test at the close: columns have the noise of a window with one trigger.  Not where
    later windows publish what was remembered at each refresh."""
    kind = {"per_key_bound": 1, "strategy": strategy, "aggregates": (COUNT, SUM)}
    one, late = (allocate(plain(t, tests=(t,), **kind)) for t in (1, 16))
    assert [noise.triggers for noise in late.streams] == [1] * len(late.streams)
    for ours, theirs in zip(late.values, one.values, strict=True):
        assert ours.sd.tolist() == theirs.sd.tolist()
    assert late.tau is not None and one.tau is not None and late.tau.tolist() == one.tau.tolist()
    several = allocate(plain(16, tests=2, **kind))
    assert [noise.triggers for noise in several.values] == [16, 16]
    again = allocate(plain(16, windows=3, tests=(16,), **kind))
    assert [noise.triggers for noise in again.values] == [16, 16]


def test_what_is_made_for_gaussian_noise_is_refused(refused: Refused) -> None:
    gaussian: tuple[dict[str, object], ...] = (
        {"weights": MILD, "contributions": 9}, {"skip": True, "weights": MILD},
        {"delta": 0.0}, {"periods_share_windows": True},
    )  # fmt: skip
    for settings in gaussian:
        refused(lambda changed=settings: plain(4, **changed).check())


def test_numbers_are_committed_and_read_back() -> None:
    from dpstream.accounting.budget.calibration import calibrate, calibrated

    chosen = plain(per_key_bound=1)
    text = calibrate(chosen)
    budget = calibrated(chosen, text).budget
    assert budget.selection == budget.values[0] and budget.plain
    fresh = allocate(chosen)
    for ours, theirs in zip(fresh.streams, budget.streams, strict=True):
        same = msgspec.structs.replace(theirs, encoder=ours.encoder)
        assert same == ours


def test_steps_of_a_wide_scale_need_no_convolution() -> None:
    strategy = GeometricStrategy(4, IDENTITY)
    steps: Int64 = np.arange(1, 5)
    narrow, wide = (
        plain_thresholds(strategy, scale, 1e-9, 0, steps) / 2.0**DECODE_BITS / scale
        for scale in (100.0, 1e6)
    )
    assert np.allclose(narrow, wide, rtol=0.08) and (wide >= narrow - 0.02).all()


@pytest.mark.parametrize("steps", [1, 2, 3])
def test_a_tail_that_is_exceeded_by_little_has_the_next_threshold(steps: int) -> None:
    """Chances of sums in 40 digits: a q that passes 3e-10 more often than the tail is too low."""
    with mpmath.workdps(40):
        ratio = mpmath.exp(-1 / mpmath.mpf(1.5))
        one = {z: ratio ** abs(z) * (1 - ratio) / (1 + ratio) for z in range(-90, 91)}
        law = {0: mpmath.mpf(1)}
        for _ in range(steps):
            total: dict[int, mpmath.mpf] = {}
            for (n, p), (z, w) in itertools.product(law.items(), one.items()):
                total[n + z] = total.get(n + z, mpmath.mpf(0)) + p * w
            law = total
        q = 12
        above = mpmath.fsum(p for z, p in law.items() if z > q)
        exceeded, fits = (float(above * (1 + part)) for part in (-3e-10, 1e-3))
    strategy, at = GeometricStrategy(steps, IDENTITY), np.array([steps])
    tau = [
        float(plain_thresholds(strategy, 1.5, tail, 0, at)[0]) / 2.0**DECODE_BITS
        for tail in (exceeded, fits)
    ]
    assert [math.floor(bound) - 1 for bound in tau] == [q + 1, q]

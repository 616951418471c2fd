"""What must hold of a run, and of two runs on neighbouring streams; each breach by its rule."""

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from fractions import Fraction

import numpy as np
from scipy.stats import chi2, norm

from dpstream.accounting.gaussian import delta_of
from dpstream.accounting.limits import DECODE_BITS
from dpstream.dp_transforms.noise.paths import NoiseStream
from dpstream.dp_transforms.noise.prf import KeyRing
from tests.audit import encoders
from tests.audit.neighbours import Pair
from tests.audit.recorder import Row, Trace
from tests.audit.reference import (
    KeyRun,
    Mechanism,
    Streams,
    Transcript,
    key_ring,
    page_id,
    replay,
    sampler_of,
    streams_of,
)
from tests.dp_transforms.reference import bounds_keys, remembered_keys

#: sd of a node by (role, stream).
Sigmas = Mapping[tuple[str, str], float]

#: A statistical check fails below this chance, so that honest runs never do.
SMALLEST_P = 1e-6


def run_problems(mechanism: Mechanism, trace: Trace) -> Iterator[str]:
    """Breaches within one run: bound, counts, steps, selection, calendar, noise."""
    plan, budget = mechanism.plan, mechanism.budget
    pairs = Counter(row.unit for row in trace.rows)
    if any(n > plan.privacy.contributions for n in pairs.values()):
        yield "bound: a unit has more than C pairs"
    limits = [spec.sensitivity for spec in mechanism.values if spec.column is not None]
    if any(abs(v) > most for row in trace.rows for v, most in zip(row.values, limits, strict=True)):
        yield "sensitivity: a record adds more than L to a stream"
    if trace.clashes:
        yield "noise: a node was named or drawn twice with different results"
    if len(set(trace.names.values())) != len(trace.names):
        yield "names: two trees have one name"
    if {path[1:3] for path in trace.names} - mechanism.labels:
        yield "noise: a stream is drawn that the plan does not have"
    if trace.tau and _too_likely(mechanism, trace.tau):
        yield "threshold: lower than a union bound over tests and keys allows"
    if budget.selection is not None and mechanism.steps("selection") > 1:
        spent = delta_of(budget.epsilon, budget.mu) + plan.privacy.contributions * budget.b
        if spent > budget.delta:
            yield "budget: the deltas do not add up"
    per_key = Counter((row.unit, row.window, row.page) for row in trace.rows)
    most = plan.privacy.per_key_bound or plan.privacy.contributions
    if bounds_keys(plan) and any(n > most for n in per_key.values()):
        yield "bound: a unit has more than k pairs of a (window, key)"
    firsts = Counter((r.unit, r.window, r.page) for r in trace.rows if r.rank >= 0)
    if bounds_keys(plan) and (firsts.keys() != per_key.keys() or max(firsts.values()) > 1):
        yield "rank: not one pair of each (unit, window, key) is the first"
    # With a bound per key and what is published skipped every pair is a first one, of rank 0.
    apart = plan.design.skips and not plan.design.packs_indices
    if plan.design.ranked and not apart and not _ranked(trace):
        yield "rank: not the number of the unit's pairs admitted before"
    if plan.design.skips:
        yield from sorted(set(_indices(mechanism, trace)))
    runs = replay(mechanism, trace.rows)
    yield from _against(mechanism, trace, runs)


def _admission(row: Row) -> tuple[tuple[int, int, int], int]:
    """Order of a unit's pairs where all records are there in time."""
    return row.order, row.window


def _ranked(trace: Trace) -> bool:
    """Whether every unit's pairs are ranked 0, 1, 2, ... in the order of admission."""
    by_unit: dict[bytes, list[tuple[tuple[int, int, int], int, int]]] = {}
    for row in trace.rows:
        by_unit.setdefault(row.unit, []).append((row.order, row.window, row.rank))
    # With a bound per key only first pairs have one.
    ranks = ([rank for *_, rank in sorted(rows) if rank >= 0] for rows in by_unit.values())
    return all(order == list(range(len(order))) for order in ranks)


def decided(mechanism: Mechanism, row: Row) -> int:
    """Trigger time at which a pair was decided: all records are there in time."""
    return max(1, int(mechanism.plan.timeline.trigger_time_of(np.array([row.order[0]]))[0]))


def _indices(mechanism: Mechanism, trace: Trace) -> Iterator[str]:
    """Weights are taken in order, by pairs on keys that no release before them has named."""
    base, first = mechanism.plan.timeline.base, dict[tuple[int, str], int]()
    for (window, trigger), rows in trace.released.items():
        for page in rows:
            time = base(window) + trigger
            first[window, page] = min(time, first.get((window, page), time))
    by_unit: dict[bytes, list[Row]] = {}
    remembered = remembered_keys(mechanism.plan, first)
    for row in trace.rows:
        by_unit.setdefault(row.unit, []).append(row)
        published = first.get((row.window, row.page), 1 << 40) < decided(mechanism, row)
        if row.page in remembered[row.window]:
            published |= base(row.window) < decided(mechanism, row)
        if published != (row.index < 0):
            yield "index: a pair does not know what was published before it, and no more"
    for own in by_unit.values():
        taken = [row.index for row in sorted(own, key=_admission) if row.index >= 0]
        if taken != list(range(len(taken))):
            yield "index: a unit's weights are not each taken once, in order"


def _too_likely(mechanism: Mechanism, taus: list[int]) -> bool:
    """Whether a unit's own keys pass some test with more than its part of C b, by another
    library's tails.

    The statistic is a (weighted count) + d (plain count): the pair of index i adds at most
    a w_i + d, the noises are independent, and their rounding bounds add up.  A unit's keys have
    different indices, unless one person is several units of a window.
    """
    plan, budget = mechanism.plan, mechanism.budget
    assert budget.selection is not None and budget.statistic is not None
    tests = [t for t in _triggers(mechanism) if mechanism.tested(t)]
    a, d = budget.statistic.weighted, 0
    variance = (a * budget.selection.sd) ** 2
    rounding = a * budget.selection.strategy_object.rounding
    if mechanism.plain_count is not None:
        d, plain = budget.statistic.counted, mechanism.noise_of(mechanism.plain_count)
        at = np.array(tests) - 1
        variance = variance + (d * plain.sd[at]) ** 2
        rounding = rounding + d * plain.strategy_object.rounding[at]
    count, units = plan.privacy.contributions, 1
    weights = np.ones(count) if mechanism.weights is None else np.array(mechanism.weights)
    adds = a * weights + d
    if plan.privacy.periods_share_windows:
        units = plan.timeline.periods_met
        adds = np.full(count, adds[0])
    others = (plan.privacy.pre_threshold + units - 1) * adds[0]
    above = np.array(taus) / (1 << DECODE_BITS) - others - rounding
    chances = norm.sf((above[:, None] - adds) / np.sqrt(variance)[:, None]).sum(axis=1)
    parts = np.full(len(tests), 1 / len(tests))
    published = mechanism.weights is None and plan.design.units_column is not None
    if not published:
        parts[:-1], parts[-1] = 0.5 / max(1, len(tests) - 1), 0.5 if len(tests) > 1 else 1.0
    return bool((chances > count * budget.b * parts * (1 + 1e-9)).any())


def _against(
    mechanism: Mechanism, trace: Trace, runs: dict[tuple[int, str], KeyRun]
) -> Iterator[str]:
    """The product's states and releases against the reference's."""
    plan = mechanism.plan
    wrong: set[str] = set()
    for (window, page), run in runs.items():
        for trigger in range(1, plan.timeline.triggers + 1):
            name = (window, page, trigger)
            if name in trace.counts:  # a key has a state from its first record on
                if trace.counts[name] != run.counts[trigger - 1]:
                    wrong.add("counts: a state is not what the admitted pairs add up to")
                if trace.selected_after[name] != run.selected_after[trigger - 1]:
                    wrong.add("selection: a key is not selected when the test says so")
            elif any(run.counts[trigger - 1][1]) or run.counts[trigger - 1][0]:
                wrong.add("counts: a key with data has no state")
            have = trace.released.get((window, trigger), {}).get(page)
            want = run.published.get(trigger)
            if (have is None) != (want is None):
                wrong.add("calendar: a key is not published exactly when the calendar says")
            elif have is not None and want is not None and not _equal(have, want):
                wrong.add("noise: a released value is not the decoded prefix")
    published = {(w, p, t) for (w, t), rows in trace.released.items() for p in rows}
    expected = {(w, p, t) for (w, p), run in runs.items() for t in run.published}
    if published - expected:
        wrong.add("calendar: a key is published that should not be")
    names = {(w, t) for w in range(plan.timeline.windows) for t in _triggers(mechanism)}
    if set(trace.released) != names:
        wrong.add("calendar: not one sealed release for each (window, trigger)")
    yield from sorted(wrong)


def _triggers(mechanism: Mechanism) -> range:
    return range(1, mechanism.plan.timeline.triggers + 1)


def _equal(have: dict[str, float], want: dict[str, float]) -> bool:
    return all(
        (have[name] is None and math.isnan(value))
        or (have[name] is not None and math.isclose(have[name], value, rel_tol=1e-12, abs_tol=1e-9))
        for name, value in want.items()
    )


def pair_problems(mechanism: Mechanism, pair: Pair, without: Trace, added: Trace) -> Iterator[str]:
    """Breaches between the runs on D (without the unit) and D' (with it)."""
    have, with_unit = without.admitted(), added.admitted()
    mine = {record.serial for record in pair.unit}
    if have != {serial: at for serial, at in with_unit.items() if serial not in mine}:
        yield "others: another record's admission, window or step moved"
    if any(without.names[n] != added.names[n] for n in without.names.keys() & added.names.keys()):
        yield "names: a tree has another name on a neighbour"
    both = without.draws.keys() & added.draws.keys()
    if any(without.draws[n] != added.draws[n] for n in both):
        yield "noise: a node has other noise on a neighbour"
    if mechanism.plan.design.skips:
        yield from _pair_that_skips(mechanism, mine, without, added)
        return
    for trace in (without, added):
        transcript = transcript_of(trace)
        x = streams_of(mechanism, without.rows, transcript)
        y = streams_of(mechanism, added.rows, transcript)
        yield from sorted({*_sensitivity(mechanism, x, y, trace.sigmas)})
    x, y = _observed(mechanism, without, added), _observed(mechanism, added, without)
    yield from sorted({*_sensitivity(mechanism, x, y, added.sigmas)})


def _pair_that_skips(
    mechanism: Mechanism, mine: set[int], without: Trace, added: Trace
) -> Iterator[str]:
    """As far as outputs are equal: what is skipped follows them, also of others' pairs."""
    timeline = mechanism.plan.timeline
    times = {
        (w, t): timeline.base(w) + t for w in range(timeline.windows) for t in _triggers(mechanism)
    }
    same = min(
        (
            time
            for name, time in times.items()
            if without.released[name].keys() != added.released[name].keys()
        ),
        default=timeline.last_trigger_time,
    )
    here, there = (
        {(r.serial, r.window): r.index for r in t.rows if decided(mechanism, r) <= same}
        for t in (without, added)
    )
    if here != {name: index for name, index in there.items() if name[0] not in mine}:
        yield "others: another unit takes other weights though outputs are equal"
    cut = [
        [r for r in t.rows if timeline.base(r.window) + r.step_index <= same]
        for t in (without, added)
    ]
    transcript = transcript_of(added)
    x, y = (streams_of(mechanism, rows, transcript) for rows in cut)
    yield from sorted({*_sensitivity(mechanism, x, y, added.sigmas)})
    x, y = _observed(mechanism, without, added, same), _observed(mechanism, added, without, same)
    yield from sorted({*_sensitivity(mechanism, x, y, added.sigmas)})


def transcript_of(trace: Trace) -> Transcript:
    """Selections of a run, from its states."""
    out: dict[tuple[int, str], list[int]] = {}
    for window, page, trigger in sorted(trace.selected_after):
        seen = out.setdefault((window, page), [])
        if trace.selected_after[window, page, trigger] and not seen:
            seen.append(trigger)
    return out


def _observed(mechanism: Mechanism, trace: Trace, other: Trace, same: int | None = None) -> Streams:
    """x as the product's own states moved, as far as both runs have the same transcript.

    Where selected keys are remembered, a key's selection in one window is input of the others.

    Args:
        same: the trigger time that ends it for all keys; ``None``: each key's own transcript does.
    """
    plan, out = mechanism.plan, Streams()
    mine, theirs = transcript_of(trace), transcript_of(other)
    triggers, base = plan.timeline.triggers, plan.timeline.base
    splits = {
        name: _split(mine.get(name, []), theirs.get(name, []))
        for name in mine.keys() | theirs.keys()
    }
    parted = dict[str, int]()  # the first trigger time at which a key's transcripts differ
    for (window, page), split in splits.items():
        if split is not None and plan.design.remembers:
            parted[page] = min(parted.get(page, base(window) + split), base(window) + split)
    for window, page in {(w, p) for w, p, _ in trace.counts}:
        split = splits.get((window, page))
        upto = triggers if split is None or same is not None else split
        last = parted.get(page) if same is None else same
        if last is not None:
            upto = min(upto, last - base(window))
        before = (0, (0,) * mechanism.plan.design.sums)
        for trigger in range(1, upto + 1):
            now = trace.counts.get((window, page, trigger))
            if now is None:
                continue
            moved = {f"value {spec.name}": i for i, spec in enumerate(mechanism.values)}
            if mechanism.weights is not None:
                moved["selection"] = -1
            for stream, i in moved.items():
                inputs = out.setdefault((window, page, stream), [0] * mechanism.steps(stream))
                inputs[mechanism.step_index(stream, trigger) - 1] += now[1][i] - before[1][i]
            units = mechanism.plain_units
            if units is not None and now[0] != before[0]:
                inputs = out.setdefault((window, page, units), [0] * mechanism.steps(units))
                inputs[mechanism.step_index(units, trigger) - 1] += now[0] - before[0]
            before = now
    return out


def _split(here: list[int], there: list[int]) -> int | None:
    """The first trigger at which one of two transcripts of a key has a selection alone."""
    split = next((min(a, b) for a, b in zip(here, there, strict=False) if a != b), None)
    if split is None and len(here) != len(there):
        longer = here if len(here) > len(there) else there
        split = longer[min(len(here), len(there))]
    return split


def _sensitivity(mechanism: Mechanism, x: Streams, y: Streams, sigmas: Sigmas) -> Iterator[str]:
    """The joint cost sum |A (x - x')|^2 / sigma^2 and every stream's own, in rationals.

    Args:
        sigmas: of the noise that was in use, by (role, name).
    """
    budget = mechanism.budget
    by_stream: dict[str, Fraction] = {}
    in_trees: dict[str, list[int]] = {}
    for name in x.keys() | y.keys():
        zero = [0] * mechanism.steps(name[2])
        encoder = encoders.matrix(mechanism.encoding(name[2]))
        pairs = zip(x.get(name, zero), y.get(name, zero), strict=True)
        moved = {step_index: a - b for step_index, (a, b) in enumerate(pairs) if a != b}
        if moved:
            nodes = (sum(row[step_index] * v for step_index, v in moved.items()) for row in encoder)
            squared = sum((v * v for v in nodes), Fraction(0))
            by_stream[name[2]] = by_stream.get(name[2], Fraction(0)) + squared
            in_trees.setdefault(name[2], []).append(sum(map(abs, moved.values())))
    cost = Fraction(0)
    for stream, squared in by_stream.items():
        yield from _own_bounds(mechanism, stream, squared, in_trees[stream])
        noise = mechanism.noise_of(stream)
        role = stream.split(maxsplit=1)[0]
        cost += squared / Fraction(sigmas.get((role, noise.name), noise.sigma)) ** 2
    if cost > Fraction(budget.mu) ** 2:
        yield "sensitivity: the joint cost exceeds mu^2"


def _own_bounds(
    mechanism: Mechanism, stream: str, squared: Fraction, in_trees: list[int]
) -> Iterator[str]:
    """One stream: in all, in each of its trees, and (units) in any number of trees.

    Args:
        in_trees: sum of |x - x'| of each (window, key) that moved.
    """
    count, per_key = mechanism.plan.privacy.contributions, mechanism.plan.privacy.per_key_bound
    col2 = Fraction(mechanism.noise_of(stream).col2)
    if stream.startswith("value "):
        most = mechanism.values[mechanism.value_index(stream)].sensitivity
        full, rest = divmod(count, min(per_key or count, count))
        bound = most**2 * (full * min(per_key or count, count) ** 2 + rest**2)
        if per_key and (max(in_trees) > most * per_key or sum(in_trees) > most * count):
            yield "sensitivity: a unit moves the values of one key by more than k records"
    else:
        alone = (1,) * count
        if stream == "selection" and mechanism.weights is not None:
            alone = mechanism.weights
        bound = sum(w * w for w in alone)
        if max(in_trees) > alone[0]:
            yield "sensitivity: a unit moves the units of one (window, key) by more than one"
        # n keys take n different pairs of the unit: the n largest at most.
        if sum(v * v for v in in_trees) > sum(w * w for w in alone[: len(in_trees)]):
            yield "sensitivity: pairs of a unit do not each have a weight of their own"
    if squared > bound * col2:
        yield f"sensitivity: {stream.split(maxsplit=1)[0]} exceeds the plan's"


def name_problems(mechanism: Mechanism) -> Iterator[str]:
    """The name of a tree must depend on the secret key and on every part of its name."""
    plan, (other, window) = mechanism.plan, (KeyRing(b"other" + bytes(27)), (0, 1))
    name_ = f"value {mechanism.values[0].name}" if mechanism.values else "selection"
    noise = mechanism.noise_of(name_)
    sampler = sampler_of(noise.sigma, noise.strategy_object.rounds_nodes)
    page, run = page_id("k0"), (b"run", b"epoch", bytes.fromhex(plan.hash))
    seen = set()
    for ring, name, bounds, role in (
        (key_ring(), run, window, "value"),
        (other, run, window, "value"),
        (key_ring(), (b"RUN", *run[1:]), window, "value"),
        (key_ring(), (run[0], b"EPOCH", run[2]), window, "value"),
        (key_ring(), (*run[:2], b"PLAN"), window, "value"),
        (key_ring(), run, (0, 2), "value"),
        (key_ring(), run, window, "units"),
    ):
        stream = NoiseStream(ring, name, bounds, role, noise, sampler)
        seen.add(stream.names(page).tobytes())
    if len(seen) != 7:
        yield "names: a name leaves out a part, or the secret key"


def scale_problems(mechanism: Mechanism, traces: list[Trace]) -> Iterator[str]:
    """Draws of every stream against its sigma: a chi-square of their squares, both tails."""
    squares: dict[str, list[float]] = {}
    for trace in traces:
        by_name = {tweak: path for path, tweak in trace.names.items()}
        for (tweak, _), value in trace.draws.items():
            _, role, name, _ = by_name[tweak]
            if (role, name) not in mechanism.labels:
                continue
            stream = f"value {name}" if role == "value" else role
            sigma = mechanism.noise_of(stream).sigma
            # A rounded Gaussian has variance sigma^2 + 1/12 (to 1e-4 at these sigmas).
            rounding = 1 / 12 if mechanism.plan.privacy.strategy not in ("blt", "dense") else 0.0
            squares.setdefault(stream, []).append(value**2 / (sigma**2 + rounding))
    for stream, values in squares.items():
        total, size = math.fsum(values), len(values)
        if min(chi2.sf(total, size), chi2.cdf(total, size)) * 2 < SMALLEST_P:
            yield f"scale: the noise of {stream.split()[0]} has another sd"

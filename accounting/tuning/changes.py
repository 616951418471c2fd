"""The effects of one change of the job: fewer triggers, another C, fewer columns, public keys.

Unlike ``starred`` these change what is published, when, or of which records; each is one change of
the job that works as it is written, all else as it is.  What the job cannot be run with is
left out.  Ratios are those of the public reference population (``reference``).
"""

import math
from collections.abc import Callable, Iterator
from typing import Any

import msgspec

from dpstream.accounting.aggregates import kind_of
from dpstream.accounting.budget.allocation import allocate
from dpstream.accounting.errors import DpstreamError
from dpstream.accounting.fields import job_field
from dpstream.accounting.figures import exact
from dpstream.accounting.limits import MAX_CONTRIBUTIONS, MICROS_PER_SECOND
from dpstream.accounting.plan.plan import Plan, with_privacy
from dpstream.accounting.tuning.reference import (
    ReferenceFigures,
    mean_contributions,
    reference_figures,
)
from dpstream.accounting.tuning.starred import Way, Ways, usual
from dpstream.accounting.weights import STEEP, SelectionWeights

# Settings and changes of a job in the words of its file.


def per_key_text(bound: int | None) -> str:
    """Return the effect of a bound per key on the figures, as text."""
    if bound is None:
        return "every record counts"
    what = "one record of a unit counts" if bound == 1 else f"{bound} records of a unit count"
    return f"{what} per key"


def duration_text(micros: int) -> str:
    """Return a length of time as a job writes it."""
    names = (("d", 86_400), ("h", 3_600), ("m", 60), ("s", 1))
    for name, seconds in names:
        number, rest = divmod(micros, seconds * MICROS_PER_SECOND)
        if number and not rest:
            return f"{number}{name}"
    return f"{micros}us"


def written(settings: dict[str, Any]) -> dict[str, Any]:
    """Return settings of a plan as a job has them, where equal weights have a name."""
    equal = {"mechanism.weights": "uniform"}
    return {k: equal.get(k) if v is None else v for k, v in settings.items()}


def settings_text(settings: dict[str, Any]) -> str:
    """Return settings as a job writes them."""
    return ", ".join(_word(field, value) for field, value in settings.items())


def _word(field: str, value: Any) -> str:
    table, _, name = field.partition(".")
    if table == "aggregate":
        return f"without column '{name}'"
    if value is None:
        return f"no {field}"
    return f"{field} = {toml(value)}"


def toml(value: Any) -> str:
    """Return a value as TOML writes it."""
    if isinstance(value, SelectionWeights) and value.size_share is not None:
        return f"{{ size_share = {exact(value.size_share)} }}"
    if isinstance(value, SelectionWeights):
        return f"{{ offset = {exact(value.offset)}, power = {exact(value.power)} }}"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return f'"{value}"'
    return exact(value) if isinstance(value, float) else str(value)


#: Bounds per key that are looked at.
PER_KEY_BOUNDS = (None, 1, 2, 4)
#: A change helps if it is worse in neither figure, and better by this factor in both together.
_HELPS = 1.03
#: A change of less than this in both figures is none.
_NOTHING = 0.005
#: In an effect: where the ratio of early keys stands, once it is known.
_BY_THEN = "{by then}"
#: A digest for what has none yet: the list of keys that somebody would write.
_SOME_LIST = "0" * 32


class Change(msgspec.Struct, frozen=True):
    """One change of a job.

    Attributes:
        settings: dotted fields of the job and their values; ``None``: left out.
        text: the same as a person writes it; effect: what else is different then.
        keys: expected keys over the job's; ``None``: all keys of a list, whatever the data.
        early: the same by a tenth of the window; ``None``: not known, or no keys by then.
        noise: root mean square of the remaining columns' sds (``typical_sd``) over the job's.
        cut: share of the reference's records that no longer count.
        another: another figure is counted, of fewer records of a unit in a key or more.
        same: the same figures are published of the same records; only their noise differs.
        starred: the way to noise the job as it stands that is recommended; of one line only.
    """

    settings: dict[str, Any]
    text: str
    effect: str
    keys: float | None
    noise: float
    cut: float = 0.0
    another: bool = False
    same: bool = False
    starred: bool = False
    early: float | None = None

    @property
    def gain(self) -> float:
        """The expected keys over noise; 0 where nothing is known."""
        gain = (self.keys or 1.0) / self.noise
        return gain if math.isfinite(gain) else 0.0

    @property
    def helps(self) -> bool:
        """Return whether it is better for any data: no figure worse, the same records, no list
        needed.
        """
        if self.cut or self.another or self.keys is None:
            return False
        return self.keys >= 0.995 and self.noise <= 1.005 and self.gain >= _HELPS


def changes(plan: Plan, ways: Ways) -> list[Change]:
    """Return the ways to noise the job unchanged, the starred one first, then other changes by
    gain.
    """
    rows = [_change_of_way(plan, ways.starred, starred=True)]
    for way, effect in (
        (ways.fuller, "more keys, no more noise"),
        (ways.quieter, "less noise, no fewer keys"),
    ):
        row = None if way is None else _change_of_way(plan, way, effect)
        if row is not None and all(row.settings != other.settings for other in rows):
            rows.append(row)
    own = reference_figures(plan, allocate(plan))
    others = [row for other in _others(plan) if (row := _row(plan, own, *other)) is not None]
    return [*rows, *sorted(others, key=lambda row: -row.gain)]


def _change_of_way(plan: Plan, way: Way, effect: str = "", starred: bool = False) -> Change:
    settings = written({job_field(field): value for field, value in way.settings.items()})
    if starred:
        effect = "nearly the most keys, with the least noise for that"
        if not plan.design.selects:
            effect = "the least noise"
        if not settings:
            effect = "the job as it is"
    return Change(
        settings, settings_text(settings), effect, way.keys, way.noise, same=True, starred=starred
    )


def _row(
    plan: Plan,
    own: ReferenceFigures,
    settings: dict[str, Any],
    effect: str,
    change: Callable[[], Plan],
) -> Change | None:
    """One change, or ``None`` where the job cannot be run so, or gets the same."""
    try:
        other = change()
        figures = reference_figures(other, allocate(other), plan.privacy.contributions)
    except DpstreamError:
        return None
    keys: float | None = figures.keys_against(own) if plan.design.selects else 1.0
    if keys is not None and not math.isfinite(keys):
        keys = None
    noise = figures.noise_against(own)
    if keys is not None and max(abs(keys - 1), abs(noise - 1)) < _NOTHING:
        return None
    settings = written(settings | _explicit_weights(plan, other))
    cut = 1 - mean_contributions(other.privacy.contributions) / mean_contributions(
        plan.privacy.contributions
    )
    another = other.privacy.per_key_bound != plan.privacy.per_key_bound
    early = figures.early_against(own)
    if _BY_THEN in effect:
        ratio_text = "no" if not early else f"x{early:.2g}"
        effect = effect.replace(_BY_THEN, f"{ratio_text} keys by a tenth of the window")
    words = settings_text(settings)
    return Change(settings, words, effect, keys, noise, max(cut, 0.0), another, early=early)


def _explicit_weights(plan: Plan, other: Plan) -> dict[str, Any]:
    """Weights that the job may not name, where it would get others by the change unless it does."""
    weights = other.privacy.weights
    unnamed = plan.privacy.weights == usual(plan)
    if weights == (usual(other) if unnamed else plan.privacy.weights):
        return {}
    return {"mechanism.weights": weights}


Other = tuple[dict[str, Any], str, Callable[[], Plan]]


def _others(plan: Plan) -> Iterator[Other]:
    yield from _triggers(plan)
    yield from _tests(plan)
    yield from _bounds(plan)
    yield from _columns(plan)
    yield from _keys(plan)


def _triggers(plan: Plan) -> Iterator[Other]:
    """Fewer triggers: at the window's end alone, and about a quarter."""
    timeline = plan.timeline
    longest = math.gcd(
        timeline.window, timeline.slide, timeline.allowed_lateness, timeline.period or 0
    )
    times = longest // timeline.trigger_every
    if times < 2:
        return
    divisors = [m for m in range(2, times) if times % m == 0 and m <= 4]
    for factor in (times, *divisors[-1:]):
        every = timeline.trigger_every * factor
        once = (timeline.window + timeline.allowed_lateness) // every == 1
        effect = "published once, at the window's end" if once else "published less often"

        def change(every: int = every) -> Plan:
            changed = msgspec.structs.replace(timeline, trigger_every=every)
            return msgspec.structs.replace(plan, timeline=changed)

        yield {"release_every": duration_text(every)}, effect, change


def _tests(plan: Plan) -> Iterator[Other]:
    """Other tests of keys, with the values' triggers as they are; skip or not."""
    design = plan.design
    if not design.selects or design.restarts:
        return
    if design.skips:
        yield from _growing_tests(plan)
        return
    skipping = {"skip": True, "select_every": None, "tests": None}
    effect = f"pairs on published keys take no selection weight; tests grow apart, {_BY_THEN}"
    yield _privacy(plan, _differ(plan, skipping), effect)
    if design.schedule is not None:
        return
    for every in sorted({design.triggers, -(-design.triggers // 4)} - {design.select_every}):
        if every < design.select_every:
            continue
        settings: dict[str, Any] = {"select_every": every}
        if design.units_column is not None:
            settings["refresh_every"] = every  # a count of units is published when it is tested
        last = every == design.triggers
        effect = "a key appears at the window's end" if last else "a key appears later"
        yield _privacy(plan, settings, effect)


def _growing_tests(plan: Plan) -> Iterator[Other]:
    """More tests and fewer where published keys are skipped, and skipping nothing."""
    design = plan.design
    for tests in sorted({1, 3, 6, 10, 16, 32, 64} - {design.tests}):
        if tests >= design.triggers:
            break
        often = "once, at the window's end" if tests == 1 else f"{tests} times, growing apart"
        yield _privacy(plan, {"tests": tests}, f"a key is tested {often}; {_BY_THEN}")
    unskipped = {"skip": False, "tests": None}
    effect = f"pairs on published keys take weights too; a key is tested more often, {_BY_THEN}"
    yield _privacy(plan, _differ(plan, unskipped), effect)


def _bounds(plan: Plan) -> Iterator[Other]:
    """Another C, another bound per key, the combined statistic."""
    privacy, total = plan.privacy, plan.privacy.contributions
    if total > 1:
        less = 100 * (1 - mean_contributions(total // 2) / mean_contributions(total))
        effect = f"counts {less:.0f}% fewer records where units have at least i with chance 1/i"
        yield _privacy(plan, {"contributions": total // 2}, effect)
    if 2 * total <= MAX_CONTRIBUTIONS:
        yield _privacy(plan, {"contributions": 2 * total}, "counts more records of heavy units")
    for bound in PER_KEY_BOUNDS:
        if bound != privacy.per_key_bound and not (bound is None and privacy.combine):
            effect = "another figure: " + per_key_text(bound)
            yield _privacy(plan, {"per_key_bound": bound}, effect)
    counts = any(kind_of(a).uses_count or kind_of(a).counts_units for a in plan.aggregates)
    if plan.design.selects and counts and not privacy.combine:
        settings = {"per_key_bound": 1, "weights": STEEP, "combine": True, "selection_share": None}
        effect = "another figure: " + per_key_text(1)
        yield _privacy(plan, _differ(plan, settings), effect)


def _columns(plan: Plan) -> Iterator[Other]:
    """Without one of the columns."""
    if len(plan.aggregates) < 2:
        return
    for gone in plan.aggregates:
        remaining = tuple(a for a in plan.aggregates if a is not gone)

        def change(remaining: tuple[Any, ...] = remaining) -> Plan:
            return msgspec.structs.replace(plan, aggregates=remaining)

        yield {f"aggregate.{gone.name}": None}, "one column less", change


def _keys(plan: Plan) -> Iterator[Other]:
    """A public list of keys."""
    if not plan.design.selects:
        return
    settings: dict[str, Any] = {"weights": None, "combine": False, "selection_share": None}
    settings |= {"select_every": None, "mode": "sticky", "final_flush": False, "pre_threshold": 0}

    def change() -> Plan:
        other = with_privacy(plan, **settings)
        return msgspec.structs.replace(other, public_keys=_SOME_LIST, remember=None)

    given = {job_field(k): v for k, v in _differ(plan, settings).items() if k != "weights"}
    # Where the job names no strategy, ``auto`` may take less noise: to find its geometric encoder
    # would take longer than all other changes together.
    effect = "every key of your list, no other; needs the list from elsewhere; at most this noise"
    if plan.remember is not None:
        given |= {"remember_keys": None}
    yield given | {"public_keys": "keys.csv"}, effect, change


def _privacy(plan: Plan, settings: dict[str, Any], effect: str) -> Other:
    named = {job_field(name): value for name, value in settings.items()}
    return named, effect, lambda: with_privacy(plan, **settings)


def _differ(plan: Plan, settings: dict[str, Any]) -> dict[str, Any]:
    """Those fields of ``Privacy`` that the job has not already."""
    return {k: v for k, v in settings.items() if getattr(plan.privacy, k) != v}

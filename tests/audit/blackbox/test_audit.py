"""Audits of jobs: what they say, what they leave alone, and the shapes of jobs they can audit."""

import logging
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import pytest

from dpstream.accounting.budget.allocation import allocate
from dpstream.accounting.errors import PolicyError, UsageError
from dpstream.accounting.mixing import Mixing, cells_of
from dpstream.accounting.plan.plan import Plan
from dpstream.dp_transforms.noise import secret_source as references
from dpstream.pipelines.jobs.job import Job, load_job
from tests import accounts
from tests.audit.blackbox.audit import (
    Alone,
    Ask,
    AuditResult,
    Family,
    audit,
    text,
)
from tests.audit.blackbox.run import (
    Fixed,
    Released,
    audited_plan,
    rows_of,
    sides,
    table_of,
    totals,
)
from tests.audit.blackbox.values import crossing, first_tests, read_trials, visible_mu
from tests.audit.evidence.bounds import Claim, Parts, ProvenBound, Scores
from tests.audit.evidence.design import designs
from tests.statistical.trials import smaller_noise

MakeJob = Callable[..., Job]
FIXED = Fixed("33" * 32, "4b" * 16)


@pytest.fixture(autouse=True)
def keep_logging() -> Iterator[None]:
    yield
    logging.disable(logging.NOTSET)


def changed(job: Job, *edits: tuple[str, str]) -> Job:
    text = job.path.read_text()
    for old, new in edits:
        assert old in text
        text = text.replace(old, new, 1)
    accounts.write(job.path, text)
    return load_job(job.path)


def test_smaller_noise_is_refuted(make_job: MakeJob) -> None:
    job, ask = make_job(), Ask(trials=600, seed=3)
    result = audit(job, ask)
    for word in ("Claim", "Visible", "Proven", "values", "selection", "alone", "consistent"):
        assert word in text(result)
    assert not result.refuted and {family.name for family in result.families} == {
        "values", "another run", "selection",
    }  # fmt: skip
    with smaller_noise(4.0):
        assert "REFUTED by values" in text(audit(job, ask))


def test_nothing_of_the_job_is_touched(
    make_job: MakeJob, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its key is never read, its folder stays as it was, and no budget is charged."""
    account = 'account = { path = "shop.account.db", limit = { epsilon = 1, delta = 0.01 } }'
    job = changed(
        make_job(),
        (f'insecure_test_secret = "{"0f" * 32}"', f'secret = "file:shop.secret"\n{account}'),
    )
    (tmp_path / "shop.secret").write_text("not a key")
    before = {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()}
    read, key_refs = references.read_secret, list[str]()

    def noting(reference: str) -> Any:
        key_refs.append(reference)
        return read(reference)

    monkeypatch.setattr("dpstream.dp_transforms.noise.secret_source.read_secret", noting)
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(temporary))
    for beam in (False, True):
        assert not audit(job, Ask(trials=200, beam=beam)).refuted
    assert before == {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()}
    assert list(temporary.iterdir()) == []
    assert key_refs and all("dpstream-audit-" in reference for reference in key_refs)


def test_same_key_same_answer_and_fresh_keys_differ(make_job: MakeJob) -> None:
    job = make_job()
    one, same = (audit(job, Ask(trials=300, fixed=FIXED)) for _ in range(2))
    fresh, again = (audit(job, Ask(trials=300)) for _ in range(2))
    scores = [r.families[0].scores.without for r in (one, same, fresh, again)]
    assert np.array_equal(scores[0], scores[1])
    assert not np.isin(scores[2], scores[0]).any() and not np.isin(scores[2], scores[3]).any()
    other = audit(job, Ask(trials=300, seed=1, fixed=FIXED))
    assert not np.array_equal(other.families[0].scores.without, scores[0])


SHARED = ("contributions = 4", "contributions = 4\nmechanism.periods_share_windows = true")
HOURS = ('covers = "lifetime"', 'covers = "18h"')
SHAPES: dict[str, list[tuple[str, str]]] = {
    "int key": [('key = ["key"]', 'key = [{ column = "key", type = "int" }]')],
    "bytes key and unit": [
        ('key = ["key"]', 'key = [{ column = "key", type = "bytes" }]'),
        ('unit = { name = "user" }', 'unit = { name = "user", type = "bytes" }'),
    ],
    "several keys": [
        (
            'key = ["key"]',
            'key = [{ column = "a", type = "bool" }, { column = "b" }, { column = "c" }]',
        ),
        ('unit = { name = "user" }', 'unit = { name = "user", type = "int" }'),
    ],
    "sliding windows": [('window = "1d"', 'window = "12h"\nslide = "6h"')],
    "many windows and periods": [
        ("2024-01-02T", "2024-02-01T"), ('covers = "lifetime"', 'covers = "1d"'),
    ],
    "two periods in a window": [
        ('covers = "lifetime"', 'covers = "12h"'), SHARED,
    ],
    "stamps and lateness": [
        ('path = "in/*.csv"', 'path = "in/*.csv"\nstamp = "arrived"'),
        ('release_every = "6h"', 'release_every = "6h"\nallowed_lateness = "12h"\nmax_skew = "1h"'),
    ],
    "one trigger": [('release_every = "6h"', 'release_every = "24h"')],
    "one contribution": [("contributions = 4", "contributions = 1")],
    "a bound below zero": [("bounds = [0, 10]", "bounds = [-7, -2]")],
}  # fmt: skip


@pytest.mark.parametrize("name", SHAPES)
def test_shapes_of_jobs(make_job: MakeJob, name: str) -> None:
    job = changed(make_job(), *SHAPES[name])
    for beam in (False, True):
        result = audit(job, Ask(trials=400, beam=beam, fixed=FIXED))
        assert not result.refuted
        values = result.families[0]
        # Scores are N(0, mu^2) and N(mu^2, mu^2) for the mu that is visible.
        assert values.bound.statistic == 0
        moved = values.scores.added.mean() - values.scores.without.mean()
        assert abs(moved / values.visible - values.visible) <= 5 * np.sqrt(2 / 400)
        assert result.visible <= result.claim.mu * (1 + 1e-9)


def test_jobs_without_room_for_numbers(make_job: MakeJob) -> None:
    bools = [('key = ["key"]', 'key = [{ column = "key", type = "bool" }]')]
    with pytest.raises(UsageError, match=r"key"):
        audit(changed(make_job(), *bools), Ask(trials=200))


def test_at_most_two_windows_are_run(make_job: MakeJob) -> None:
    plan = changed(make_job(), ("2024-01-02T", "2024-02-01T")).plan
    short = audited_plan(plan)
    assert plan.timeline.windows == 31 and short.timeline.windows == 2
    budget, shorter = allocate(plan), allocate(short)
    assert budget.tau is not None and shorter.tau is not None
    assert budget.mu == shorter.mu and np.array_equal(budget.tau, shorter.tau)


def on_windows(plan: Plan, windows: int | None, **line: int) -> Plan:
    """The plan with so many windows, or without an end."""
    of = plan.timeline
    end = None if windows is None else of.start + windows * line.get("slide", of.slide)
    timeline = msgspec.structs.replace(of, end=end, **line)
    return msgspec.structs.replace(plan, timeline=timeline)


@pytest.mark.parametrize("windows", [None, 90_000])
def test_the_windows_of_an_audit_are_counted_at_once_and_bounded(
    make_job: MakeJob, windows: int | None
) -> None:
    """Windows of a day that slide by the hour meet a second period where the first one ends."""
    hour = 3_600_000_000
    plan = changed(make_job(), HOURS, SHARED).plan
    lengths = {"window": 24 * hour, "slide": hour, "trigger_every": hour}
    counts = {}
    for days in (1, 2, 7, 30, 365):
        long = on_windows(plan, windows, **lengths, period=days * 24 * hour)
        assert long.design.units_alone == 2
        began = time.perf_counter()
        if days > 7:
            with pytest.raises(UsageError, match="first 200 windows meets 2 privacy periods"):
                audited_plan(long)
        else:
            short = audited_plan(long)
            assert short.design.units_alone == 2
            counts[days] = short.timeline.windows
        assert time.perf_counter() - began < 5
        # Without thresholds that allow for several units two windows are enough.
        privacy = msgspec.structs.replace(plan.privacy, periods_share_windows=False)
        public = msgspec.structs.replace(long, privacy=privacy, public_keys="list")
        assert audited_plan(public).timeline.windows == 2
    assert counts == {1: 25, 2: 49, 7: 169}


def test_a_person_of_several_periods_is_audited_as_such(make_job: MakeJob) -> None:
    days = ("2024-01-02T", "2024-02-01T")
    job = changed(make_job(), days, HOURS, SHARED)
    assert job.plan.timeline.periods_met == 2
    short = audited_plan(job.plan)
    assert (short.timeline.windows, short.design.units_alone) == (2, 2)
    sliding = changed(
        make_job(), days, HOURS, SHARED, ('window = "1d"', 'window = "12h"\nslide = "6h"')
    ).plan
    short = audited_plan(sliding)
    assert (
        short.design.units_alone == sliding.design.units_alone == 2 and short.timeline.windows == 4
    )
    count = sliding.timeline.windows
    ends = (audited_plan(on_windows(sliding, n)).timeline.windows for n in range(1, count + 1))
    assert list(ends) == [1, 2, 2, *[4] * (count - 3)]
    result = audit(job, Ask(trials=300, fixed=FIXED))
    assert result.alone is not None and result.alone.units == 2 and not result.refuted
    refused = changed(make_job(), days, HOURS)
    with pytest.raises(PolicyError, match="can meet 2 periods"):
        audit(refused, Ask(trials=300))


def test_sides_are_equal_and_drawn_by_the_seed() -> None:
    one, two = sides(500, 1), sides(500, 2)
    assert one.sum() == two.sum() == 500 and (one != two).any()
    assert (sides(500, 1) == one).all()
    assert Parts.of(300).fit + Parts.of(300).choose < 300


def test_rows_are_what_the_design_says(make_job: MakeJob) -> None:
    """Others once on every key at every feed, units of their own; the unit on side D' only."""
    plan = make_job().plan
    trials, added = np.arange(10, 14), np.array([True, False, False, True])
    pattern, when = np.array([0, 0, 1, 2]), np.array([1, 2, 2, 4])
    rows = rows_of(plan, trials, added, 3, pattern, when, 5, [(0, 1), (1, 1)])
    assert len(rows.unit) == 4 * 3 * 5 * 2 + 2 * 4
    others = rows.unit[~rows.own]
    assert len(np.unique(others)) == len(others) and not np.isin(rows.unit[rows.own], others).any()
    assert (np.bincount(rows.key[~rows.own])[30:42] == 10).all()
    assert rows.key[rows.own].tolist() == [30, 30, 31, 32, 39, 39, 40, 41]
    timeline = plan.timeline
    assert ((rows.event[rows.own] - timeline.start) // timeline.trigger_every + 1).tolist() == [
        1,
        2,
        2,
        4,
    ] * 2
    table = table_of(plan, rows, {"value": (99.0, 3.0)})
    assert set(table.column("value").to_numpy()[rows.own]) == {99.0}
    assert table.column("key").to_pylist()[-1] == "k41"


def test_released_rows_become_numbers_of_trials(make_job: MakeJob) -> None:
    """Exact sums come back as 0 on D and as the unit's effect on D'; a missing row counts 0."""
    plan = make_job().plan
    design = designs(plan, allocate(plan))[0]
    width = design.keys + design.extra
    at = np.repeat(design.at, 2 * width)
    key = np.tile(np.arange(2 * width), len(design.at))
    own = (key // width == 1) & (key % width < design.keys) & (at >= design.when[0])
    base = design.expected()[np.searchsorted(design.at, at)]
    columns = {}
    for i, c in enumerate(design.columns):
        moved = np.where(key % width == 0, design.heavy, design.each) * c.effect
        columns[c.name] = pa.array((base[:, i] + own * moved) * c.grid)
    rows = Released(key, np.zeros(len(key), np.int64), at, pa.table(columns))
    value = totals(design, rows)
    assert (value[~own] == 0).all() and (value[own] != 0).all()
    read = read_trials(plan, design, rows, np.arange(2), width)
    assert read.scores[0, 0] == 0 and read.scores[1, 0] == pytest.approx(design.mu**2)
    less = Released(key[:0], key[:0], key[:0], pa.table(columns).slice(0, 0))
    assert (read_trials(plan, design, less, np.arange(2), width).scores == 0).all()


def test_crossings(make_job: MakeJob) -> None:
    plan = make_job().plan
    design = crossing(plan, allocate(plan), 1000, 0)
    assert design.without.sum() == pytest.approx(1) and design.added.shape[0] == design.keys
    # One more unit makes passing at the first test likelier, and never passing less likely.
    assert (design.added[:, 0] > design.without[0]).all()
    assert (design.added[:, -1] < design.without[-1]).all()
    assert 0.3 < visible_mu(design, 0) < allocate(plan).mu
    nothing = np.zeros(0, np.int64)
    none = Released(nothing, nothing, nothing, pa.table({}))
    assert (first_tests(plan, none, np.arange(3), 2, 4) == 4).all()
    rows = Released(np.array([1, 1, 5]), np.array([0, 0, 1]), np.array([3, 2, 1]), pa.table({}))
    assert first_tests(plan, rows, np.arange(3), 2, 4).ravel().tolist() == [4, 1, 4, 4, 4, 4]


def test_cells_that_share_their_noise_are_no_trials(make_job: MakeJob) -> None:
    """Trials are keys whose noise is their own: of mixed cells none is."""
    job = make_job()
    cells = cells_of(Mixing([np.eye(4) + 0.5]))
    replace = msgspec.structs.replace
    mixed = replace(job, plan=replace(job.plan, cells=cells))
    with pytest.raises(UsageError, match="share their noise"):
        audit(mixed, Ask())


CLAIM = Claim(1.0, 1e-9, 0.5, 1e-10, 5e-10, 1e-12)


def result(mu: float, at_least: float = 0.0) -> AuditResult:
    rng = np.random.default_rng(1)
    bound = ProvenBound(mu, 0.3, 0.2, 0.4, 0.5, 0, 1.0, (500, 400))
    scores = Scores(rng.standard_normal(500), rng.standard_normal(400) + mu)
    families = [Family("values", "own words", 0.45, bound, scores, 1000)]
    return AuditResult("h", CLAIM, families, Alone(3, 2000, at_least, 1), 1.5, Ask())


def test_a_consistent_audit() -> None:
    rendered = text(result(0.25))
    assert "Verdict     consistent" in rendered and "confidence 99%" in rendered
    assert (
        "mu >= 0.25" in rendered
        and "own words" in rendered
        and "3 of 2,000 keys of 1 unit(s)" in rendered
    )


@pytest.mark.parametrize(("mu", "at_least", "who"), [(0.6, 0.0, "values"), (0.1, 0.1, "alone")])
def test_what_refutes_is_named(mu: float, at_least: float, who: str) -> None:
    audit = result(mu, at_least)
    assert audit.refuted and f"REFUTED by {who}:" in text(audit)

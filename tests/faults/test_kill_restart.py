"""Processes killed at commit points, at random and across reshards: all files as undisturbed."""

import contextlib
import functools
import itertools
import os
import shutil
import signal
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import msgspec
import numpy as np
import pyarrow.parquet as pq
import pytest

from dpstream.dp_transforms import flow
from dpstream.dp_transforms.flow import run_in_memory
from dpstream.dp_transforms.run import Run
from dpstream.dp_transforms.step import TakenSteps
from dpstream.state import open as stores
from dpstream.state import transfer
from dpstream.state.spanner.client import connect, read_rows
from dpstream.state.spanner.schema import SELECTED
from dpstream.state.sqlite.file import create_store
from dpstream.state.sqlite.store import SqliteStore
from dpstream.state.transfer import copy_store
from tests import emulator
from tests.faults import retention_child
from tests.faults.child import BEATEN, POINTS, SHARDS, Fault, batches_of, plan_of
from tests.faults.places import KINDS, Places, places
from tests.faults.processes import files, finish, forkserver_context, run_to_the_end, start
from tests.faults.runs import calm, job, released
from tests.faults.test_store_faults import NAMES, Full, redelivered, stop_at_commit
from tests.lanes import few_first


class Figures(NamedTuple):
    """Release rows by what became of them; all zero but ``rows`` when the promise holds.

    Attributes:
        rows: of the undisturbed run; second: with another value; lost: missing; doubled:
            published more often than once; extra: that nobody should have published.
    """

    rows: int = 0
    second: int = 0
    lost: int = 0
    doubled: int = 0
    extra: int = 0

    @property
    def clean(self) -> bool:
        """Nothing went wrong, and there was something that could."""
        return self.rows > 0 and not any(self[1:])

    def plus(self, other: "Figures") -> "Figures":
        """Sums of both."""
        return Figures(*(a + b for a, b in zip(self, other, strict=True)))


def released_rows(folder: Path) -> list[tuple[bytes, str]]:
    """(release id, row as text) of every row below a folder; hidden drafts do not count."""
    out = []
    for path in sorted(folder.rglob("*.parquet")):
        if not path.name.startswith("."):
            rows = pq.ParquetFile(path).read().to_pylist()
            out += [(row["release_id"], repr(sorted(row.items()))) for row in rows]
    return out


def compare(rows: list[tuple[bytes, str]], expected: list[tuple[bytes, str]]) -> Figures:
    """Figures of ``released_rows`` of a run against those of an undisturbed one."""
    right, times = dict(expected), Counter(name for name, _ in rows)
    assert len(right) == len(expected)
    return Figures(
        rows=len(expected),
        second=sum(name in right and row != right[name] for name, row in rows),
        lost=sum(name not in times for name in right),
        doubled=sum(many - 1 for many in times.values()),
        extra=sum(name not in right for name in times),
    )


def resharded(run: Run, target: Path, shards: int) -> Run:
    """The run on a copy of its store with other shards."""
    source = run.open()
    identity = msgspec.structs.replace(source.identity, shards=shards)
    create_store(target, identity)
    new = SqliteStore(target, stores.key_schema(run.plan), run.plan.design.sums)
    copy_store(source, new, run.plan.timeline)
    new.close()
    stores.close_all()
    return run._replace(store=f"sqlite:{target}", shards=shards)


def go_on(run: Run, commits: int, seed: int) -> None:
    """Go on for some steps, committed two at a time, then stop as if killed."""
    together = mock.patch.object(flow, "COMMIT_STEPS", 2)
    with contextlib.suppress(Full), stop_at_commit(commits), together:
        run_in_memory(run, redelivered(run.plan, seed))
    stores.close_all()


def check_reshards(name: str, folder: Path, stops: tuple[int, int, int]) -> None:
    """2 -> 5 -> 1 shards, each after some commits, then to the end."""
    expected = calm(name)
    run = job(name, folder / "s.db", 2)
    go_on(run, stops[0], 1)
    run = resharded(run, folder / "five.db", 5)
    go_on(run, stops[1], 2)
    run = resharded(run, folder / "three.db", 3)
    go_on(run, stops[2], 3)
    run = resharded(run, folder / "one.db", 1)
    assert released(run, redelivered(run.plan, 4)) == expected


#: Steps are committed shard by shard: 12 a shard (2 windows of 6), so these leave every pattern.
STOPS = [(0, 0, 0), (3, 8, 4), (12, 30, 2), (15, 3, 20), (20, 18, 6), (23, 1, 1)]


@pytest.mark.parametrize("stops", STOPS)
@pytest.mark.parametrize("name", NAMES)
def test_shards_change_in_the_midst(name: str, stops: tuple[int, int, int], tmp_path: Path) -> None:
    check_reshards(name, tmp_path, stops)


@pytest.mark.parametrize("stops", [(14, 0, 0), (15, 3, 20)])
def test_shards_change_amid_quiet_steps(stops: tuple[int, int, int], tmp_path: Path) -> None:
    """A key that has taken a quiet step is not given its rows at the next one."""
    check_reshards("quiet", tmp_path, stops)


def test_what_was_taken_before_is_not_taken_again(tmp_path: Path, monkeypatch: Any) -> None:
    """Sabotaged: keys of a shard that was ahead take their steps twice."""
    none = lambda self, window, trigger, ids: np.zeros(len(ids), np.bool_)  # noqa: E731
    monkeypatch.setattr(TakenSteps, "before_reshard", none)
    with pytest.raises(AssertionError):
        check_reshards("sticky", tmp_path, (15, 3, 20))


def test_what_was_released_ahead_is_released(tmp_path: Path, monkeypatch: Any) -> None:
    """Sabotaged: releases of a shard that was ahead are lost."""
    monkeypatch.setattr(SqliteStore, "released_ahead", lambda *_: None)
    with pytest.raises(AssertionError):
        check_reshards("sticky", tmp_path, (15, 3, 20))


def test_what_was_selected_goes_along(tmp_path: Path, monkeypatch: Any) -> None:
    """Sabotaged: the new shards do not know what the first window has published."""
    monkeypatch.setattr(transfer, "_copy_selections", lambda *_: None)
    with pytest.raises(AssertionError):
        check_reshards("sticky", tmp_path, (15, 3, 20))


@pytest.mark.slow
@pytest.mark.parametrize("name", [*NAMES, "combined"])
def test_any_stops(name: str, tmp_path: Path) -> None:
    rng = np.random.default_rng(5)
    for number in range(25):
        folder = tmp_path / str(number)
        folder.mkdir()
        check_reshards(name, folder, tuple(rng.integers(0, 24, 3).tolist()))


def test_decisions_cut_short_between_shards(tmp_path: Path) -> None:
    """Only one unit shard has decided when the shards change."""
    for name in ("sticky", "combined"):
        folder = tmp_path / name
        folder.mkdir()
        expected, run = calm(name), job(name, folder / "s.db", 2)
        real, commits = SqliteStore.commit_units, [1]

        def commit_units(*args: Any, real: Any = real, commits: list[int] = commits) -> Any:
            commits[0] -= 1
            if commits[0] < 0:
                raise Full
            return real(*args)

        with pytest.raises(Full), mock.patch.object(SqliteStore, "commit_units", commit_units):
            run_in_memory(run, batches_of(plan_of(name)))
        stores.close_all()
        assert sorted(run.open().unit_progress(n).decided > 0 for n in (0, 1)) == [False, True]
        stores.close_all()
        run = resharded(run, folder / "three.db", 3)
        assert released(run, redelivered(run.plan, 4)) == expected


KILLED = ("sticky", "threshold", "public", "combined", "skip")
#: Repeats of each kind of point in the longer run, and random kills of each store.
POINT_REPEATS = 50
RANDOM_KILLS = 100


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def place(kind: str, tmp_path: Path) -> Iterator[Places]:
    with places(kind, tmp_path) as fresh:
        yield fresh


def host_of(store: str) -> dict[str, Any]:
    """How a child finds the store's database."""
    return {"host": os.environ[emulator.HOST]} if store.startswith("spanner:") else {}


@functools.cache
def undisturbed(name: str) -> tuple[dict[str, bytes], list[tuple[bytes, str]]]:
    """Files and rows of a run on SQLite that nothing happens to."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out"
        run_to_the_end(name, f"{folder}/s.db", str(out))
        return files(out), released_rows(out)


def check(name: str, out: Path) -> Figures:
    """The same files, byte for byte: nothing lost, doubled or changed."""
    timeline, (expected, rows) = plan_of(name).timeline, undisturbed(name)
    assert len(expected) == timeline.windows * timeline.triggers
    figures = compare(released_rows(out), rows)
    assert figures.clean, figures
    assert files(out) == expected
    return figures


def killed_at(
    name: str, fault: Fault, store: str, out: Path, in_beam: bool = False, split: bool = False
) -> Figures:
    """Kill a run at a point, then let another finish its work."""
    options = {"in_beam": in_beam, **host_of(store)}
    code = finish(start(name, store, str(out), fault, split=split, **options))
    assert code == -signal.SIGKILL, f"{fault} was never reached"
    # The restart gets its input in another order and in other batches, and commits whole steps.
    run_to_the_end(name, store, str(out), seed=fault.nth, **options)
    return check(name, out)


def nth_of(point: str, rng: np.random.Generator) -> int:
    """Some occurrence: 2 unit shards, 24 steps in groups of 4 (6 commits, and on Spanner one
    for each unit shard) and 12 files."""
    kinds = (("unit", 2), ("_write_steps", 6), ("commit_step", 24), ("commit", 8), ("write", 12))
    most = next((n for name, n in kinds if name in point), 24)
    return int(rng.integers(1, most + 1))


#: One of each mode and of each way to lose a commit comes first; the rest are slow.
SQLITE_FAULTS = [
    ("threshold", Fault("before _write_steps", 4), False),
    ("sticky", Fault("after commit_step", 11), True),
    # The second shard's units are decided after the restart, the first one's ranks recalled.
    ("combined", Fault("after commit_units", 1), False),
    ("public geometric", Fault("after commit_step", 7), False),
    # BOUND has gone on behind a test that RELEASE committed; RELEASE dies in a test of one shard.
    ("skip", Fault("after commit_units", 5), False),
    ("skip", Fault("after _write_steps", 7), True),
    ("skip", Fault("before _write_steps", 4), False),
    ("combined", Fault("after commit_step", 9), False),
    ("threshold", Fault("after write_release", 3), False),
    ("threshold", Fault("after commit_step", 7), False),
    ("public", Fault("after commit_step", 4), False),
    ("sticky", Fault("after commit_units", 1), False),
    ("sticky", Fault("before commit_step", 9), False),
    ("sticky", Fault("after _write_steps", 2), False),
]


@pytest.mark.parametrize("case", few_first(SQLITE_FAULTS, fast=5), ids=str)
def test_killed_at_a_point(tmp_path: Path, case: tuple[str, Fault, bool]) -> None:
    name, fault, in_beam = case
    killed_at(name, fault, str(tmp_path / "s.db"), tmp_path / "out", in_beam)


#: (job, fault, in Beam, in parts): parts make some 60 commits of one run.
SPANNER_FAULTS = [
    ("combined", Fault("after commit", 1), False, False),
    ("threshold", Fault("after commit", 6), True, False),
    ("sticky", Fault("after commit", 31), False, True),
    ("skip", Fault("after commit", 7), False, False),
    ("skip", Fault("before commit", 40), False, True),
    ("sticky", Fault("before commit", 4), False, False),
    ("public", Fault("after load_keys", 9), False, False),
    ("combined", Fault("after commit", 2), False, True),
]


@pytest.mark.parametrize("kind", ["spanner"], indirect=True)
@pytest.mark.parametrize("case", few_first(SPANNER_FAULTS, fast=2), ids=str)
def test_killed_at_a_point_on_spanner(
    case: tuple[str, Fault, bool, bool], tmp_path: Path, place: Places
) -> None:
    name, fault, in_beam, split = case
    killed_at(name, fault, place(), tmp_path, in_beam, split)


def random_kills(name: str, store: str, out: Path, seed: int, kills: int) -> int:
    """Kill a slow run at random instants, again and again; returns how many kills hit."""
    rng, hits, options = np.random.default_rng(seed), 0, host_of(store)
    for n in range(kills):
        split = bool(options) and n % 2 == 1
        process = start(name, store, str(out), pause=0.01, seed=n, split=split, **options)
        process.join(float(rng.uniform(0.1, 1.5)))
        process.kill()
        hits += finish(process) == -signal.SIGKILL
    run_to_the_end(name, store, str(out), **options)
    check(name, out)
    return hits


def test_killed_at_random(tmp_path: Path, place: Places) -> None:
    assert random_kills("sticky", place(), tmp_path / "out", 1, 3) > 0


@pytest.mark.parametrize("name", ["sticky", "skip"])
def test_two_at_once(tmp_path: Path, place: Places, name: str) -> None:
    """Two processes run the same job on one store: one value, both emit it.

    Where it skips, each is a zombie of the other in both stages, from test to test.
    """
    outs, store = [tmp_path / "a", tmp_path / "b"], place()
    options = host_of(store)
    seeds = (None, 3) if name == "skip" else (None, None)
    both = [
        start(name, store, str(out), pause=0.004, seed=seed, **options)
        for out, seed in zip(outs, seeds, strict=True)
    ]
    codes = [finish(process) for process in both]
    for out, code in zip(outs, codes, strict=True):
        if code:  # it lost the race for BOUND's decision; its retry must agree
            assert code == BEATEN
            run_to_the_end(name, store, str(out), **options)
        check(name, out)
    if options:
        columns = ("Part", "WindowIndex", "Step")
        rows = (tuple(row) for row in read_rows(connect(store), "Steps", columns))
        # Tests of several windows at one trigger time have rows of selections of their own.
        steps = [row for row in rows if row[1] != SELECTED]
        timeline = plan_of(name).timeline
        assert len(steps) == len(set(steps)), "a step was committed twice"
        assert (
            sum(window >= 0 for _, window, _ in steps)
            == SHARDS * timeline.windows * timeline.triggers
        )


#: What a run commits: decisions of unit shards, and steps of key shards.
COMMITS = {"sqlite": ("commit_units", "_write_steps"), "spanner": ("commit",)}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["skip"])
def test_killed_at_every_commit(tmp_path: Path, kind: str, place: Places, name: str) -> None:
    """Of both stages, which take turns from test to test; the one that goes on begins with other
    batches in another order."""
    kills = 0
    for point, when in itertools.product(COMMITS[kind], ("before", "after")):
        for nth in itertools.count(1):
            store, out = place(), tmp_path / f"{when} {point} {nth}"
            options = host_of(store)
            fault = Fault(f"{when} {point}", nth)
            code = finish(start(name, store, str(out), fault, **options))
            if code == 0:
                break
            assert code == -signal.SIGKILL
            run_to_the_end(name, store, str(out), seed=nth, **options)
            check(name, out)
            kills += 1
    print(f"\nF2 {kind}, {name}: killed at {kills} commits, all files as undisturbed", flush=True)
    assert kills > 40


@pytest.mark.slow
def test_killed_at_every_point(tmp_path: Path, kind: str, place: Places) -> None:
    rng = np.random.default_rng(11)
    for title, points in POINTS[kind].items():
        total = Figures()
        for n in range(POINT_REPEATS):
            point, folder = points[n % len(points)], tmp_path / f"{title}{n}"
            fault, split = Fault(point, nth_of(point, rng)), kind == "spanner" and n % 3 == 2
            name = KILLED[int(rng.integers(len(KILLED)))]
            total = total.plus(killed_at(name, fault, place(), folder, n % 10 == 0, split))
        print(
            f"\nF2 {kind}, {title}: {POINT_REPEATS} kills, {total.rows} rows released:"
            f" {total.second} second values, {total.lost} lost, {total.doubled} doubled",
            flush=True,
        )
        assert total.clean


@pytest.mark.slow
def test_killed_at_random_long(tmp_path: Path, kind: str, place: Places) -> None:
    hits = runs = 0
    while hits < RANDOM_KILLS:
        name = KILLED[runs % len(KILLED)]
        hits += random_kills(name, place(), tmp_path / str(runs), runs, 8)
        runs += 1
    print(f"\nF3 {kind}: {hits} kills over {runs} runs, all files as undisturbed")


COMMANDS = ("reshard", "backup", "restore", "restore a lost one", "expire")


@functools.cache
def template() -> Path:
    """A store in the midst of a run, its shards apart, and a backup of it."""
    folder = Path(tempfile.mkdtemp())
    run = job("sticky", folder / "s.db")
    together = mock.patch.object(flow, "COMMIT_STEPS", 2)
    with pytest.raises(Full), stop_at_commit(17), together:
        run_in_memory(run, redelivered(run.plan, 1))
    stores.close_all()
    transfer.backup(run.store, run.plan, folder / "b")
    stores.close_all()
    return folder


def retained_undisturbed() -> dict[tuple[int, int], bytes]:
    return calm("sticky")


def killed(command: str, folder: Path, nth: int) -> bool:
    """Run a command in a child that dies at the nth point; False if it came to its end."""
    process = forkserver_context().Process(
        target=retention_child.attempt, args=(command, "sticky", str(folder), nth), daemon=True
    )
    process.start()
    code = finish(process)
    assert code in (0, -signal.SIGKILL)
    return code != 0


def check_command(command: str, folder: Path) -> None:
    """The store is the old or the new one, goes on, and drafts of the dead are no obstacle."""
    plan = plan_of("sticky")
    backup = folder / "new.backup"
    if backup.exists():
        shutil.copy(backup, folder / "b")
        retention_child.commands("sticky", folder)["restore"]()  # whole, whenever it is there
    if not (folder / "s.db").exists():
        assert command == "restore a lost one"
        retention_child.commands("sticky", folder)[command]()
    url = f"sqlite:{folder / 's.db'}"
    shards = stores.identity_of(url, plan).shards
    assert shards in ((2, 5) if command == "reshard" else (2,))
    run = job("sticky", folder / "s.db", shards)
    assert not list(folder.glob(".*"))  # whoever begins sweeps them
    assert released(run, redelivered(plan, 9)) == retained_undisturbed()
    stores.close_all()
    if command in ("reshard", "restore") and shards == 2:
        retention_child.commands("sticky", folder)[command]()


@pytest.mark.parametrize("command", COMMANDS)
def test_retention_and_restore_killed_at_points(command: str, tmp_path: Path) -> None:
    """A few points here; every one in the longer run."""
    points(command, tmp_path, {"expire": 1, "backup": 3}.get(command, 11))


@pytest.mark.slow
@pytest.mark.parametrize("command", COMMANDS)
def test_retention_and_restore_killed_at_every_point(command: str, tmp_path: Path) -> None:
    points(command, tmp_path, 1)


def points(command: str, folder: Path, stride: int) -> None:
    kills = 0
    for nth in range(0, 500, stride):
        case = folder / str(nth)
        shutil.copytree(template(), case)
        if command == "restore a lost one":
            (case / "s.db").unlink()
        died = killed(command, case, nth)
        check_command(command, case)
        if not died:
            break
        kills += 1
    assert kills >= 2

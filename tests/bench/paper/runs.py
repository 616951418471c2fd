"""Run modes and baselines on one data set and hold them against the truth.

First every project file is written and checked, then every mode runs in a process of its own, then
the truth is read and everything is measured: a mistake is reported before anything is computed,
and the truth's memory is not there beside a run's.
"""

import dataclasses
import json
import platform
import secrets
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from dpstream.accounting.budget.allocation import allocate
from dpstream.accounting.errors import RunError, UsageError
from dpstream.dp_transforms.noise.prf import KeyRing
from dpstream.dp_transforms.noise.secret import KEY_BYTES
from dpstream.pipelines.formats.encodings import read_releases
from dpstream.pipelines.jobs.job import load_job
from dpstream.pipelines.operate.doctor import installed
from dpstream.state.durable import replacing
from tests.bench.paper.baselines import Guarantee, query_of, run_baseline
from tests.bench.paper.jobs import Frame, Setting, write_job
from tests.bench.paper.one_run import in_child
from tests.bench.paper.paper import published_budget
from tests.bench.paper.synth import DAY_MICROS
from tests.bench.paper.truth import Columns, Truth, errors, load
from tests.oracle.simulation import Design, Records, admit, algorithm2_plan, ranked, simulate

ONE_RUN = "tests.bench.paper.one_run"
#: The baseline that is the paper's Algorithm 2 with the numbers that it prints; unsound.
PUBLISHED = "paper"
Say = Callable[[str], None]
Row = dict[str, Any]


class Contest(NamedTuple):
    """What is compared on one data set.

    Attributes:
        frame: data and guarantee; settings: the modes' runs.
        baselines: names of `baselines.NAMES`, run at every T of ``triggers`` with C =
            ``contributions``.
    """

    frame: Frame
    settings: Sequence[Setting]
    baselines: Sequence[str] = ()
    triggers: Sequence[int] = ()
    contributions: int = 1

    @property
    def promise(self) -> Guarantee:
        """Guarantee of the baselines."""
        return Guarantee(self.frame.epsilon, self.frame.delta, self.contributions)


def check(contest: Contest) -> list[Path]:
    """Write and check every job and baseline; returns the project files.

    Raises:
        UsageError, PolicyError: a setting is refused.
    """
    for triggers in {*contest.triggers, *(s.triggers for s in contest.settings)}:
        if triggers < 1 or DAY_MICROS % triggers:
            raise UsageError("--triggers", "must divide a day", "write e.g. 100 or 1000")
        for name in set(contest.baselines) - {PUBLISHED}:
            query_of(name, contest.promise, triggers)
    jobs = [write_job(contest.frame, setting) for setting in contest.settings]
    for job in jobs:
        allocate(load_job(job).plan)
    return jobs


def compare(contest: Contest, jobs: Sequence[Path], say: Say) -> list[Row]:
    """Run everything and measure it: one row for each setting and baseline.

    Args:
        jobs: from `check`; say: told what goes on.
    """
    rows = [_run(setting, job, say) for setting, job in zip(contest.settings, jobs, strict=True)]
    say("measuring against the raw records")
    data = load(contest.frame.data, users=bool(contest.baselines))
    for triggers in sorted({*contest.triggers, *(s.triggers for s in contest.settings)}):
        truth = Truth(data, triggers)
        for row, job in zip(rows, jobs, strict=False):
            if row["triggers"] == triggers:
                row.update(errors(truth, read_releases(job.parent / "releases")))
        rows += [_baseline(contest, name, data, truth, say) for name in contest.baselines]
    return rows


def _run(setting: Setting, job: Path, say: Say) -> Row:
    where = {"triggers": setting.triggers, "contributions": setting.contributions}
    say(f"{setting.mode.name}: T = {setting.triggers}, C = {setting.contributions}")
    return {"method": setting.mode.name, **where, **in_child(ONE_RUN, str(job))}


def _baseline(contest: Contest, name: str, data: Columns, truth: Truth, say: Say) -> Row:
    say(f"{name}: T = {truth.triggers}, C = {contest.contributions}")
    start = time.perf_counter()
    if name == PUBLISHED:
        figures = as_published(data, truth.triggers, contest.promise)
    else:
        with KeyRing(secrets.token_bytes(KEY_BYTES)) as ring:
            figures = run_baseline(name, data, truth, contest.promise, ring)
    where = {"triggers": truth.triggers, "contributions": contest.contributions}
    seconds = round(time.perf_counter() - start, 2)
    return {"method": name, **where, "records": len(data), "seconds": seconds, **figures}


def as_published(data: Columns, triggers: int, promise: Guarantee) -> Row:
    """Algorithm 2 with the paper's numbers, simulated on the data (`tests.oracle.simulation`)."""
    plan = algorithm2_plan(triggers, promise.contributions, promise.epsilon, promise.delta)
    design = Design.of(plan, published_budget(plan), "rounds")
    instant = (data.time * (1 << 32) // DAY_MICROS).astype(np.uint32)
    order = np.argsort(data.user, kind="stable")
    raw = ranked(Records(data.user[order], data.key[order], instant[order]))
    seed = secrets.randbits(64)
    result = simulate(design, admit(raw, promise.contributions), raw, len(data.names), seed)
    figures = dataclasses.asdict(result)
    return figures | {"l1_average": figures.pop("mean_l1")}


def provenance() -> Row:
    """Date, versions and machine of a result."""
    packages = ("dpstream", "apache-beam", "pyarrow", "numpy")
    return {
        "date": time.strftime("%Y-%m-%d"),
        "versions": {"python": platform.python_version(), **{p: installed(p) for p in packages}},
        "machine": platform.machine(),
    }


def save(result: Row, out: Path) -> None:
    """Write a result as JSON, complete or not at all.

    Raises:
        RunError: the file cannot be written.
    """
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with replacing(out) as draft:
            draft.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    except OSError:
        raise RunError("--out", "cannot be written", "check disk and permissions") from None

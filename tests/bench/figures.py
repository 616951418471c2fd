"""The headline figures, measured, and held against what is recorded.

    make figures                                            # measure and compare
    python -m tests.bench.figures --record "why"            # measure and record one more run
    python -m tests.bench.figures --record "why" --anew "1000k users: cpu" ...  # and forget earlier

Every figure is a ratio within one run, so that it holds on another machine: CPU time and memory of
a job to those of a non-private pipeline of the same shape, CPU time of a command to that of the
imports that it stands on, draws and commits of a CPU second to those of a baseline beside them.
Of CPU seconds the least of five runs on either side counts, which other work on the machine
disturbs least.  Jobs use one thread, as the pipeline beside them does: two that share a core's
memory cost more CPU time, how much more depends on the machine.  Keys and errors are those of a
fixed key and differ by a percent: the plan's hash, which names the noise, covers where the input
stands.

**What is recorded** (`tests/bench/figures.json`, ``runs``) are whole runs, of different days and
machines.  A figure's reference is the median of its recorded runs.  Its margin is made from their
spread, in logarithms: three times the standard deviation of its own runs or of all figures of its
kind, pooled, whichever is larger, at least LEAST.  Of fewer than ENOUGH runs the margin is the
kind's in TOLERANCES.  A figure beyond its margin fails, whichever way: what the README says is then
no longer true.  A change that was meant is recorded with its reason, and ``--anew`` forgets the
earlier runs of the figures that it changed, or of all if it names none.
"""

import argparse
import hashlib
import json
import logging
import math
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from dpstream.accounting.limits import DEFAULT_SHARDS
from dpstream.pipelines.formats.encodings import read_releases
from dpstream.pipelines.jobs.secret import new_secret
from tests import accounts
from tests.bench import oneshot, sampler, state
from tests.bench.common import child_seconds, emit, machine
from tests.bench.paper import synth
from tests.bench.paper.jobs import Frame, Mode, Setting, parse_mode, write_job
from tests.bench.paper.one_run import ONE_HEAP, in_child
from tests.bench.paper.truth import Truth, errors, load

EXAMPLE = Path(__file__).parents[2] / "pipelines" / "examples" / "flights.toml"
RECORDED = Path(__file__).with_name("figures.json")
#: Runs that a margin is made from, how many standard deviations it has, and its least.
ENOUGH, DEVIATIONS, LEAST = 5, 3.0, 0.05
#: How far a figure of fewer runs may lie from their median, by the last word of its name.
TOLERANCES = {
    **{"cpu": 0.3, "start": 0.3, "speed": 0.3, "share": 0.3},
    **{"memory": 0.1, "keys": 0.1, "l1": 0.1},
}
REPEATS = 5
#: Runs of a whole process, of which the least counts, and the users of the long day: 2.4 million
#: records.
SIDES, LONG_USERS = 3, 400_000
#: Stands for no key at all, in logarithms.
_NONE = 0.5
TRIGGERS, CONTRIBUTIONS = 100, 32

Figures = dict[str, float]
Say = Callable[[str], None]


def day_of(folder: Path, users: int) -> Frame:
    """The synthetic day of so many users, for jobs of the default number of shards."""
    data = folder / f"day-{users}.parquet"
    if not data.exists():
        synth.generate(synth.Synth(users=users, keys=1_000_000, seed=0).check(), data)
    return Frame(data, "int", folder / "runs", 6.0, 1e-9, DEFAULT_SHARDS)


def stream(folder: Path, users: int, say: Say) -> Figures:
    """The default job and the combined one on the synthetic day, beside the plain pipeline."""
    frame = day_of(folder, users)
    pairs = []
    for number in range(REPEATS):
        say(f"{users:,} users, pair {number + 1} of {REPEATS}")
        job = _job(frame, "sticky")
        pairs.append((run_of(job), in_child("tests.bench.one_run", str(job))))
    combined = _job(frame, "combined")
    say(f"{users:,} users, combined")
    run_of(combined)
    truth = Truth(load(frame.data, users=False), TRIGGERS)
    size = f"{users // 1000}k users"
    figures = {
        f"{size}: cpu": least_ratio(
            (own["cpu_seconds"], plain["cpu_seconds"]) for own, plain in pairs
        ),
        f"{size}: memory": median(own["peak_gib"] / plain["peak_gib"] for own, plain in pairs),
        f"{size}: outside stages share": median(outside(own) for own, _ in pairs),
    }
    for name, path in (("default", job), ("combined", combined)):
        score = errors(truth, read_releases(path.parent / "releases"))
        figures |= {f"{size}, {name}: keys": score["keys"], f"{size}, {name}: l1": score["l1"]}
    return figures


def processes(folder: Path, sizes: Sequence[int], say: Say) -> Figures:
    """CPU seconds of whole processes: the default job to a Polars plan (`tests.bench.polars_plan`),
    for the larger size and for its difference to the smaller one; 1,000 triggers to 100.
    """
    say("the Polars plan")
    own, plan = list[float](), list[float]()
    for users in sorted({min(sizes), max(sizes)}):
        frame = day_of(folder, users)
        plain = [sys.executable, "-m", "tests.bench.polars_plan"]
        plain += [str(frame.data), str(TRIGGERS), str(CONTRIBUTIONS)]
        own.append(min(_process(_run(_job(frame, "sticky"))) for _ in range(SIDES)))
        plan.append(min(_process(plain) for _ in range(SIDES)))
    figures = {"beside polars: cpu": four_digits(own[-1] / plan[-1])}
    if len(own) > 1:
        further = (own[1] - own[0]) / (plan[1] - plan[0])
        figures["beside polars, further: cpu"] = four_digits(further)
    frame = day_of(folder, min(LONG_USERS, max(sizes)))
    for mode in ("sticky", "combined"):
        say(f"1,000 triggers, {mode}")
        few, many = (
            min(_process(_run(_job(frame, mode, triggers))) for _ in range(SIDES))
            for triggers in (TRIGGERS, 10 * TRIGGERS)
        )
        name = "1,000 triggers" if mode == "sticky" else f"1,000 triggers, {mode}"
        figures[f"{name}: cpu"] = four_digits(many / few)
    return figures


def _run(job: Path) -> list[str]:
    return [sys.executable, "-W", "ignore", "-m", "tests.bench.paper.one_run", str(job)]


def _process(command: list[str], folder: Path | None = None) -> float:
    """CPU seconds of a process from its start to its end."""
    before = child_seconds()
    env = os.environ | ONE_HEAP
    subprocess.run(command, check=True, capture_output=True, cwd=folder, env=env)
    return child_seconds() - before


def _job(frame: Frame, mode: str, triggers: int = TRIGGERS) -> Path:
    """A job under a fixed key and run id: its keys and errors differ by a percent at most."""
    named = parse_mode(mode)
    setting = Setting(Mode(named.name, {**named.fields, "threads": 1}), triggers, CONTRIBUTIONS)
    job = write_job(frame, setting)
    (job.parent / "noise.secret").write_text(hashlib.sha256(b"figures").hexdigest() + "\n")
    return job


def run_of(job: Path) -> dict[str, Any]:
    """One run of a job in a process of its own."""
    return in_child("tests.bench.paper.one_run", str(job))


def outside(run: dict[str, Any]) -> float:
    """The part of the CPU time that no stage of the flow has used."""
    return 1 - float(sum(run["stage_cpu_seconds"].values())) / float(run["cpu_seconds"])


def one_shot(folder: Path, records: int, say: Say) -> Figures:
    """One trigger, a count and a sum, beside the plain pipeline."""
    say("one shot")
    data = folder / "shot.parquet"
    oneshot.write_records(data, records, records // 10, 1_000)
    frame = Frame(data, "int", folder / "runs", 1.0, 1e-6, 2)
    setting = Setting(Mode("sticky", {**parse_mode("sticky").fields, "threads": 1}), 1, 10)
    pairs = []
    for _ in range(REPEATS):
        job = write_job(frame, setting, oneshot.COUNT_AND_SUM)
        plain = in_child("tests.bench.one_run", str(job))
        pairs.append((run_of(job)["cpu_seconds"], plain["cpu_seconds"]))
    return {"one shot: cpu": least_ratio(pairs)}


def parts(say: Say) -> Figures:
    """Noise beside numpy's normal; the embedded store beside a row for each key; by CPU time."""
    say("sampler and store")
    drawn = sampler.bench(1_500.0, 50_000, 64, 3 * REPEATS)
    stores = [state.on_sqlite(200_000, 20_000, 7) for _ in range(REPEATS)]
    own, rows = (
        max(run["committed_per_cpu_second"] for run in side) for side in zip(*stores, strict=True)
    )
    return {"sampler: speed": drawn["cpu_ratio"], "store: speed": four_digits(own / rows)}


def commands(folder: Path, say: Say) -> Figures:
    """What a command costs before it does anything, beside the import of what it stands on."""
    say("imports and commands")
    (folder / "dpstream.toml").write_text(EXAMPLE.read_text())
    accounts.create(folder / "flights.account.db", "flights", (1e3, 1e-2), "tailnum", id_="0" * 16)
    new_secret(folder / "flights.secret")
    names = ("tailnum", "origin", "carrier")  # the plan looks at the schema of what it will read
    flight = dict.fromkeys(names, "x") | {"time_hour": datetime(2013, 1, 2), "dep_delay": 1.0}
    pq.write_table(pa.Table.from_pylist([flight]), folder / "flights.parquet")
    base = [sys.executable, "-c", "import numpy, pyarrow, apache_beam"]
    dpstream = [sys.executable, "-m", "dpstream"]
    command_lines = {
        "import: start": [
            sys.executable,
            "-c",
            "import dpstream.dp_transforms, dpstream.pipelines.stream.run",
        ],
        "--help: start": [*dpstream, "--help"],
        "plan: start": [*dpstream, "plan"],
    }

    for command in (base, *command_lines.values()):  # modules are compiled
        _process(command, folder)
    timings: dict[str, list[tuple[float, float]]] = {name: [] for name in command_lines}
    for _ in range(REPEATS):
        beside = _process(base, folder)
        for name, command in command_lines.items():
            timings[name].append((_process(command, folder), beside))
    return {name: least_ratio(pairs) for name, pairs in timings.items()}


def least_ratio(pairs: Iterable[tuple[float, float]]) -> float:
    """Least of the first to least of the second, to four digits."""
    own, beside = zip(*pairs, strict=True)
    return four_digits(min(own) / min(beside))


def four_digits(value: float) -> float:
    """The number to four digits."""
    return float(f"{value:.4g}")


def median(values: "list[float] | Iterator[float]") -> float:
    """Middle value, to four digits."""
    return four_digits(statistics.median(values))


def measure(sizes: list[int], records: int, folder: Path, say: Say) -> Figures:
    """Every figure."""
    figures: Figures = {}
    for users in sizes:
        figures |= stream(folder, users, say)
    figures |= processes(folder, sizes, say)
    return figures | one_shot(folder, records, say) | parts(say) | commands(folder, say)


class Reference(NamedTuple):
    """What a figure is compared with.

    Attributes:
        value: the median of its recorded runs.
        margin: how far a figure may lie from it, as a part of it: up to value (1 + margin), and
            down to value / (1 + margin).
        runs: how many were recorded.
    """

    value: float
    margin: float
    runs: int


def references(runs: Sequence[Figures]) -> dict[str, Reference]:
    """The median of each figure's runs and its margin; see the module."""
    logs: dict[str, list[float]] = {}
    for run in runs:
        for name, value in run.items():
            logs.setdefault(name, []).append(math.log(value or _NONE))
    pooled: dict[str, list[tuple[float, int]]] = {}
    for name, values in logs.items():
        if len(values) > 1:
            squares = statistics.variance(values) * (len(values) - 1)
            pooled.setdefault(kind_of(name), []).append((squares, len(values) - 1))
    out = {}
    for name, values in logs.items():
        margin = TOLERANCES[kind_of(name)]
        if len(values) >= ENOUGH:
            squares, freedom = map(sum, zip(*pooled[kind_of(name)], strict=True))
            deviation = max(statistics.stdev(values), math.sqrt(squares / freedom))
            margin = max(math.expm1(DEVIATIONS * deviation), LEAST)
        value = float(f"{math.exp(statistics.median(values)):.4g}")
        out[name] = Reference(value, float(f"{margin:.2g}"), len(values))
    return out


def kind_of(name: str) -> str:
    """The last word of a figure's name."""
    return name.replace(":", " ").split()[-1]


def compare(figures: Figures, recorded: Mapping[str, Reference]) -> list[str]:
    """What is not as recorded, in words."""
    wrong = []
    for name in sorted({*figures, *recorded}):
        if name not in figures or name not in recorded:
            wrong.append(f"{name}: {'not measured' if name in recorded else 'not recorded'}")
            continue
        value, margin, runs = recorded[name]
        factor = (figures[name] or _NONE) / value
        if max(factor, 1 / factor) > 1 + margin:
            wrong.append(
                f"{name}: {figures[name]:g}, recorded {value:g} ({factor - 1:+.0%}, margin "
                f"{margin:.0%} of {runs} runs)"
            )
    return wrong


def recorded_runs(content: Mapping[str, Any]) -> list[Figures]:
    """The figures of the recorded runs, in their order."""
    return [run["figures"] for run in content.get("runs", [])]


def with_run(
    content: Mapping[str, Any], run: Mapping[str, Any], anew: Sequence[str] | None
) -> dict[str, Any]:
    """The file with one more run.

    Args:
        anew: figures whose earlier runs are forgotten; empty: all, ``None``: none.
    """
    earlier = []
    for entry in content.get("runs", []) if anew is None or anew else []:
        figures = {n: v for n, v in entry["figures"].items() if n not in (anew or ())}
        if figures:
            earlier.append({**entry, "figures": figures})
    return {"runs": [*earlier, dict(run)]} | {n: v for n, v in content.items() if n != "runs"}


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--users", type=int, nargs="+", default=[250_000, 1_000_000])
    parser.add_argument("--records", type=int, default=4_000_000, help="of the one shot")
    parser.add_argument("--record", metavar="REASON", help="record what is measured, and why")
    parser.add_argument(
        "--anew", nargs="*", metavar="FIGURE", help="with --record: forget earlier runs of these"
    )
    parser.add_argument("--out", type=Path, help="append the JSON result to this file")
    args = parser.parse_args()
    if args.anew is not None and not args.record:
        parser.error("--anew is for --record")
    logging.disable(logging.CRITICAL)
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # or each process compiles all modules again
    with tempfile.TemporaryDirectory() as scratch:
        figures = measure(
            args.users, args.records, Path(scratch), lambda what: print(what, file=sys.stderr)
        )
    emit({"benchmark": "figures", **machine(), "figures": figures}, args.out)
    before = json.loads(RECORDED.read_text()) if RECORDED.exists() else {}
    wrong = compare(figures, references(recorded_runs(before)))
    print("\n".join([*wrong, f"{len(figures)} figures, {len(wrong)} not as recorded"]))
    if args.record:
        content = with_run(
            before, {**machine(), "reason": args.record, "figures": figures}, args.anew
        )
        RECORDED.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n")
        return
    raise SystemExit(bool(wrong))


if __name__ == "__main__":
    main()

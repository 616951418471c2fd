"""The headline figures, measured, and held against what is recorded.

    make figures                                            # measure and compare
    python -m tests.bench.figures --record "why it changed" # measure and record

Speed and memory are ratios to a non-private pipeline of the same shape in the same run, or to
another baseline beside it, so that they hold on a slower machine; of CPU seconds the least of
five runs on either side counts, which other work on the machine disturbs least (the least of three
differed by up to 40% between two runs of one commit).  Keys and errors are those of a fixed key
and differ by a percent: the plan's hash, which names the noise, covers where the input stands.  A
figure that differs by more than its tolerance fails, whichever way: what the README says is then
no longer true, and a change that was meant is recorded with its reason.
"""

import argparse
import hashlib
import json
import logging
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from dpstream.pipelines.formats.encodings import read_releases
from dpstream.pipelines.jobs.secret import new_secret
from tests import accounts
from tests.bench import oneshot, sampler, state
from tests.bench.common import child_seconds, emit, machine
from tests.bench.paper import synth
from tests.bench.paper.jobs import Frame, Setting, write_job
from tests.bench.paper.modes import Mode, parse_mode
from tests.bench.paper.one_run import in_child
from tests.bench.paper.truth import Truth, errors, load

EXAMPLE = Path(__file__).parents[2] / "pipelines" / "examples" / "flights.toml"
RECORDED = Path(__file__).with_name("figures.json")
#: How far a figure may lie from the recorded one, by the last word of its name.
TOLERANCES = {"cpu": 0.2, "speed": 0.2, "share": 0.2, "memory": 0.1, "keys": 0.1, "l1": 0.1}
REPEATS = 5
TRIGGERS, CONTRIBUTIONS = 100, 32

Figures = dict[str, float]
Say = Callable[[str], None]


def stream(folder: Path, users: int, say: Say) -> Figures:
    """The default job and the combined one on the synthetic day, beside the plain pipeline."""
    params = synth.Synth(users=users, keys=1_000_000, seed=0).check()
    data = folder / f"day-{users}.parquet"
    synth.generate(params, data)
    frame = Frame(data, "int", folder / "runs", 6.0, 1e-9, 4)
    pairs = []
    for number in range(REPEATS):
        say(f"{users:,} users, pair {number + 1} of {REPEATS}")
        job = _job(frame, "sticky")
        pairs.append((run_of(job), in_child("tests.bench.one_run", str(job))))
    combined = _job(frame, "combined")
    say(f"{users:,} users, combined")
    run_of(combined)
    truth = Truth(load(data, users=False), TRIGGERS)
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


def _job(frame: Frame, mode: str) -> Path:
    """A job under a fixed key and run id: its keys and errors differ by a percent at most."""
    named = parse_mode(mode)
    fixed = {**named.fields, "insecure_test_run_id": "f1" * 16}
    setting = Setting(Mode(named.name, fixed), TRIGGERS, CONTRIBUTIONS)
    job = write_job(frame, setting)
    (job.parent / "noise.secret").write_text(hashlib.sha256(b"figures").hexdigest() + "\n")
    return job


def run_of(job: Path) -> dict[str, Any]:
    """One run of a job in a process of its own."""
    return in_child("tests.bench.paper.one_run", str(job))


def outside(run: dict[str, Any]) -> float:
    """The part of the CPU time that no stage of the flow has used."""
    return 1 - float(sum(run["stage_cpu_seconds"].values())) / float(run["cpu_seconds"])


def one_shot(folder: Path, say: Say) -> Figures:
    """One trigger, a count and a sum, beside the plain pipeline."""
    say("one shot")
    data = folder / "shot.parquet"
    oneshot.write_records(data, 1_000_000, 100_000, 1_000)
    frame = Frame(data, "int", folder / "runs", 1.0, 1e-6, 2)
    pairs = []
    for _ in range(REPEATS):
        job = write_job(frame, Setting(parse_mode("sticky"), 1, 10), oneshot.COUNT_AND_SUM)
        plain = in_child("tests.bench.one_run", str(job))
        pairs.append((run_of(job)["cpu_seconds"], plain["cpu_seconds"]))
    return {"one shot: cpu": least_ratio(pairs)}


def parts(say: Say) -> Figures:
    """Noise beside numpy's normal; the embedded store beside a row for each key."""
    say("sampler and store")
    drawn = sampler.bench(1_500.0, 50_000, 64, 7)
    stores = [state.on_sqlite(200_000, 20_000, 7) for _ in range(REPEATS)]
    own, rows = (
        max(run["committed_per_second"] for run in side) for side in zip(*stores, strict=True)
    )
    return {"sampler: speed": drawn["ratio"], "store: speed": float(f"{own / rows:.4g}")}


def commands(folder: Path, say: Say) -> Figures:
    """What a command costs before it does anything, beside the import of what it stands on."""
    say("imports and commands")
    (folder / "dpstream.toml").write_text(EXAMPLE.read_text())
    accounts.create(folder / "flights.account.db", "flights", (1e3, 1e-2), "tailnum", id_="0" * 16)
    new_secret(folder / "flights.secret")
    base = [sys.executable, "-c", "import numpy, pyarrow, apache_beam"]
    dpstream = [sys.executable, "-m", "dpstream"]
    command_lines = {
        "import: cpu": [
            sys.executable,
            "-c",
            "import dpstream.dp_transforms, dpstream.pipelines.stream.run",
        ],
        "--help: cpu": [*dpstream, "--help"],
        "plan: cpu": [*dpstream, "plan"],
    }

    def seconds(command: list[str]) -> float:
        before = child_seconds()
        subprocess.run(command, check=True, capture_output=True, cwd=folder)
        return child_seconds() - before

    seconds(base)
    timings: dict[str, list[tuple[float, float]]] = {name: [] for name in command_lines}
    for _ in range(REPEATS):
        beside = seconds(base)
        for name, command in command_lines.items():
            timings[name].append((seconds(command), beside))
    return {name: least_ratio(pairs) for name, pairs in timings.items()}


def least_ratio(pairs: Iterable[tuple[float, float]]) -> float:
    """Least of the first to least of the second, to four digits."""
    own, beside = zip(*pairs, strict=True)
    return float(f"{min(own) / min(beside):.4g}")


def median(values: "list[float] | Iterator[float]") -> float:
    """Middle value, to four digits."""
    return float(f"{statistics.median(values):.4g}")


def measure(sizes: list[int], folder: Path, say: Say) -> Figures:
    """Every figure."""
    figures: Figures = {}
    for users in sizes:
        figures |= stream(folder, users, say)
    return figures | one_shot(folder, say) | parts(say) | commands(folder, say)


def compare(figures: Figures, recorded: Figures) -> list[str]:
    """What is not as recorded, in words."""
    wrong = []
    for name in sorted({*figures, *recorded}):
        if name not in figures or name not in recorded:
            wrong.append(f"{name}: {'not measured' if name in recorded else 'not recorded'}")
            continue
        change = figures[name] / recorded[name] - 1
        if abs(change) > tolerance(name):
            wrong.append(f"{name}: {figures[name]:g}, recorded {recorded[name]:g} ({change:+.0%})")
    return wrong


def tolerance(name: str) -> float:
    """How far the figure may differ."""
    return TOLERANCES[name.replace(":", " ").split()[-1]]


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--users", type=int, nargs="+", default=[250_000, 1_000_000])
    parser.add_argument("--record", metavar="REASON", help="record what is measured, and why")
    parser.add_argument("--out", type=Path, help="append the JSON result to this file")
    args = parser.parse_args()
    logging.disable(logging.CRITICAL)
    with tempfile.TemporaryDirectory() as scratch:
        figures = measure(args.users, Path(scratch), lambda what: print(what, file=sys.stderr))
    emit({"benchmark": "figures", **machine(), "figures": figures}, args.out)
    before = json.loads(RECORDED.read_text()) if RECORDED.exists() else {"figures": {}}
    if args.record:
        content = {**before, "reason": args.record, "figures": figures}
        RECORDED.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n")
        return
    wrong = compare(figures, before["figures"])
    print("\n".join([*wrong, f"{len(figures)} figures, {len(wrong)} not as recorded"]))
    raise SystemExit(bool(wrong))


if __name__ == "__main__":
    main()

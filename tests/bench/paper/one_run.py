"""One measured run: ``python -m tests.bench.paper.one_run JOB``.

The last line on stdout is JSON: what was measured, or the refusal and its exit code.  Its own
process, so that peak memory is the run's and the memory is returned.
"""

import json
import logging
import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from dpstream.accounting.errors import (
    DpstreamError,
    InvariantError,
    PolicyError,
    RunError,
    UsageError,
)
from dpstream.pipelines.connectors.input_files import manifest
from dpstream.pipelines.jobs.job import Job
from tests.fixed_runs import fix_run_id


def measure(job: Job, run: Callable[[Job], Any]) -> dict[str, Any]:
    """Seconds, rate, seconds by stage, peak memory and size of the state of one run.

    Args:
        job: a job on Parquet files; run: runs it to its end.
    """
    from dpstream.dp_transforms.telemetry import stage_cpu_seconds, stage_seconds

    records = sum(pq.read_metadata(file.path).num_rows for file in manifest(job))
    start, cpu = time.perf_counter(), time.process_time()
    run(job)
    seconds = time.perf_counter() - start
    if job.state.path is None:
        raise InvariantError("job.state.path is not None")
    state = sum(p.stat().st_size for p in job.state.path.parent.glob("state.db*"))
    return {
        "records": records,
        "seconds": round(seconds, 2),
        "cpu_seconds": round(time.process_time() - cpu, 2),
        "records_per_second": round(records / seconds),
        "stage_seconds": {k: round(v, 2) for k, v in stage_seconds.items()},
        "stage_cpu_seconds": {k: round(v, 2) for k, v in stage_cpu_seconds.items()},
        "peak_gib": round(peak_gib(), 3),
        "state_mib": round(state / 2**20, 1),
    }


def peak_gib() -> float:
    """Largest resident size of this process so far.

    Not ``ru_maxrss`` where Linux tells better: a child begins with its parent's.
    """
    status = Path("/proc/self/status")
    if status.exists():
        return int(status.read_text().partition("VmHWM:")[2].split()[0]) / 2**20
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


#: What the command sets for itself (`pipelines.runners.memory`), here for both sides of a ratio.
ONE_HEAP = {"MALLOC_ARENA_MAX": "1", "ARROW_DEFAULT_MEMORY_POOL": "system"}


def in_child(module: str, *args: str) -> dict[str, Any]:
    """Run ``python -m module args`` and return the JSON of its last line.

    Raises:
        DpstreamError: what the child was refused with, or that it failed.
    """
    command, env = [sys.executable, "-W", "ignore", "-m", module, *args], os.environ | ONE_HEAP
    out = subprocess.run(command, check=False, stdout=subprocess.PIPE, text=True, env=env)
    try:
        result: dict[str, Any] = json.loads(out.stdout.strip().splitlines()[-1])
    except (ValueError, IndexError):
        raise RunError("run", "ended without a result", "run `dpstream doctor`") from None
    if out.returncode == 0:
        return result
    kinds = {kind.exit_code: kind for kind in (UsageError, PolicyError, RunError)}
    kind = kinds.get(out.returncode, RunError)
    raise kind(result["field"], result["rule"], result["fix"])


def main(path: str) -> None:
    """Run and measure one job."""
    logging.disable(logging.CRITICAL)
    from dpstream.pipelines.cli.parts import Bar
    from dpstream.pipelines.jobs.job import load_job
    from dpstream.pipelines.stream.run import run_job

    fix_run_id(Path(path))  # the job's secret is its own
    try:
        job = load_job(path)
        with Bar(hidden=not sys.stderr.isatty()) as bar:
            result = measure(job, lambda job: run_job(job, progress=bar.update))
    except DpstreamError as error:
        print(json.dumps(error.as_dict()))
        raise SystemExit(error.exit_code) from None
    print(json.dumps(result))


if __name__ == "__main__":
    main(str(Path(sys.argv[1])))

"""One timed run of a job in its own process: ``python -m tests.bench.one_run JOB [--plain]``.

Prints seconds, records/s, seconds by stage, peak memory and state size as JSON.  ``--plain``
runs the non-private pipeline of the same shape on the same input instead.
"""

import json
import logging
import shutil
import sys
import time
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from tests.bench.common import peak_gib


def main(path: str, plain: bool) -> dict[str, Any]:
    """Run the job from an empty store and measure."""
    logging.disable(logging.CRITICAL)
    from dp_transforms.telemetry import stage_seconds
    from pipelines.job import load_job
    from pipelines.stream import run_job
    from tests.bench.plain import run_plain

    job = load_job(path)
    folder = Path(job.sink.path).parent
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    records = pq.ParquetFile(job.source.path).metadata.num_rows
    start, cpu = time.perf_counter(), time.process_time()
    (run_plain if plain else run_job)(job)
    seconds = time.perf_counter() - start
    return {
        "records": records,
        "seconds": round(seconds, 2),
        "cpu_seconds": round(time.process_time() - cpu, 2),
        "records_per_second": round(records / seconds),
        "stage_seconds": {k: round(v, 2) for k, v in stage_seconds.items()},
        "peak_gib": round(peak_gib(), 3),
        "state_mib": round(sum(p.stat().st_size for p in folder.glob("state.db*")) / 2**20, 1),
    }


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1], "--plain" in sys.argv)))

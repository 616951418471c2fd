"""The non-private pipeline of one job, timed: ``python -m tests.bench.one_run JOB``.

Beside ``tests.bench.paper.one_run``, which times the job itself, with the same measures.
"""

import json
import logging
import sys

from dpstream.pipelines.jobs.job import load_job
from tests.bench.paper.one_run import measure
from tests.bench.plain import run_plain

if __name__ == "__main__":
    logging.disable(logging.CRITICAL)
    print(json.dumps(measure(load_job(sys.argv[1]), run_plain)))

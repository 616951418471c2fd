"""Jobs with releases of several windows, for tests of pages."""

import numpy as np

from dpstream.pipelines.jobs.job import Job
from tests.reports import edit, put

#: Keys that a page must bear: marks of HTML and of spreadsheets, directions, quotes, length.
HOSTILE = [
    "<script>document.title='pwned'</script>",
    '"><img src=x onerror="document.title=1">',
    "=1+1",
    "@SUM(A1)",
    "'-quoted\"",
    "\u202eturned, with a comma",
    "</script><b>bold</b>",
    "k" * 400,
]
MEAN = 'aggregate.level = { kind = "mean", column = "value", bounds = [0, 10] }\nstart ='


def weeks(job: Job, keys: list[str], windows: int, seed: int = 0, trigger: int = 4) -> Job:
    """A job with a mean beside its count, and its last release of every window."""
    job = edit(
        job, ('end = "2024-01-02T', f'end = "{np.datetime64("2024-01-01") + windows}T'),
        ("start =", MEAN),
    )  # fmt: skip
    rng = np.random.default_rng(seed)
    for window in range(windows):
        rows = [
            {"key": key, "records": size, "records_sd": 5.0, "total": 3 * size, "total_sd": 10.0,
             "level": float(rng.uniform(0, 10)), "level_sd": 400.0 if place else 0.2}
            for place, key in enumerate(sorted(keys))
            for size in [float(100 * (place + 1) + rng.normal(0, 5))]
            if (window + place) % 5
        ]  # fmt: skip
        put(job, trigger, rows, window)
    return job

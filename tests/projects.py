"""Project files for tests: one text with a job, changed by replacing parts of it."""

from pathlib import Path

PROJECT = """\
version = 1

[data_set.shop]
unit = { name = "customer" }
insecure_test_secret = "0f0f0f0f0f0f0f0f0f0f0f0f0f0f0f0f0f0f0f0f0f0f0f0f0f0f0f0f0f0f0f0f"

[table.visits]
path = "visits/*.parquet"
unit_column = "user"
time_column = "time"

[job.daily]
table = "visits"
key = ["page"]
aggregate.views = { kind = "count" }
aggregate.seconds = { kind = "mean", column = "seconds", bounds = [0, 120] }
start = "2024-01-01T00:00:00Z"
end = "2024-01-08T00:00:00Z"
window = "1 day"
release_every = "6 hours"
budget = { epsilon = 4, delta = 1e-6, covers = "window" }
contributions = 8
sink = { kind = "parquet", path = "releases" }
"""


def write_project(folder: Path, *changes: tuple[str, str], more: str = "") -> Path:
    """Write the project file of a folder: `PROJECT` with parts of it replaced, and more at its end.

    Args:
        changes: (a part of the text, what stands there instead); each part must be in it.
    """
    text = PROJECT
    for old, new in changes:
        assert old in text, old
        text = text.replace(old, new, 1)
    path = folder / "dpstream.toml"
    path.write_text(text + more)
    return path

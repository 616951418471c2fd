"""Project files for tests: one text with a job, changed by replacing parts of it."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tomlkit

from dpstream.pipelines.project.project import Project, decode_project
from dpstream.state.ledger.open import PROJECT_FILE

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


def of_tables(
    folder: Path, unit: tuple[str, str], tables: Mapping[str, Mapping[str, Any]], **section: Any
) -> Project:
    """A project of one data set ``d`` in a folder, without a file; its account need not be there.

    Args:
        unit: name and type; tables: sections by name; section: more of the data set's.
    """
    data_set = {
        "unit": dict(zip(("name", "type"), unit, strict=True)),
        "account": {"path": "ledger.db", "id": "0acc0acc0acc0acc"},
        **section,
    }
    return of_sections(folder, {"data_set": {"d": data_set}, "table": tables})


def of_sections(folder: Path, sections: Mapping[str, Any]) -> Project:
    """A project of sections in a folder, without a file."""
    text = tomlkit.dumps({"version": 1, **sections})
    return decode_project(text.encode(), folder / PROJECT_FILE)


def typed(*words: object) -> list[str]:
    """The words of a command line; a project file among them is named by ``--project``."""
    line = list[str]()
    for word in words:
        if isinstance(word, Path) and word.name == PROJECT_FILE:
            line.append("--project")
        line.append(str(word))
    return line

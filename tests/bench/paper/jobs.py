"""Project files of experiments: the generated day, one key column, COUNT(*) by default."""

import glob
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import tomlkit

from dpstream.pipelines.jobs.secret import new_secret
from tests.bench.paper.modes import Mode
from tests.bench.paper.synth import DAY_MICROS


class Frame(NamedTuple):
    """What all runs of an experiment share.

    Attributes:
        data: Parquet file, or a folder of some, with user, key and time of 2024-01-01;
            user_type: ``int``, ``string``.
        folder: where runs are kept; epsilon, delta: the guarantee; shards: key shards.
    """

    data: Path
    user_type: str
    folder: Path
    epsilon: float
    delta: float
    shards: int = 4


class Setting(NamedTuple):
    """One run: a mode, T and C."""

    mode: Mode
    triggers: int
    contributions: int


def write_job(
    frame: Frame, setting: Setting, aggregates: Mapping[str, dict[str, Any]] | None = None
) -> Path:
    """Write a project file and a fresh secret into a fresh folder below ``frame.folder``.

    Without ``aggregates`` one column ``count``: of records, or of users (``Mode.kind``).
    """
    name = f"{setting.mode.slug}-T{setting.triggers}-C{setting.contributions}-"
    frame.folder.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix=name, dir=frame.folder))
    new_secret(folder / "noise.secret")
    job = {
        "table": "day",
        "key": ["key"],
        "aggregate": dict(aggregates or {"count": {"kind": setting.mode.kind}}),
        "start": "2024-01-01T00:00:00Z",
        "end": "2024-01-02T00:00:00Z",
        "window": "1d",
        "release_every": f"{DAY_MICROS // setting.triggers}us",
        "budget": {"epsilon": frame.epsilon, "delta": frame.delta, "covers": "lifetime"},
        "contributions": setting.contributions,
        **setting.mode.job,
        "mechanism": setting.mode.mechanism,
        "store": "state.db",
        "shards": frame.shards,
        "sink": {"kind": "parquet", "path": "releases"},
    }
    sections = {
        "version": 1,
        "data_set": {
            "day": {
                "unit": {"name": "user", "type": frame.user_type},
                "secret": "file:noise.secret",
            }
        },
        "table": {
            "day": {"path": pattern_of(frame.data), "unit_column": "user", "time_column": "time"}
        },
        "job": {"day": job},
    }
    path = folder / "dpstream.toml"
    path.write_text(tomlkit.dumps(sections), encoding="utf-8")
    return path


def pattern_of(data: Path) -> str:
    path = glob.escape(str(data.absolute()))
    return f"{path}/*.parquet" if data.is_dir() else path

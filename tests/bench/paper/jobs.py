"""Project files of experiments: the generated day, one key column, COUNT(*) by default.

What ``--modes`` names: settings of a job's mechanism.

    sticky                             a named setting: the product's defaults, in which published
                                       keys take no selection weight (section 9)
    tree blt dense                     every record counts equally, one noise strategy each
    weights per_key combined fused     ways to more keys and less error (mechanism.md section 8)
    combined,skip=false                as runs were before published keys were skipped
    sticky,strategy=dense              with one more field of mechanism
    per_key_bound=1,weights={power=1}  fields alone; values as in TOML, texts unquoted

``per_key_bound`` is a field of the job itself.  Fields and values are not judged here: they pass
into the job, which refuses what it does not know.
"""

import glob
import itertools
import re
import tempfile
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import tomlkit

from dpstream.accounting.errors import UsageError
from dpstream.pipelines.jobs.secret import new_secret
from tests.bench.paper.synth import DAY_MICROS

_EQUAL = {"weights": "uniform"}
NAMED: dict[str, dict[str, Any]] = {
    "sticky": {},
    "tree": {**_EQUAL, "strategy": "tree"},
    "blt": {**_EQUAL, "strategy": "blt"},
    "dense": {**_EQUAL, "strategy": "dense"},
    "weights": {"weights": {"offset": 3.0, "power": 1.0}},
    "per_key": {**_EQUAL, "per_key_bound": 1},
    "combined": {"per_key_bound": 1, "combine": True},
    "fused": {**_EQUAL, "per_key_bound": 1},
}
#: Set by options of their own, alike for all modes and baselines.
_ELSEWHERE = {"epsilon", "delta", "contributions", "covers", "secret"}
#: Fields of the job itself.
_OWN = {"per_key_bound", "threads"}


class Mode(NamedTuple):
    """A mode: its name as written, and the fields that it sets."""

    name: str
    fields: dict[str, Any]

    @property
    def job(self) -> dict[str, Any]:
        """Fields of the job."""
        return {name: value for name, value in self.fields.items() if name in _OWN}

    @property
    def mechanism(self) -> dict[str, Any]:
        """Fields of its mechanism."""
        return {name: value for name, value in self.fields.items() if name not in _OWN}

    @property
    def kind(self) -> str:
        """What is published: ``fused`` publishes the selection itself, a count of users."""
        return "units" if self.name.partition(",")[0] == "fused" else "count"

    @property
    def slug(self) -> str:
        """The name as part of a folder's name."""
        return re.sub(r"[^A-Za-z0-9.]+", "-", self.name).strip("-")[:60] or "mode"


def parse_mode(text: str) -> Mode:
    """Read one mode; see the module's docstring.

    Raises:
        UsageError: neither a known name nor key=value.
    """
    fields: dict[str, Any] = {}
    for index, part in enumerate(_parts(text)):
        key, equals, value = part.partition("=")
        if not equals and index == 0 and part in NAMED:
            fields |= NAMED[part]
        elif not equals or not re.fullmatch(r"[a-z_]+", key):
            raise UsageError(
                "--modes",
                "is not NAME, NAME,key=value or key=value,...",
                f"names are {', '.join(NAMED)}; fields are those of mechanism",
            )
        elif key in _ELSEWHERE:
            raise UsageError("--modes", f"cannot set {key}", "it is the same for all modes")
        else:
            fields[key] = _value(value)
    return Mode(text, fields)


def _parts(text: str) -> list[str]:
    """Split at commas that are in no bracket."""
    depth = itertools.accumulate((c in "[{") - (c in "]}") for c in text)
    marked = "".join("\0" if c == "," and not d else c for c, d in zip(text, depth, strict=True))
    return [part.strip() for part in marked.split("\0")]


def _value(text: str) -> Any:
    """A TOML value; anything else is a text."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


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

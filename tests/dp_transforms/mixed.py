"""Runs of mixed cells that the tests share."""

from collections.abc import Iterable, Sequence
from pathlib import Path

import msgspec
import numpy as np
import pyarrow as pa

from dpstream.accounting.arrays import Float64
from dpstream.accounting.mixing import Mixing, cells_of
from dpstream.accounting.plan.plan import Plan
from dpstream.dp_transforms.flow import run_in_memory
from dpstream.dp_transforms.run import Run, begin_run
from dpstream.state import open as stores
from tests.streams import KEYS, RUN_ID, Stream, as_rows, by_name, make_plan, public_table


def factors(*shape: int) -> list[Float64]:
    """Matrices far from the identity, neither symmetric nor triangular."""
    rng = np.random.default_rng(shape)
    return [np.eye(n) + 0.4 * rng.normal(size=(n, n)) / np.sqrt(n) for n in shape]


def mixed_plan(mixing: Mixing | None, **options: object) -> Plan:
    """A plan of public keys with this mixing."""
    settings = {"strategy": "dense", "public": "all cells", "triggers": 8, **options}
    plan = make_plan(**settings)  # type: ignore[arg-type]
    return msgspec.structs.replace(plan, cells=cells_of(mixing)).check()


def begin_mixed(
    plan: Plan, folder: Path, mixing: Mixing, shards: int = 3, calibration: str | None = None
) -> Run:
    """A run on a store in the folder; its cells are the first keys of generated streams.

    Args:
        calibration: numbers of the run in the place of the plan's own.
    """
    public, url = public_table(plan, range(mixing.size)), f"sqlite:{folder}/mixed.db"
    folder.mkdir(parents=True, exist_ok=True)
    given = {"calibration": calibration, "public": public, "mixing": mixing}
    return begin_run(plan, KEYS, url, shards, run_id=RUN_ID, **given)[0]  # type: ignore[arg-type]


def released(run: Run, source: Iterable[pa.RecordBatch]) -> dict[tuple[int, int], bytes]:
    """(window, trigger) -> bytes of each release, of a whole run in memory."""
    releases, _ = run_in_memory(run, source)
    stores.close_all()
    return by_name(releases)


def matrices(sealed: dict[tuple[int, int], bytes], names: Sequence[str]) -> dict[str, Float64]:
    """Name -> (releases, cells) values, releases in order, cells in the order of their list."""
    columns: dict[str, list[list[float]]] = {name: [] for name in names}
    for place in sorted(sealed):
        rows = sorted(as_rows(sealed[place]), key=lambda row: str(row["page"]))
        for name in names:
            columns[name].append([float(row[name]) for row in rows])  # type: ignore[arg-type]
    return {name: np.array(values) for name, values in columns.items()}


def exact_counts(plan: Plan, stream: Stream, cells: int) -> Float64:
    """(releases, cells) records up to each trigger, tumbling windows, none of them left out."""
    timeline, rows = plan.timeline, []
    for window in range(timeline.windows):
        begin = timeline.start + window * timeline.window
        for trigger in range(1, timeline.triggers + 1):
            end = begin + trigger * timeline.trigger_every
            inside = (stream.event >= begin) & (stream.event < end) & (stream.key < cells)
            rows.append(np.bincount(stream.key[inside], minlength=cells))
    return np.array(rows, np.float64)

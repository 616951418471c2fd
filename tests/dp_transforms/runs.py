"""Plans, streams and runs of the step tests, and a sampler without noise."""

import unicodedata
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import pytest

from dpstream.accounting.arrays import Float64
from dpstream.accounting.budget.allocation import Budget, StreamNoise, allocate
from dpstream.accounting.mixing import Mixing, cells_of
from dpstream.accounting.plan.plan import Plan
from dpstream.accounting.weights import SelectionWeights
from dpstream.dp_transforms.flow import run_in_memory
from dpstream.dp_transforms.noise.ids import typed_ids
from dpstream.dp_transforms.noise.prf import KeyRing
from dpstream.dp_transforms.noise.sampler import RoundedGaussian
from dpstream.dp_transforms.run import Run, begin_run
from dpstream.dp_transforms.step import run_name
from dpstream.state import open as stores
from dpstream.state.store import RunIdentity
from tests.dp_transforms.exhaustive import Row, SlowNoise, exhaustive, skipping
from tests.dp_transforms.reference import accept, admitted, skips
from tests.streams import (
    COUNT,
    KEYS,
    MEAN,
    RUN_ID,
    STEP,
    SUM,
    TWIN,
    UNITS,
    Stream,
    as_rows,
    by_name,
    generate,
    key_name,
    make_plan,
    public_table,
    released,
)

ALL = (COUNT, MEAN, SUM, UNITS)
PUBLIC = range(0, 90, 2)
PLANS: dict[str, Plan] = {
    "sticky": make_plan(),
    "sticky pre-threshold": make_plan(pre_threshold=3),
    "sticky refresh 5": make_plan(triggers=13, refresh_every=5, select_every=1),
    "sticky both 3": make_plan(triggers=13, refresh_every=3),
    "tests apart": make_plan(triggers=13, select_every=4, refresh_every=1, strategy="blt"),
    "tests apart units": make_plan(triggers=14, refresh_every=4, select_every=2, aggregates=ALL),
    "refresh at close alone": make_plan(
        triggers=5, refresh_every=6, windows=3, aggregates=(UNITS,)
    ),
    "sticky units": make_plan(aggregates=(UNITS,)),
    "sticky all": make_plan(aggregates=ALL),
    "sticky late": make_plan(stamped=True, triggers=16, lateness=4, skew=STEP),
    "sticky sliding": make_plan(triggers=8, slide=4, windows=5, aggregates=(COUNT, UNITS)),
    "sticky periods": make_plan(triggers=6, windows=4, period=6),
    "one trigger": make_plan(triggers=1, windows=3),
    "never remembered": make_plan(windows=3, triggers=6, remember="never"),
    "remembered": make_plan(windows=4, triggers=5, remember="run", refresh_every=2),
    "remembered for a while": make_plan(
        windows=6, triggers=4, remember=3 * STEP, aggregates=(COUNT, UNITS), pre_threshold=1
    ),
    "remembered sliding": make_plan(
        triggers=8, slide=2, windows=9, remember=5 * STEP, stamped=True, lateness=2, skew=STEP
    ),
    "long": make_plan(triggers=40, windows=1, select_every=1),
    "blt long": make_plan(strategy="blt", triggers=40, windows=1, select_every=1),
    "blt units": make_plan(strategy="blt", aggregates=(COUNT, UNITS)),
    "blt": make_plan(strategy="blt", aggregates=(COUNT, SUM)),
    "dense": make_plan(strategy="dense", aggregates=(COUNT, MEAN)),
    "geometric selected": make_plan(strategy="geometric", triggers=6, aggregates=(COUNT, UNITS)),
    "geometric tests apart": make_plan(strategy="geometric", triggers=8, select_every=4),
    "geometric once": make_plan(
        strategy="geometric", triggers=1, windows=3, aggregates=(COUNT, SUM), pre_threshold=1
    ),
    "geometric remembered": make_plan(
        strategy="geometric", triggers=1, windows=6, remember=3 * STEP, aggregates=(UNITS, MEAN)
    ),
    "public": make_plan(public="fixed list"),
    "public geometric": make_plan(public="fixed list", strategy="geometric", delta=0.0),
    "public geometric all": make_plan(
        public="fixed list",
        strategy="auto",
        aggregates=ALL,
        refresh_every=3,
        triggers=20,
        contributions=1,
    ),
    "public all": make_plan(public="fixed list", aggregates=ALL, refresh_every=3, triggers=13),
}


def ranked_plan(weights: tuple[float, float] | float | None = None, **options: object) -> Plan:
    """A plan in which the order of a unit's pairs matters, with more pairs for each unit.

    Args:
        weights: offset and power, or the share of selection of weights by size.
    """
    given = None
    if isinstance(weights, float):
        given = SelectionWeights(size_share=weights)
    elif weights is not None:
        given = SelectionWeights(*weights)
    settings: dict[str, Any] = {
        "contributions": 5,
        "epsilon": 9.0,
        "weights": given,
        "skip": False,
        **options,
    }
    return make_plan(**settings)


LATE: dict[str, Any] = {"stamped": True, "lateness": 3, "skew": STEP}
SLIDING: dict[str, Any] = {"triggers": 9, "slide": 3, "windows": 4}
RANKED: dict[str, Plan] = {
    "per key": ranked_plan(per_key_bound=1, aggregates=(COUNT, SUM, MEAN)),
    "per key units": ranked_plan(per_key_bound=1, aggregates=(UNITS,), strategy="blt"),
    "geometric per key": ranked_plan(
        per_key_bound=1, strategy="geometric", aggregates=(COUNT, MEAN), triggers=4
    ),
    "geometric per key once": ranked_plan(
        per_key_bound=1, strategy="geometric", triggers=1, windows=5, remember="run"
    ),
    "per key sliding": ranked_plan(
        per_key_bound=1, aggregates=(COUNT, SUM), strategy="blt", **SLIDING, **LATE
    ),
    "per key public": ranked_plan(
        per_key_bound=1, aggregates=ALL, strategy="blt", public="list",
        refresh_every=3, epsilon=40.0,
    ),
    "two per key": ranked_plan(per_key_bound=2, aggregates=(COUNT, SUM), pre_threshold=1),
    "three per key sliding": ranked_plan(
        (3, 1), per_key_bound=3, aggregates=(COUNT, UNITS, MEAN), strategy="blt", contributions=8,
        epsilon=40.0, **SLIDING, **LATE,
    ),
    "two per key public": ranked_plan(
        per_key_bound=2, aggregates=(COUNT, MEAN, TWIN), public="list", refresh_every=3,
    ),
    "weights": ranked_plan((3, 1)),
    "tests apart combined": ranked_plan(
        (3, 1), per_key_bound=1, combine=True, triggers=17, select_every=5, refresh_every=2,
        strategy="blt", pre_threshold=1, aggregates=(COUNT, SUM), epsilon=12.0,
    ),
    "weights units": ranked_plan((3, 0.5), aggregates=(UNITS, MEAN), strategy="blt"),
    "weights sliding": ranked_plan(
        (6, 1.5), aggregates=(COUNT, SUM), strategy="blt", epsilon=40.0, **SLIDING, **LATE
    ),
    "weights periods": ranked_plan((2, 1), triggers=6, windows=4, period=6, pre_threshold=3),
    "weights per key": ranked_plan((3, 1), per_key_bound=1, aggregates=(SUM,), refresh_every=5),
    "combined": ranked_plan(
        (3, 1), per_key_bound=1, combine=True, pre_threshold=3, aggregates=(COUNT, SUM)
    ),
    "combined units": ranked_plan(
        (3, 0.75), per_key_bound=1, combine=True, aggregates=(COUNT, UNITS),
        strategy="blt", epsilon=40.0,
    ),
    "combined late": ranked_plan(
        (3, 1), per_key_bound=1, combine=True, aggregates=(MEAN,), strategy="blt",
        triggers=14, **LATE,
    ),
    "by size": ranked_plan(
        0.2, per_key_bound=1, combine=True, triggers=1, windows=1, aggregates=(COUNT, SUM),
        pre_threshold=1,
    ),
    "by size periods": ranked_plan(
        0.35, per_key_bound=1, combine=True, triggers=1, windows=5, period=1, stamped=True,
        strategy="blt", aggregates=(UNITS, MEAN), epsilon=20.0, remember="never",
    ),
    "by size remembered": ranked_plan(
        0.5, per_key_bound=1, triggers=1, windows=4, period=1, strategy="dense",
    ),
    "one test": ranked_plan(
        (3, 1), per_key_bound=1, combine=True, triggers=9, windows=1, tests=1, strategy="blt",
        aggregates=(COUNT, MEAN),
    ),
    "one test units": ranked_plan(
        (3, 1), triggers=7, windows=3, tests=1, refresh_every=2, remember="never",
        aggregates=(UNITS, SUM),
    ),
    "one test remembered": ranked_plan(
        (3, 1), per_key_bound=1, combine=True, triggers=6, windows=3, tests=1, refresh_every=2,
    ),
    "geometric per key, one test": ranked_plan(
        per_key_bound=1, strategy="geometric", triggers=8, windows=1, tests=1,
        aggregates=(COUNT, SUM),
    ),
    "geometric per key, few tests": ranked_plan(
        per_key_bound=1, strategy="geometric", triggers=9, windows=3, tests=(2, 5, 9),
        pre_threshold=1, aggregates=(COUNT, MEAN),
    ),
    "tests listed": ranked_plan((3, 1), triggers=13, tests=(1, 2, 5, 13), refresh_every=2),
    "tests growing combined": ranked_plan(
        (3, 1), per_key_bound=1, combine=True, triggers=20, tests=4, strategy="blt",
    ),
}  # fmt: skip
SKIPPING: dict[str, Plan] = {
    "skip": ranked_plan((1, 2), skip=True, tests=(2, 4, 7, 12)),
    "skip combined": ranked_plan(
        (1, 2), skip=True, per_key_bound=1, combine=True, triggers=14, strategy="blt",
        aggregates=(COUNT, SUM), tests=6,
    ),
    "skip per key sliding": ranked_plan(
        (2, 1), skip=True, per_key_bound=1, aggregates=(COUNT, UNITS, MEAN), contributions=8,
        epsilon=40.0, tests=(1, 4, 9), **SLIDING, **LATE,
    ),
    "skip units": ranked_plan(
        (3, 0.5), skip=True, aggregates=(UNITS, MEAN), strategy="blt", triggers=12, windows=3,
    ),
    "skip late": ranked_plan(
        (2, 1), skip=True, triggers=14, tests=(1, 3, 6, 14), pre_threshold=2, **LATE
    ),
    "skip sliding": ranked_plan(
        (1, 1.5), skip=True, aggregates=(COUNT, SUM), strategy="blt", epsilon=40.0,
        tests=(1, 4, 9), **SLIDING, **LATE,
    ),
    "skip three windows": ranked_plan(
        (1, 2), skip=True, per_key_bound=1, combine=True, windows=4, triggers=7, tests=(2, 7),
        aggregates=(COUNT, UNITS), refresh_every=3,
    ),
    "skip remembered for a while": ranked_plan(
        (1, 1.5), skip=True, triggers=8, slide=2, windows=9, tests=(1, 3, 8), stamped=True,
        lateness=2, skew=STEP, remember=5 * STEP, refresh_every=2,
    ),
    "skip, never remembered": ranked_plan(
        (1, 2), skip=True, triggers=6, windows=3, tests=(2, 6), remember="never"
    ),
    "skip periods": ranked_plan(
        (2, 1), skip=True, triggers=6, windows=4, period=6, tests=(1, 3, 6)
    ),
}  # fmt: skip
RANKED |= SKIPPING
PLANS |= RANKED
MODES: list[Any] = [pytest.param(plan, id=name.replace(" ", "-")) for name, plan in PLANS.items()]
SELECTING = [p for p in MODES if p.values[0].public_keys is None]

Released = dict[tuple[int, int], list[Row]]


def identity(plan: Plan) -> tuple[bytes, ...]:
    return run_name(RunIdentity(plan.hash, RUN_ID, 0, 3, "", "", ""))


def key_ids(ring: KeyRing) -> dict[str, bytes]:
    names = [key_name(k) for k in range(100)]
    ids = typed_ids(ring.key, [("string", pa.array(names))])
    return {name: ids[i].tobytes() for i, name in enumerate(names)}


def rows_of(plan: Plan, sealed: dict[tuple[int, int], bytes]) -> Released:
    """Key and figures of each released row."""
    return {
        name: [
            (
                str(row["page"]),
                {a.name: (row[a.name], row[f"{a.name}_sd"]) for a in plan.aggregates},
            )
            for row in as_rows(data)
        ]
        for name, data in sealed.items()
    }


def stream_of(plan: Plan, seed: int = 1) -> Stream:
    if plan.design.ranked:  # units with many records, several of them of one key in one micro-batch
        return generate(plan, seed, records=2500, users=320, keys=40, heavy=True)
    return generate(plan, seed)


def options_of(plan: Plan) -> dict[str, Any]:
    return {} if plan.public_keys is None else {"public": public_table(plan, PUBLIC)}


def run(
    plan: Plan, paths: Iterator[str], stream: Stream | None = None, **options: object
) -> Released:
    stream = stream_of(plan) if stream is None else stream
    settings = options_of(plan) | options
    return rows_of(plan, released(plan, stream.batches(400), next(paths), **settings))


def slow(plan: Plan, ring: KeyRing, stream: Stream | None = None) -> Released:
    stream = stream_of(plan) if stream is None else stream
    public = [key_name(k) for k in PUBLIC] if plan.public_keys is not None else []
    noise = SlowNoise(plan, ring, identity(plan))
    if skips(plan):
        return skipping(plan, accept(plan, stream).values(), key_ids(ring), noise)
    return exhaustive(plan, admitted(plan, listed(plan, stream)), key_ids(ring), noise, public)


def listed(plan: Plan, stream: Stream) -> Stream:
    """What ingest lets pass of a stream: with public keys only records of these."""
    if plan.public_keys is None:
        return stream
    return stream.take(np.flatnonzero(np.isin(stream.key, list(PUBLIC))))


class Silent(RoundedGaussian):
    """A sampler without noise."""

    def __init__(self, noise: StreamNoise, tested: bool = False) -> None:
        super().__init__(noise.sigma)

    def draw(
        self, prf: object, tweaks: np.ndarray, first: np.ndarray, last: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        counts = last - first
        return np.zeros(int(counts.sum()), np.int32), np.cumsum(counts) - counts


def without_noise(plan: Plan) -> Budget:
    budget = allocate(plan)
    if budget.tau is None:
        return budget
    tau = np.full_like(budget.tau, plan.privacy.pre_threshold << 8)
    return msgspec.structs.replace(budget, tau=tau)


# Runs of mixed cells that the tests share.


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


def mixed_released(run: Run, source: Iterable[pa.RecordBatch]) -> dict[tuple[int, int], bytes]:
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


# Arrow layouts of the same rows, and what a row's text should become.


#: What a test expects of a row that has no canonical form.
BAD = "no canonical form"
Layout = Callable[[Sequence[Any]], pa.Array]


def raw(kind: pa.DataType) -> Layout:
    """Text or bytes without any check of the content."""

    def build(values: Sequence[bytes | None]) -> pa.Array:
        ends = np.cumsum([0] + [len(v or b"") for v in values]).astype(np.int32)
        valid = np.packbits([v is not None for v in values], bitorder="little")
        data = pa.py_buffer(b"".join(v or b"" for v in values))
        buffers = [pa.py_buffer(valid.tobytes()), pa.py_buffer(ends), data]
        return pa.Array.from_buffers(kind, len(values), buffers)

    return build


def cast(kind: pa.DataType, then: pa.DataType | None = None) -> Layout:
    def build(values: Sequence[Any]) -> pa.Array:
        array = pa.array(values, kind)
        return array if then is None else array.cast(then)

    return build


def coded(kind: pa.DataType) -> Layout:
    return lambda values: pa.array(values, kind).dictionary_encode()


def sliced(layout: Layout) -> Layout:
    """The same rows in the middle of a longer array."""

    def build(values: Sequence[Any]) -> pa.Array:
        padded = [*values[-1:], *values, *values[:1]]
        return layout(padded).slice(1, len(values))

    return build


def ticks(kind: pa.DataType, width: pa.DataType) -> Layout:
    return lambda values: pa.array(values, width).view(kind)


TEXT_LAYOUTS: dict[str, Layout] = {
    "string": cast(pa.string()),
    "large": cast(pa.large_string()),
    "view": cast(pa.string_view()),
    "dictionary": coded(pa.string()),
    "large dictionary": coded(pa.large_string()),
}
BYTE_LAYOUTS: dict[str, Layout] = {
    "binary": cast(pa.binary()),
    "large": cast(pa.large_binary()),
    "view": cast(pa.binary_view()),
    "text without check": raw(pa.string()),
    "dictionary": coded(pa.binary()),
}


def text_expected(value: str | bytes | None) -> str:
    if value is None:
        return BAD
    try:
        encoded = value.encode() if isinstance(value, str) else value
        normal = unicodedata.normalize("NFC", encoded.decode("utf-8"))
    except UnicodeError:
        return BAD
    return normal if max(len(encoded), len(normal.encode())) <= 1024 else BAD

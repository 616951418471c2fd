"""A session of queries, three ways: direct, PINQ-like with one global budget, budgets per record.

    python -m tests.bench.session [--rows N] [--queries N] [--runs R] [--individual] [--held]
                                  [--out FILE]

The session has the shape of one on a month of rides (the seed's section 6): histograms of six
columns, then a 16 x 16 grid of squares in the dense part of the map: a count each, averages of two
columns where there are most rides; counts again, medians where there are most.  Every query is
asked in all three ways, one after the other, in turning order:

* ``direct``: DuckDB on the same coordinates, without noise;
* ``pinq``: the same scan, the same noise, one durable charge of a global budget;
* ``unitrax``: a statement of SQL: condition on the initial budget, decision, durable charge of the
  region, scan, noise, committed answer.

Ratios are per query, of the medians of the runs.  Then the same session as batches, and with the
analyst's re-balancing (ranges widened to whole columns): regions at the beginning of each query.
The exit code is 1 when a limit is exceeded; limits of ratios are for 14M rows.

Rides with budgets of their own, generated: a map, times, distances, fares.

Half of the rides begin in a dense part of the map, by a law that falls off from its middle, so that
squares of a grid there have very different numbers of rides.
"""

import argparse
import contextlib
import itertools
import secrets
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from dpstream.accounting.arrays import Float64
from dpstream.accounting.plan.unit import UnitIdentity
from dpstream.accounting.regions.amounts import charge_of
from dpstream.accounting.sessions.aggregates import COUNT, Aggregate, Cells, Question
from dpstream.dp_transforms.session import answered
from dpstream.pipelines.session.ask import order_of
from dpstream.pipelines.session.config import load_config
from dpstream.pipelines.session.open_table import OpenTable
from dpstream.pipelines.session.records.load import init
from dpstream.pipelines.session.records.scan import Scan
from dpstream.state.ledger.contract import Decision
from dpstream.state.ledger.events import Charge
from dpstream.state.ledger.history import History
from dpstream.state.ledger.open import PROJECT_FILE
from dpstream.state.ledger.orders import Order
from tests import accounts
from tests.bench.common import emit, machine
from tests.pipelines.session.statements import Session
from tests.sessions import average, median

#: Values of each dimension, from 0.
SIZES = {
    "x": 1024, "y": 1024, "hour": 744, "passengers": 7, "distance": 3_000, "fare": 10_000,
    "tip": 3_000,
}  # fmt: skip
#: The dense part of the map: from, to, in both directions.
DENSE = (384, 640)
_CHUNK = 2_000_000

_TABLE = """
version = 1
[data_set.rides]
account = { path = "ledger.db" }
insecure_test_secret = "KEY"
[table.rides]
path = "rides-*.parquet"
"""
_DIMENSION = """[table.rides.dimension.{}]
type = "integer"
low = 0
high = {}
"""
_BUDGET = """[table.rides.dimension.initial]
type = "budget"
most = 8.0
step = 0.1
"""


def write(folder: Path, rows: int, individual: bool) -> Path:
    """The records and the project file; budgets of 4 for everybody, or from 1 to 8 each."""
    folder.mkdir(parents=True, exist_ok=True)
    draw = np.random.default_rng(2013)
    for part, begin in enumerate(range(0, rows, _CHUNK)):
        table = _rides(draw, min(_CHUNK, rows - begin), individual)
        pq.write_table(table, folder / f"rides-{part:03}.parquet")
    text = _TABLE.replace("KEY", "5e" * 31 + "a1")
    text += "".join(_DIMENSION.format(name, size) for name, size in SIZES.items())
    path = folder / PROJECT_FILE
    accounts.write(
        path, text + _BUDGET + ('column = "budget"\n' if individual else "value = 4.0\n")
    )
    return path


def _rides(draw: np.random.Generator, count: int, individual: bool) -> pa.Table:
    middle, width = sum(DENSE) / 2, (DENSE[1] - DENSE[0]) / 5
    dense = draw.random(count) < 0.5
    places = {
        name: np.where(dense, draw.normal(middle, width, count), draw.random(count) * SIZES[name])
        for name in ("x", "y")
    }
    distance = draw.gamma(1.5, 200.0, count)
    fare = 250 + 2.5 * distance + draw.normal(0, 150, count)
    columns = places | {
        "hour": draw.integers(0, SIZES["hour"], count),
        "passengers": 1 + draw.binomial(5, 0.15, count),
        "distance": distance,
        "fare": fare,
        "tip": fare * draw.beta(1, 6, count),
    }
    fields = {
        name: np.clip(values, 0, SIZES[name] - 1).astype(np.int32)
        for name, values in columns.items()
    }
    if individual:
        fields["budget"] = draw.integers(10, 81, count) / 10
    return pa.table(fields)


BUDGET = 0.1
#: What a point of the dense squares pays in all: six histograms, counts, averages, counts, median.
NEEDED = 1.2
SQUARES, BARS = 16, 10
FULL = 1_213
#: Ratios at 14M rows: to PINQ-like and to direct, of mean and median; 99th percentile.
LIMITS = {False: (1.1, 1.15, 2.0), True: (1.2, 1.3, 2.0)}
HISTOGRAMS = {
    "hour": (0, 720), "passengers": (1, 6), "distance": (0, 2_000), "fare": (0, 6_000),
    "tip": (0, 1_000), "x": DENSE,
}  # fmt: skip
WAYS = ("direct", "pinq", "unitrax")

Ranges = dict[str, tuple[int, int]]


class Query(NamedTuple):
    """One figure of one box."""

    figure: Aggregate
    ranges: Ranges

    @property
    def predicate(self) -> str:
        """As an analyst writes it."""
        return " AND ".join(f"{n} >= {a} AND {n} < {b}" for n, (a, b) in self.ranges.items())


def session_of(queries: int, widened: bool) -> "Generator[Query, float | None, None]":
    """The queries; each is sent the answer to it (only the grid's counts matter).

    Args:
        queries: how many in all, 1,213 or fewer in the same proportions.
        widened: ranges at the edges go on to the end of their columns, and over squares that are
            not asked.
    """
    squares = SQUARES if queries == FULL else max(2, int(SQUARES * (queries / FULL) ** 0.5))
    bars = BARS if queries == FULL else 2
    for name, span in HISTOGRAMS.items():
        for part in _parts(name, span, min(bars, span[1] - span[0]), widened):
            yield Query(COUNT, {name: part})
    bar_count = sum(min(bars, b - a) for a, b in HISTOGRAMS.values())
    left = queries - bar_count - 2 * squares**2
    averaged = min(left * 220 // 641, squares**2)
    counts = yield from _grid(squares, widened)
    for figure in (average("fare"), average("distance")):
        yield from _dense(figure, counts, averaged, widened)
    counts = yield from _grid(squares, widened)
    yield from _dense(median("tip"), counts, left - 2 * averaged, widened)


def _parts(name: str, span: tuple[int, int], parts: int, widened: bool) -> list[tuple[int, int]]:
    edges = np.linspace(*span, parts + 1).astype(int).tolist()
    if widened:
        edges[0], edges[-1] = 0, SIZES[name]
    return list(itertools.pairwise(edges))


def _grid(squares: int, widened: bool) -> "Generator[Query, float | None, Float64]":
    counts = np.zeros((squares, squares))
    for row, y in enumerate(_parts("y", DENSE, squares, widened)):
        for column, x in enumerate(_parts("x", DENSE, squares, widened)):
            counts[row, column] = yield Query(COUNT, {"x": x, "y": y})
    return counts


def _dense(
    figure: Aggregate, counts: Float64, most: int, widened: bool
) -> "Generator[Query, float | None, None]":
    """The squares with the largest counts, in the order of the map."""
    squares = len(counts)
    chosen = np.zeros(counts.size, np.bool_)
    chosen[np.argsort(-counts.ravel(), kind="stable")[:most]] = True
    squares_chosen = chosen.reshape(counts.shape)
    edges = np.linspace(*DENSE, squares + 1).astype(int).tolist()
    rows = np.flatnonzero(squares_chosen.any(axis=1)).tolist()
    for row, y in zip(rows, _spans(rows, edges, "y", widened), strict=True):
        columns = np.flatnonzero(squares_chosen[row]).tolist()
        for x in _spans(columns, edges, "x", widened):
            yield Query(figure, {"x": x, "y": y})


def _spans(at: list[int], edges: list[int], name: str, widened: bool) -> list[tuple[int, int]]:
    if not widened:
        return [(edges[i], edges[i + 1]) for i in at]
    low = [0, *(edges[i] for i in at[1:])]
    return list(zip(low, [*low[1:], SIZES[name]], strict=True))


class Ways:
    """The three ways to ask, on one table; a context that closes them."""

    def __init__(self, project: Path, held: bool) -> None:
        self._stack = contextlib.ExitStack()
        config = load_config(project)
        self.session = self._stack.enter_context(Session(config, held=held))
        self._scan = self._stack.enter_context(Scan(config.folder, config.table, held=held))
        self._ring = self._stack.enter_context(config.secret_source().ring())
        self._space = config.table.space
        self._places = {d.name: i for i, d in enumerate(self._space.dimensions)}
        self._global = accounts.opened(
            project.parent / "global.db", "rides", limit=(1e6, 1e-9), unit="record", id_="0" * 16
        )
        self._stack.callback(self._global.close)
        self._base = self.session.where(f"initial >= {NEEDED}")

    def __enter__(self) -> "Ways":
        return self

    def __exit__(self, *raised: object) -> None:
        self._stack.close()

    @property
    def regions(self) -> int:
        """How many the account has."""
        return len(self.session.open_table.account.spent("epsilon").boxes)

    def direct(self, query: Query) -> float:
        """Plain SQL."""
        column = query.figure.column
        what = "count(*)" if not column else f"{query.figure.what}(x{self._places[column]})"
        what = what.replace("average", "avg").replace("quantiles", "median")
        tests = (
            f"x{self._places[name]} >= {a} AND x{self._places[name]} < {b}"
            for name, (a, b) in query.ranges.items()
        )
        text = f"SELECT {what} FROM t WHERE {' AND '.join(tests)}"
        [[total]] = self._scan._db.sql(text).fetchall()
        return float(total or 0)

    def pinq(self, query: Query) -> float:
        """The same scan and noise, one durable charge."""
        run = secrets.token_hex(16)
        self._global.charge(
            Charge(
                run_id=run, plan_hash="5e" * 16, epsilon=BUDGET, delta=0.0, mu=None,
                threshold_delta=0.0, kind="sql", identity=UnitIdentity("record", "string").text,
            )
        )  # fmt: skip
        box = self._space.box(**query.ranges)
        question = Question(
            kind="epsilon", amount=charge_of(BUDGET), aggregates=(query.figure,), cells=Cells()
        )
        needs = question.needs(self._space, box)
        totals = self._scan.totals(box, question.cells, needs)
        answer = answered(self._space, question, box, totals, self._ring, run)
        return float(answer.column(0)[0].as_py() or 0.0)

    def unitrax(self, query: Query) -> float:
        """By the session."""
        answer = self._base.where(query.predicate).ask((query.figure,), BUDGET, fresh=True)
        return float(answer.value or 0.0)


def measured(project: Path, queries: int, runs: int, held: bool) -> dict[str, Any]:
    """Seconds (runs, queries, ways), and the regions at the beginning of each query."""
    seconds, regions = list[list[list[float]]](), list[int]()
    for run in range(runs):
        _forget(project)
        with Ways(project, held) as ways:
            took, tracked = list[list[float]](), list[int]()
            asking, reply = session_of(queries, widened=False), None
            ways.unitrax(Query(COUNT, {}))  # everything is open
            with contextlib.suppress(StopIteration):
                while True:
                    query = asking.send(reply)
                    tracked.append(ways.regions)
                    answers, row = dict[str, float](), dict[str, float]()
                    turn = (len(took) + run) % len(WAYS)
                    for way in (*WAYS[turn:], *WAYS[:turn]):
                        ask: Callable[[Query], float] = getattr(ways, way)
                        begin = time.perf_counter()
                        answers[way] = ask(query)
                        row[way] = time.perf_counter() - begin
                    took.append([row[way] for way in WAYS])
                    reply = answers["direct"]
            seconds.append(took)
            regions = tracked
    return {"seconds": np.array(seconds), "regions": regions}


def balanced(project: Path, queries: int, counts: Callable[[Query], float]) -> list[int]:
    """Regions at the beginning of each query of the analyst who asks whole ranges."""
    _forget(project)
    with Ways(project, False) as ways:
        tracked, asking, reply = list[int](), session_of(queries, widened=True), None
        open_table = ways.session.open_table
        with contextlib.suppress(StopIteration):
            while True:
                query = asking.send(reply)
                tracked.append(ways.regions)
                reply = counts(query)
                where = ways.session.where(f"initial >= {NEEDED} AND {query.predicate}")
                question = where.request((query.figure,), BUDGET)
                _charged(open_table, order_of(open_table, question))
    return tracked


def _charged(open_table: OpenTable, order: Order) -> None:
    """Charge an order; nothing is drawn."""

    def decide(run_id: str, _: History) -> Decision:
        return Decision(open_table.account.decide(order, run_id))

    open_table.answers.begin(secrets.token_hex(16), decide)
    open_table.account.refresh()


def batches(project: Path, queries: int, held: bool) -> dict[str, Any]:
    """The session as batches: a charge and a scan for each histogram and grid."""
    squares = SQUARES if queries == FULL else max(2, int(SQUARES * (queries / FULL) ** 0.5))
    bars = BARS if queries == FULL else 2
    _forget(project)
    with Session(load_config(project), held=held) as session:
        base = session.where(f"initial >= {NEEDED}")
        base.count(BUDGET)  # everything is open
        begin, query_count = time.perf_counter(), 0
        for name, (low, high) in HISTOGRAMS.items():
            edges = np.linspace(low, high, min(bars, high - low) + 1).astype(int).tolist()
            query_count += base.ask((COUNT,), BUDGET, {name: edges}).table.num_rows
        edges = np.linspace(*DENSE, squares + 1).astype(int).tolist()
        for figure in (COUNT, average("fare"), average("distance"), COUNT, median("tip")):
            answer = base.ask((figure,), BUDGET, {"x": edges, "y": edges}, fresh=True)
            query_count += answer.table.num_rows
        took = time.perf_counter() - begin
        most = session.open_table.account.spent("epsilon").most_in(
            session.open_table.space.everything
        )
    return {"seconds": took, "queries": query_count, "most": most}


def _forget(project: Path) -> None:
    for name in ("ledger.db", "global.db"):
        if (project.parent / name).exists():
            accounts.emptied(project.parent / name)
    load_config(project).snapshot.unlink(missing_ok=True)


def ratios(seconds: Float64) -> dict[str, Any]:
    """Of the medians of the runs: mean, median and 99th percentile over the queries."""
    took = np.median(seconds, axis=0)
    figures: dict[str, Any] = {
        f"{way}_ms": round(float(np.median(took[:, i])) * 1e3, 2) for i, way in enumerate(WAYS)
    }
    for name, base in (("to_pinq", 1), ("to_direct", 0)):
        each = took[:, 2] / took[:, base]
        figures[name] = {
            "mean": round(float(each.mean()), 3),
            "median": round(float(np.median(each)), 3),
            "p99": round(float(np.percentile(each, 99)), 3),
        }
    return figures


def within(figures: dict[str, Any], individual: bool, full: bool) -> list[str]:
    """What exceeds its limit."""
    to_pinq, to_direct, p99 = LIMITS[individual]
    wrong = []
    for name, most in (("to_pinq", to_pinq), ("to_direct", to_direct)):
        for part in ("mean", "median"):
            if full and figures[name][part] > most:
                wrong.append(f"{part} {name}: {figures[name][part]} > {most}")
        if full and figures[name]["p99"] > p99:
            wrong.append(f"p99 {name}: {figures[name]['p99']} > {p99}")
    if figures["regions_balanced"] > 8 or figures["regions"] < 10 * figures["regions_balanced"]:
        wrong.append(f"regions: {figures['regions']} and {figures['regions_balanced']}")
    if full and figures["batches"]["faster"] < 20:
        wrong.append(f"batches: {figures['batches']['faster']} times as fast")
    return wrong


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rows", type=int, default=14_000_000)
    parser.add_argument("--queries", type=int, default=FULL)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--individual", action="store_true", help="budgets of each ride its own")
    parser.add_argument("--held", action="store_true", help="records copied into memory")
    parser.add_argument("--folder", type=Path, help="keep the table here")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    folder = given.folder or Path(tempfile.mkdtemp())
    try:
        result, _ = run(folder, given)
    finally:
        if given.folder is None:
            shutil.rmtree(folder)
    emit(result | machine(), given.out)
    wrong = within(result, given.individual, given.rows >= 14_000_000)
    print("\n".join(wrong), file=sys.stderr)
    return bool(wrong)


def run(folder: Path, given: argparse.Namespace) -> tuple[dict[str, Any], dict[str, Any]]:
    """All of it on a table in a folder, made unless it is there."""
    project = folder / PROJECT_FILE
    loaded = 0.0
    if not project.exists():
        write(folder, given.rows, given.individual)
        begin = time.process_time()
        init(load_config(project))
        loaded = time.process_time() - begin
    took = measured(project, given.queries, given.runs, given.held)
    exact = dict[str, float]()
    with Ways(project, True) as ways:

        def counts(query: Query) -> float:
            if query.figure is not COUNT:
                return 0.0
            if query.predicate not in exact:
                exact[query.predicate] = ways.direct(query)
            return exact[query.predicate]

        took["balanced"] = balanced(project, given.queries, counts)
    batch_figures = batches(project, given.queries, given.held)
    alone = float(np.median(took["seconds"], axis=0)[:, 2].sum())
    result = {
        "bench": "session", "rows": given.rows, "queries": took["seconds"].shape[1],
        "runs": given.runs, "individual": given.individual, "held": given.held,
        "load_cpu_seconds": round(loaded, 1), **ratios(took["seconds"]),
        "regions": max(took["regions"]), "regions_balanced": max(took["balanced"]),
        "batches": {
            "seconds": round(batch_figures["seconds"], 2), "queries": batch_figures["queries"],
            "most_charged": batch_figures["most"],
            "faster": round(alone / batch_figures["seconds"], 1),
        },
    }  # fmt: skip
    return result, took


if __name__ == "__main__":
    sys.exit(main())

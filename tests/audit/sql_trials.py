"""Whole SQL questions as trials: each trial has groups and units of its own in one question.

A trial's unit is there or not (two neighbouring tables); what is published of the trial's groups is
all that its score may use.  Noise of different groups is independent, so the trials are.

Sabotaged variants of SQL questions: plausible mistakes, each with a trial that shows it.
"""

import contextlib
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from dpstream.dp_transforms.one_shot import answers, bounding, estimates, partials
from dpstream.pipelines.sql import ask as asking
from dpstream.pipelines.sql import query_plan, stage, work
from dpstream.pipelines.sql.load import load_catalog
from dpstream.pipelines.sql.query_plan import Question, question_of
from dpstream.pipelines.tables.catalog import Catalog
from tests import accounts
from tests.audit.blackbox.values import statistics
from tests.audit.evidence.bounds import Claim, ProvenBound, bound
from tests.audit.sabotage import Patch
from tests.fixed import fixed_run_ids
from tests.pipelines.sql.asking import KEY

TAIL = 1e-6
_PROJECT = """
version = 1
[data_set.trials]
unit = { name = "uid", type = "int" }
account = { path = "ledger.db", limit = { epsilon = 1e6, delta = 0.5 } }
insecure_test_secret = "KEY"
[table.rows]
path = "rows.parquet"
unit_column = "uid"
[table.listed]
path = "listed.parquet"
public = true
"""
Rows = Sequence[tuple[int, float]]


class Trial(NamedTuple):
    """What every trial is.

    Attributes:
        items: the select list behind the trial's number and group.
        unit: (group, value) of each row of the trial's unit.
        others: the same of each other unit.
        groups: of a trial; kappa: of them that count; options: further ones.
        public: they are listed.
        presence: the score is how many groups are there, not their values.
        most: what the unit adds to each column; the score is then their sum after division by it,
            because the noise of each is in proportion to it.
    """

    items: str
    unit: Rows
    others: Sequence[Rows] = ()
    groups: int = 1
    kappa: int = 1
    options: str = "epsilon = 12, delta = 1e-6"
    public: bool = True
    presence: bool = False
    most: Sequence[float] = ()

    @property
    def text(self) -> str:
        """The question."""
        options = f"{self.options}, max_groups_contributed = {self.kappa}"
        if "mechanism" not in options:  # the claim is of its mu
            options += ", mechanism = gaussian"
        source, by = "FROM rows AS r", "r"
        if self.public:
            options += ", group_selection_strategy = PUBLIC_GROUPS"
            source += (
                " RIGHT JOIN (SELECT DISTINCT trial, g FROM listed) AS l "
                "ON r.trial = l.trial AND r.g = l.g"
            )
            by = "l"
        return (
            f"SELECT WITH DIFFERENTIAL_PRIVACY OPTIONS({options}) {by}.trial, {by}.g, "
            f"{self.items} {source} GROUP BY {by}.trial, {by}.g"
        )


class Published(NamedTuple):
    """(trials, groups, columns) values, 0 where there is none, and (trials, groups) which are."""

    values: npt.NDArray[np.float64]
    present: npt.NDArray[np.float64]
    claim: Claim


def question(folder: Path, trial: Trial) -> tuple[Question, Catalog]:
    """The question on empty tables."""
    write(folder, trial, np.zeros(1, bool))
    catalog = load_catalog(folder / "dpstream.toml")
    return question_of(trial.text, catalog), catalog


def claim_of(folder: Path, trial: Trial) -> Claim:
    """What the question says that it costs."""
    query, catalog = question(folder, trial)
    charge = query.charge(catalog, "00" * 16)
    assert charge.mu is not None
    rest = charge.delta - charge.threshold_delta
    tail = charge.threshold_delta
    return Claim(charge.epsilon, charge.delta, charge.mu, tail, rest, tail)


def write(folder: Path, trial: Trial, added: npt.NDArray[np.bool_]) -> None:
    """The tables of so many trials; the units of those that are added are there."""
    folder.mkdir(exist_ok=True)
    size = len(added)
    units: list[tuple[Rows, npt.NDArray[np.int64]]] = [(trial.unit, np.flatnonzero(added))]
    units += [(rows, np.arange(size)) for rows in trial.others]
    columns: dict[str, list[Any]] = {"uid": [], "trial": [], "g": [], "x": []}
    for number, (rows, trials) in enumerate(units):
        for group, value in rows:
            columns["uid"].append(trials * len(units) + number)
            columns["trial"].append(trials)
            columns["g"].append(np.full(len(trials), group))
            columns["x"].append(np.full(len(trials), float(value)))
    empty = {"x": np.zeros(0)}
    joined = {name: np.concatenate(parts) if parts else empty.get(name, np.zeros(0, np.int64))
              for name, parts in columns.items()}  # fmt: skip
    pq.write_table(pa.table(joined), folder / "rows.parquet")
    trials = np.repeat(np.arange(size), trial.groups)
    listed = {"trial": trials, "g": np.tile(np.arange(trial.groups), size)}
    pq.write_table(pa.table(listed), folder / "listed.parquet")
    accounts.write(folder / "dpstream.toml", _PROJECT.replace("KEY", KEY))


def published(folder: Path, trial: Trial, added: npt.NDArray[np.bool_], run: int = 0) -> Published:
    """What is published of so many trials; ``run``: tells draws apart."""
    claim = claim_of(folder, trial)
    for path in (folder / "ledger.db", *folder.glob("dpstream-*.head")):
        path.unlink(missing_ok=True)
    write(folder, trial, added)
    with fixed_run_ids(lambda: f"{run + 1:02x}" * 16):
        table = asking.ask(load_catalog(folder / "dpstream.toml"), trial.text).table
    shape = (len(added), trial.groups)
    present = np.zeros(shape)
    at = table["trial"].to_numpy(), table["g"].to_numpy()
    present[at] = 1
    columns = [c for name in table.column_names if name not in ("trial", "g")
               for c in _numbers(table[name])]  # fmt: skip
    values = np.zeros((*shape, len(columns)))
    for i, column in enumerate(columns):
        values[(*at, np.full(len(column), i))] = np.nan_to_num(column)
    return Published(values, present, claim)


def _numbers(column: pa.ChunkedArray) -> list[npt.NDArray[np.float64]]:
    """A column's numbers, of lists one after the other."""
    if not pa.types.is_list(column.type):
        return [np.asarray(column.to_numpy(zero_copy_only=False), float)]
    lists = column.combine_chunks()
    size = len(lists[0]) if len(lists) else 0
    return list(np.asarray(lists.flatten().to_numpy(zero_copy_only=False), float)
                .reshape(-1, size).T)  # fmt: skip


def proven(folder: Path, trial: Trial, trials: int, seed: int = 3) -> tuple[ProvenBound, Claim]:
    """What so many trials prove about the question."""
    added = np.random.default_rng(seed).random(trials) < 0.5
    outcomes = published(folder, trial, added)
    features = np.concatenate([outcomes.values.reshape(trials, -1), outcomes.present], axis=1)
    features = features[:, features.std(axis=0) > 0]
    total = outcomes.values.sum(axis=1)
    if trial.most:
        total = (total / trial.most).sum(axis=1, keepdims=True)
    present_counts = outcomes.present.sum(axis=1)[:, None]
    scores = np.concatenate(
        [present_counts, total] if trial.presence else [total, present_counts], axis=1
    )
    return bound(statistics(scores, features, added), outcomes.claim, TAIL), outcomes.claim


PER_GROUP = "contribution_bounds_per_group => "
HUNDRED = "contribution_bounds_per_row => (0, 100)"
TWO_ROWS = "epsilon = 12, delta = 1e-6, max_rows_contributed = 2"
#: A larger delta makes thresholds low: a few other units are enough.
FEW = "epsilon = 12, delta = 1e-3"


class Broken(NamedTuple):
    """A sabotage, and the trial that refutes it."""

    patch: Patch
    trial: Trial


def wrapped(owner: Any, name: str, make: Callable[[Any], Any]) -> Patch:
    """One function replaced by ``make(function)``."""
    return lambda: mock.patch.object(owner, name, make(getattr(owner, name)))


def _together(*patches: Patch) -> Patch:
    @contextlib.contextmanager
    def patch() -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for one in patches:
                stack.enter_context(one())
            yield

    return patch


class _WithoutClip:
    """numpy whose clip lets everything through."""

    def __getattr__(self, name: str) -> Any:
        return (lambda values, *_: values) if name == "clip" else getattr(np, name)


#: Partials are clamped twice, by DuckDB and by stage 2: both are left out.
_NO_CLIP = wrapped(partials, "np", lambda real: _WithoutClip())
_WIDE = wrapped(work, "grids_of", lambda real: lambda plan: {
    c.name: (c.grid, -(1 << 40), 1 << 40) for c in plan.columns if c.kind != "units"})  # fmt: skip
_NO_CENTRE = _together(
    _NO_CLIP,
    wrapped(query_plan.Grid, "middle", lambda real: 0),
    wrapped(estimates, "middle_of", lambda real: lambda column: 0),
)


def _smaller_noise(what: str, factor: float) -> Patch:
    """Noise of one part of one column."""

    def make(real: Any) -> Any:
        def part(self: Any, noise: Any, items: Any, scale: float | None = None) -> Any:
            used = noise.scale if scale is None else scale
            return real(self, noise, items, used / factor if noise.part.what == what else used)

        return part

    return wrapped(answers.Noise, "part", make)


def _row_is_unit(real: Any) -> Any:
    one = re.compile(r'"\w+"\."uid" AS "unit"')
    return lambda self, *turn: one.sub('ROW_NUMBER() OVER () AS "unit"', real(self, *turn))


def _largest_groups(real: Any) -> Any:
    """Each unit keeps its groups with the most rows, of all units."""

    def sampled(groups: Any, keys: Any, name: Any, most: int) -> Any:
        size = np.bincount(groups.group, groups.sums[0])
        order = np.lexsort((groups.group, -size[groups.group], groups.unit))
        unit = groups.unit[order]
        first = np.flatnonzero(np.diff(unit, prepend=-1))
        rank = np.arange(len(unit)) - np.repeat(first, np.diff(first, append=len(unit)))
        return np.sort(order[rank < most])

    return sampled


def _one_name(real: Any) -> Any:
    return lambda self, noise, items, scale=None: np.repeat(
        real(self, noise, items[:1] * 0, scale), len(items)
    )


_EIGHT = [(g, 0.0) for g in range(8)]
_OTHERS = [[(0, 5.0), (0, 10.0)]]
BROKEN = {
    "kappa bound left out": Broken(
        wrapped(bounding, "_sampled", lambda real: lambda groups, *_: np.arange(len(groups.unit))),
        Trial(f"COUNT(*, {PER_GROUP}(0, 1)) AS n", [(g, 1) for g in range(6)], groups=6),
    ),
    "clamp left out": Broken(
        _together(_NO_CLIP, _WIDE), Trial(f"SUM(x, {PER_GROUP}(0, 1)) AS s", [(0, 50)])
    ),
    "rows of a group left unbounded": Broken(
        wrapped(bounding, "smallest",
                lambda real: lambda groups, rows, slot, *_: np.arange(len(slot))),
        Trial(f"MEDIAN(x, {HUNDRED}) AS m", [(0, 99)] * 60, _OTHERS * 6, options=TWO_ROWS),
    ),
    "noise a fifth too small": Broken(
        _smaller_noise("sum", 1.25), Trial(f"SUM(x, {PER_GROUP}(0, 8)) AS s", [(0, 8)])
    ),
    "unit counted per row": Broken(
        wrapped(work.Work, "stage_one", _row_is_unit),
        Trial("COUNT(DISTINCT r.uid) AS u", [(0, 1)] * 5),
    ),
    "weights of selection not normalised": Broken(
        wrapped(stage, "aggregated",
                lambda real: lambda rows, groups, w: real(rows, groups, [1 << 16] * len(w))),
        Trial(f"SUM(x, {PER_GROUP}(0, 1)) AS s", _EIGHT, [_EIGHT] * 2, groups=8, kappa=8,
              options=FEW, public=False, presence=True),
    ),
    "noise of a tree too small": Broken(
        _smaller_noise("tree", 8.0),
        Trial(f"MEDIAN(x, {HUNDRED}) AS m", [(0, 99)] * 2, _OTHERS, options=TWO_ROWS),
    ),
    "centre of a mean left out": Broken(
        _NO_CENTRE,
        Trial(f"AVG(x, {PER_GROUP}(0, 100)) AS a", [(0, 100)], [[(0, 0.0)]] * 6),
    ),
    "sampling that looks at other units": Broken(
        wrapped(bounding, "_sampled", _largest_groups),
        Trial(f"COUNT(*, {PER_GROUP}(0, 3)) AS n", [(1, 1)] * 3,
              [*([[(0, 1), (1, 1)] * 2] * 5), [(0, 1), (1, 1), (0, 1)]], groups=2),
    ),
    "norm left out": Broken(
        wrapped(bounding, "_factor", lambda real: lambda unit, *_: np.ones(len(unit))),
        Trial(f"COUNT(*, {PER_GROUP}(0, 9), contribution_norm => 2) AS n",
              [(g, 1) for g in range(9)] * 9, groups=9, kappa=9),
    ),
    "one name for all groups": Broken(
        wrapped(answers.Noise, "part", _one_name),
        Trial(f"COUNT(*, {PER_GROUP}(0, 3)) AS n", [(0, 1)] * 3, groups=2),
    ),
}  # fmt: skip

"""Whole SQL questions as trials: each trial has groups and units of its own in one question.

A trial's unit is there or not (two neighbouring tables); what is published of the trial's groups is
all that its score may use.  Noise of different groups is independent, so the trials are.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from dpstream.pipelines.sql import ask as asking
from dpstream.pipelines.sql.load import load_catalog
from dpstream.pipelines.sql.query_plan import Question, question_of
from dpstream.pipelines.tables.catalog import Catalog
from tests import accounts
from tests.audit.blackbox.values import statistics
from tests.audit.evidence.bounds import Claim, ProvenBound, bound
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


Patch = Callable[[], Any]

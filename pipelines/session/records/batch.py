"""Draws a batch's answer, here or on a runner: the same bytes.

A batch is a question with cells.  It is decided and charged as a whole (all or nothing, a point
pays once) before anything of this module runs; then one scan computes the sums of all cells, noise
is drawn for each, and the table is committed.  A draw that fails, or is interrupted, has released
nothing: the same question continues under its run id, at no charge, here or elsewhere.
"""

from pathlib import Path
from typing import Protocol

import pyarrow as pa

from dpstream.accounting.arrays import Int64
from dpstream.accounting.errors import UsageError
from dpstream.accounting.regions.space import Space
from dpstream.accounting.sessions.aggregates import Needs, Question
from dpstream.accounting.sessions.cells import Cells
from dpstream.accounting.sessions.table import SessionTable
from dpstream.dp_transforms.noise.prf import KeyRing
from dpstream.dp_transforms.noise.secret_source import SecretSource, destroy_keys
from dpstream.dp_transforms.session import Totals, answered
from dpstream.pipelines.runners.bounded import RUNNERS, Runner, run_to_end
from dpstream.pipelines.session.records.manifest import read_manifest
from dpstream.pipelines.session.records.parts import damaged, reading
from dpstream.state.ledger.events import packed
from dpstream.state.locks import private_folder

#: Draws of a shard: a second of a core, and some megabytes.
_DRAWS = 1 << 20


class Scanner(Protocol):
    """Something that computes exact sums of cells (``pipelines.session.records.scan.Scan``)."""

    def totals(self, boxes: Int64, cells: Cells, needs: Needs) -> Totals:
        """Return sums over the usable records in some boxes, by one scan."""
        ...


def here(
    scan: Scanner, space: Space, question: Question, read: Int64, keys: KeyRing, run_id: str
) -> pa.Table:
    """Draw the answer in this process.

    Args:
        read: (m, d, 2) boxes of the charge; run_id: its own.
    """
    totals = scan.totals(read, question.cells, question.needs(space, read))
    return answered(space, question, read, totals, keys, run_id)


def check(runner: Runner) -> None:
    """Refuse a runner that cannot be used, before anything is charged.

    Raises:
        UsageError: there is no such runner, it is not on this machine, or its workers do not
            share folders.
    """
    if runner.name not in RUNNERS:
        raise UsageError("--runner", "does not answer batches here", f"use {', '.join(RUNNERS)}")
    runner.engine()


def shards_for(space: Space, question: Question, read: Int64, parallelism: int) -> int:
    """Return the number of shards of the cells; no byte depends on it."""
    leaves = sum(of.size for of in question.needs(space, read).leaves)
    draws = question.cells.count * (2 * leaves + 2 * len(question.aggregates))
    return min(question.cells.count, max(parallelism, 1 + draws // _DRAWS))


def spread(
    runner: Runner,
    beside: Path,
    folder: Path,
    table: SessionTable,
    question: Question,
    read: Int64,
    keys: SecretSource,
    run_id: str,
) -> pa.Table:
    """Draw the answer by a runner's workers.

    Args:
        beside: a folder that workers share, for their results.
        folder: folder of the table.
        read: (m, d, 2) boxes of the charge; run_id: its own.
        keys: the reference to the secret, bound to the run (``SecretSource.of_run``).

    Raises:
        DpstreamError: the pipeline failed.
    """
    from dpstream.pipelines.session.records.flow import ANSWER, Task, build

    shards = shards_for(table.space, question, read, runner.parallelism)
    try:
        with private_folder(beside, "account.path") as draft, reading(folder):
            parts = read_manifest(folder, table).usable()
            source, place = str(folder.resolve()), str(draft)
            task = Task(table, source, question, packed(read), run_id, place, shards, keys)
            run_to_end(
                runner,
                lambda pipeline: build(pipeline, task, parts),
                (draft / ANSWER).exists,
                lambda: [damaged()],
            )
            with pa.ipc.open_stream((draft / ANSWER).read_bytes()) as reader:
                return reader.read_all()
    finally:
        destroy_keys(run_id)

"""An execution on a runner: files are counted in pieces, shards are drawn by workers."""

from pathlib import Path

from dpstream.accounting.errors import UsageError
from dpstream.dp_transforms.noise.secret_source import SecretSource, destroy_keys
from dpstream.pipelines.runners.bounded import RUNNERS, Runner, run_to_end
from dpstream.pipelines.tabulation.inputs import Inputs, Prepared
from dpstream.pipelines.tabulation.pieces import pieces
from dpstream.pipelines.tabulation.work import names_of_part, parts_of


def check(runner: Runner) -> None:
    """Refuse a runner that cannot be used, before anything is charged.

    Raises:
        UsageError: it is none, is not on this machine, or its workers do not share folders.
    """
    if runner.name not in RUNNERS:
        raise UsageError("--runner", "does not make tables here", f"use {', '.join(RUNNERS)}")
    runner.engine()


def spread(
    runner: Runner,
    inputs: Inputs,
    setup: Prepared,
    keys: SecretSource,
    run_id: str,
    folder: Path,
    letters: str | None,
) -> None:
    """Count and draw on a runner's workers, into the draft folder.

    Args:
        keys: bound to the run.
        letters: folder of refused records, ``None``: they refuse the file.

    Raises:
        DpstreamError: the pipeline failed.
    """
    from dpstream.pipelines.tabulation.flow import Task, build

    parts = parts_of(setup)
    task = Task(inputs, run_id, str(folder), letters, keys)
    # The files of a part are written in this order.
    last = [folder / names_of_part(setup, part)[-1] for part in parts]
    try:
        run_to_end(
            runner,
            lambda pipeline: build(pipeline, task, pieces(inputs.records), len(parts)),
            lambda: all(path.exists() for path in last),
        )
    finally:
        destroy_keys(run_id)

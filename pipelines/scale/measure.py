"""How fast this machine is beside the one whose rates `pipelines.scale.rates` lists."""

import tempfile
import time
from pathlib import Path

from dpstream.dp_transforms.flow import run_in_memory
from dpstream.dp_transforms.run import begin_run
from dpstream.pipelines.connectors.files.source import pieces, read_piece
from dpstream.pipelines.connectors.records.positions import positioned
from dpstream.pipelines.connectors.records.rows import Rows
from dpstream.pipelines.experiments.jobs import Frame, Setting, write_job
from dpstream.pipelines.experiments.modes import parse_mode
from dpstream.pipelines.jobs.job import load_job
from dpstream.pipelines.jobs.noise_key import key_source
from dpstream.pipelines.scale.rates import RATES, Figure
from dpstream.pipelines.synth import Synth, generate
from dpstream.state import open as stores

#: What ``records_per_core_second()`` gives on the machine of the table.
REFERENCE = 1_000_000.0
_USERS, _TRIGGERS = 50_000, 20


def records_per_core_second(runs: int = 3) -> float:
    """Records a CPU second of the whole flow without Beam, best of some runs (some seconds).

    Generated records of 50,000 users through ingest, BOUND and 20 triggers on a SQLite store in a
    temporary folder, with a fresh key.
    """
    best = 0.0
    with tempfile.TemporaryDirectory(prefix="dpstream-measure-") as scratch:
        folder = Path(scratch)
        data = folder / "data.parquet"
        rows = generate(Synth(users=_USERS, keys=100_000), data)
        frame = Frame(data, "int", folder / "runs", 6.0, 1e-9)
        setting = Setting(parse_mode("sticky"), _TRIGGERS, 32)
        for _ in range(runs + 1):  # the first one compiles kernels
            job = load_job(write_job(frame, setting))
            run, _ = begin_run(
                job.plan, key_source(job), job.state.store or "", 4, source=[b"measure"]
            )
            batches = [
                batch
                for piece in pieces(job)
                for part in read_piece(piece, job.columns)
                if isinstance(part, Rows)
                for batch in positioned(part, piece[1], job.performance.batch_rows)
            ]
            begin = time.process_time()
            run_in_memory(run, batches)
            best = max(best, rows / (time.process_time() - begin))
            run.destroy_keys()
            stores.close_all()
    return best


def measured_rates() -> dict[str, Figure]:
    """The table's rates, all scaled by how this machine does the pipeline's own work."""
    ratio = records_per_core_second() / REFERENCE
    return {
        name: figure
        if not figure.unit.endswith("core-second")
        else figure._replace(
            value=round(figure.value * ratio),
            source=f"this machine: {ratio:.2f} times the table's, which is of {figure.source}",
        )
        for name, figure in RATES.items()
    }

"""A run goes on with the numbers that were committed when it began, whatever a later program would
come to, or refuse."""

import json
from pathlib import Path
from typing import Any
from unittest import mock

from dpstream.accounting.budget import shares
from dpstream.accounting.budget.allocation import allocate
from dpstream.accounting.errors import UsageError
from dpstream.dp_transforms import run as runs
from dpstream.pipelines.jobs.job import load_job
from dpstream.pipelines.stream.begin import begin
from dpstream.state import open as stores
from tests.golden.refusals import Refused
from tests.pipelines.test_units import MONTHLY, call, write


def test_the_numbers_of_a_run_are_computed_once(tmp_path: Path, refused: Refused) -> None:
    job = write(tmp_path, "a", **MONTHLY)
    refusal = UsageError("later", "a later program refuses this plan", "none")
    with mock.patch.object(runs, "calibrate", side_effect=refusal) as calibrate:
        refused(lambda: begin(load_job(job)))
        # What is refused leaves nothing behind.
        assert calibrate.call_count == 1 and not (tmp_path / "a").exists()
    begun = begin(load_job(job))[0].open().identity
    stores.close_all()
    with mock.patch.object(runs, "calibrate", side_effect=refusal) as calibrate:
        run, resumed = begin(load_job(job))
        assert resumed and run.open().identity == begun and begun.calibration
        assert calibrate.call_count == 0
    stores.close_all()


def document_of(command: str, job: Path, *more: str) -> dict[str, Any]:
    result = call(command, "--project", job, "--json", *more)
    assert result.exit_code == 0, result.stderr
    document: dict[str, Any] = json.loads(result.stdout)
    return document


def test_figures_are_those_that_were_committed(tmp_path: Path) -> None:
    """A later program's defaults are neither planned with nor reported."""
    out = f"--out={tmp_path / 'page.html'}"
    wide = {"epsilon = 40.0, delta = 0.05": "epsilon = 9.9, delta = 1e-5"}
    job = write(
        tmp_path, "a", **wide,
        **{"contributions = 9": 'contributions = 9\nmechanism.weights = "auto"'},
    )  # fmt: skip
    new = document_of("plan", job)
    assert new["run_id"] is None and "Figures " not in call("plan", "--project", job).stdout
    run_id = json.loads(call("run", "--project", job, "--json").stdout)["run_id"]
    with mock.patch.object(shares, "knee", lambda costs: 0.5):
        late = allocate(load_job(job).plan)
        planned, page = document_of("plan", job), document_of("report", job, out)["plan"]
        other = document_of("plan", write(tmp_path, "b", **wide))
        text = call("plan", "--project", job).stdout
    assert late.selection is not None and late.selection.share == 0.5
    assert planned["acceptance"]["run_id"] == run_id and planned["acceptance"]["charged"] is None
    assert planned == new | {"run_id": run_id} | {
        of: planned[of] for of in ("outlook", "acceptance")
    }
    for answer in ("appears", "exact", "shares"):
        assert planned["outlook"][answer] == new["outlook"][answer]
        assert other["outlook"][answer] != new["outlook"][answer]
    assert page == {name: new[name] for name in page}
    assert other["split"]["shares_of_mu_squared"]["selection"] == 0.5
    assert f"Figures     of run {run_id}, committed when it began" in text
    # Releases without their store, and another plan's store.
    (tmp_path / "a" / "s.db").rename(tmp_path / "s.db")
    with mock.patch.object(shares, "knee", lambda costs: 0.5):
        moved = document_of("report", job, out)["plan"]["split"]["shares_of_mu_squared"]
    assert moved["selection"] == 0.5
    (tmp_path / "s.db").rename(tmp_path / "a" / "s.db")
    changed = write(tmp_path, "a", **wide, **{"epsilon = 20.0": "epsilon = 2.0"})
    another = call("plan", "--project", changed, "--json")
    assert another.exit_code == 3 and json.loads(another.stdout)["run_id"] is None

"""``dpstream report``: one page about a run, from what is public: plan, budget, releases.

Neither key, ledger nor dead letters are opened, and of the store's file only what was committed
when the run began, so the page can be published with the releases.  ``truth`` is the exception: it
reads raw records, marks the page as not private and makes its file readable for its owner only.
"""

from pathlib import Path
from typing import Any, NamedTuple

from dpstream.accounting.budget.allocation import Budget, allocate
from dpstream.accounting.errors import PolicyError, UsageError
from dpstream.accounting.guarantee import describe
from dpstream.accounting.plan.plan import Plan
from dpstream.dp_transforms.batches import key_fields
from dpstream.pipelines.jobs.committed import committed, input_changed
from dpstream.pipelines.jobs.job import Job
from dpstream.pipelines.report.data import Findings, collect
from dpstream.pipelines.report.keys import newest_rows
from dpstream.pipelines.report.releases import Inventory, inventory
from dpstream.pipelines.report.text import key_label, settings
from dpstream.pipelines.report.truth import Decade, by_size
from dpstream.state.disk_errors import file_errors
from dpstream.state.durable import PRIVATE, PUBLIC, replacing

#: What a page begins with; a file that begins otherwise is never replaced.
MARK = '<!doctype html>\n<html lang="en" data-made-by="dpstream report">'
TRUTH_LABEL = "computed from the raw data: NOT private, do not publish"
STAMPS = ("UNSOUND", "INSECURE")


class Report(NamedTuple):
    """Everything the page shows.

    Attributes:
        job, plan, budget: the job, what its settings mean in its run and what that spends: as
            committed when it began, or computed again where the store's file is not here.
        figures: `accounting.guarantee.describe` of them.
        inventory, findings: the releases and what was read of them.
        truth: errors by true size of a key, from raw records, or ``None``.
        input_changed: the job's store says that the files were changed while its run read them.
    """

    job: Job
    plan: Plan
    budget: Budget
    figures: dict[str, Any]
    inventory: Inventory
    findings: Findings
    truth: list[Decade] | None = None
    input_changed: bool = False

    @property
    def expected(self) -> int | None:
        """Releases of the finished run; ``None``: it has no end."""
        line = self.job.plan.timeline
        return None if line.end is None else line.windows * line.triggers

    @property
    def run_ids(self) -> list[str]:
        """Run ids in the releases, without their stamps; more than one is more than one charge."""
        return [name.rpartition("-")[2] for name in self.inventory.run_ids]

    @property
    def stamps(self) -> list[str]:
        """``UNSOUND`` and ``INSECURE``, as the releases or the job say."""
        borne = {stamp for name in self.inventory.run_ids for stamp in name.split("-")[:-1]}
        borne |= {"INSECURE"} if self.job.insecure else set()
        borne |= set() if self.figures["guarantee"]["sound"] else {"UNSOUND"}
        return [stamp for stamp in STAMPS if stamp in borne]


def build(job: Job, truth: Path | None = None) -> Report:
    """Read the releases and compute the figures.

    Args:
        job: a checked job.
        truth: file or glob of raw records of the job's own schema; only for public data.

    Raises:
        UsageError: no folder of releases, releases of another plan, no such records.
    """
    releases = inventory(job)
    plan, budget = _in_force(job, releases)
    findings = collect(job.plan, releases)
    decades = None if truth is None else by_size(job, truth, releases, findings)
    figures = describe(plan, budget) | {"plan_hash": job.plan.hash}
    return Report(job, plan, budget, figures, releases, findings, decades, input_changed(job))


def _in_force(job: Job, releases: Inventory) -> tuple[Plan, Budget]:
    """What the run whose releases these are draws and tests with."""
    begun = committed(job)
    named = {name.rpartition("-")[2] for name in releases.run_ids}
    if begun is not None and named <= {begun.run_id}:
        return begun.plan, begun.budget
    return job.plan, allocate(job.plan)


def as_dict(report: Report) -> dict[str, Any]:
    """The page's figures for machines, JSON-able."""
    findings, line = report.findings, report.job.plan.timeline
    windows = zip(findings.windows, findings.last_trigger, findings.keys, strict=True)
    return {
        "plan_hash": report.job.plan.hash,
        "run_ids": report.run_ids,
        "stamps": report.stamps,
        "input_changed": report.input_changed,
        "private": report.truth is not None,
        "plan": report.figures,
        "releases": {
            "expected": report.expected,
            "present": len(report.inventory.releases),
            "rows": sum(release.keys for release in report.inventory.releases),
            "windows": [
                {
                    "window": int(window),
                    "start_micros": line.window_bounds(int(window))[0],
                    "last_trigger": int(trigger),
                    "keys": int(keys),
                }
                for window, trigger, keys in windows
            ],
            "keys": findings.all_keys.distinct,
            "drawn_window": [
                {"trigger": release.trigger, "keys": release.keys}
                for release in findings.drawn_window
            ],
        },
        "busiest": _busiest(report),
        "truth": report.truth
        and {
            "label": TRUTH_LABEL,
            "by_true_records": [decade._asdict() for decade in report.truth],
        },
        "settings": dict(settings(report.job, report.plan)),
    }


def _busiest(report: Report) -> list[dict[str, Any]]:
    """The busiest keys' newest values."""
    plan, keys = report.job.plan, report.findings.all_keys
    names = [f.name for f in key_fields(plan)]
    rows = keys.rows.take(newest_rows(keys)[: report.findings.busiest.num_rows]).to_pylist()
    return [
        {
            "key": key_label(key, names),
            "columns": {
                a.name: {"value": row[a.name], "sd": row[f"{a.name}_sd"]} for a in plan.aggregates
            },
        }
        for key, row in zip(report.findings.busiest.to_pylist(), rows, strict=True)
    ]


def write(report: Report, page: str, out: Path) -> None:
    """Write a page; replaces an older report, never another file.

    Raises:
        UsageError: another file is there.
        PolicyError: a page with raw figures would lie among the releases.
        RunError: it cannot be written.
    """
    sink = report.job.sink.folder
    if report.truth is not None and sink is not None and sink.resolve() in out.resolve().parents:
        raise PolicyError(
            "--out", "lies in the folder of the releases", "keep what is not private elsewhere"
        )
    with file_errors("--out", "cannot be written"):
        if out.exists() and not _is_report(out):
            raise UsageError("--out", "exists and is no report", "choose another name")
        with replacing(out, PRIVATE if report.truth is not None else PUBLIC) as draft:
            draft.write_text(page, encoding="utf-8")


def _is_report(path: Path) -> bool:
    with open(path, "rb") as file:
        return file.read(len(MARK)) == MARK.encode()

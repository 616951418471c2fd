"""Differentially private streams on Apache Beam: what a program of yours needs, in one place.

    import dpstream

    shop = dpstream.project("dpstream.toml")
    shop.run("daily")  # a stream, charged in its data set's account
    answer = shop.sql("SELECT ...")
    figures = dpstream.count(visits, unit="user", key="page", epsilon=1.0, account=shop.account())
    releases = records | dpstream.DPStream(shop.job("daily"))  # in a pipeline of yours

The rest is below ``dpstream.accounting`` (mathematics), ``dpstream.state`` (stores and accounts),
``dpstream.dp_transforms`` (the flow) and ``dpstream.pipelines`` (jobs, sources, sinks, commands).
Names are loaded when they are asked for, so that ``import dpstream`` costs nothing.
"""

import importlib
from typing import TYPE_CHECKING, Any

from dpstream.accounting.libraries import prepare_imports

if TYPE_CHECKING:
    from dpstream.accounting.errors import DpstreamError, PolicyError, RunError, UsageError
    from dpstream.accounting.fields import Aggregate, Field
    from dpstream.accounting.plan.plan import Plan
    from dpstream.accounting.plan.privacy import Privacy
    from dpstream.accounting.plan.timeline import Timeline
    from dpstream.dp_transforms.flow import Output, run_in_memory
    from dpstream.dp_transforms.noise.secret_source import SecretSource
    from dpstream.dp_transforms.run import Performance, Run, begin_run
    from dpstream.pipelines.beam_yaml import DPStreamRows
    from dpstream.pipelines.connectors.files.source import ReadFiles
    from dpstream.pipelines.door.dbapi import connect
    from dpstream.pipelines.frames.answer import PrivateTable
    from dpstream.pipelines.frames.one_shot import (
        aggregate,
        count,
        histogram,
        keys,
        mean,
        plan,
        quantiles,
        sum,
    )
    from dpstream.pipelines.frames.plan import QuestionPlan
    from dpstream.pipelines.frames.project_file import DataSetAccount, ProjectFile, account, project
    from dpstream.pipelines.frames.stream import DPStream, ReadTable, Rows
    from dpstream.pipelines.jobs.job import Job, load_job
    from dpstream.pipelines.stream.begin import begin
    from dpstream.pipelines.stream.run import Result, run_job

#: Name -> module that defines it, below this package.
_HOMES = {
    "Aggregate": "accounting.fields",
    "DPStream": "pipelines.frames.stream",
    "DPStreamRows": "pipelines.beam_yaml",
    "DataSetAccount": "pipelines.frames.project_file",
    "DpstreamError": "accounting.errors",
    "Field": "accounting.fields",
    "Job": "pipelines.jobs.job",
    "Output": "dp_transforms.flow",
    "Performance": "dp_transforms.run",
    "Plan": "accounting.plan.plan",
    "PolicyError": "accounting.errors",
    "Privacy": "accounting.plan.privacy",
    "PrivateTable": "pipelines.frames.answer",
    "ProjectFile": "pipelines.frames.project_file",
    "QuestionPlan": "pipelines.frames.plan",
    "ReadFiles": "pipelines.connectors.files.source",
    "ReadTable": "pipelines.frames.stream",
    "Result": "pipelines.stream.run",
    "Rows": "pipelines.frames.stream",
    "Run": "dp_transforms.run",
    "RunError": "accounting.errors",
    "SecretSource": "dp_transforms.noise.secret_source",
    "Timeline": "accounting.plan.timeline",
    "UsageError": "accounting.errors",
    "account": "pipelines.frames.project_file",
    "aggregate": "pipelines.frames.one_shot",
    "begin": "pipelines.stream.begin",
    "begin_run": "dp_transforms.run",
    "connect": "pipelines.door.dbapi",
    "count": "pipelines.frames.one_shot",
    "histogram": "pipelines.frames.one_shot",
    "keys": "pipelines.frames.one_shot",
    "load_job": "pipelines.jobs.job",
    "mean": "pipelines.frames.one_shot",
    "plan": "pipelines.frames.one_shot",
    "project": "pipelines.frames.project_file",
    "quantiles": "pipelines.frames.one_shot",
    "run_in_memory": "dp_transforms.flow",
    "run_job": "pipelines.stream.run",
    "sum": "pipelines.frames.one_shot",
}

__all__ = [
    "Aggregate",
    "DPStream",
    "DPStreamRows",
    "DataSetAccount",
    "DpstreamError",
    "Field",
    "Job",
    "Output",
    "Performance",
    "Plan",
    "PolicyError",
    "Privacy",
    "PrivateTable",
    "ProjectFile",
    "QuestionPlan",
    "ReadFiles",
    "ReadTable",
    "Result",
    "Rows",
    "Run",
    "RunError",
    "SecretSource",
    "Timeline",
    "UsageError",
    "account",
    "aggregate",
    "begin",
    "begin_run",
    "connect",
    "count",
    "histogram",
    "keys",
    "load_job",
    "mean",
    "plan",
    "project",
    "quantiles",
    "run_in_memory",
    "run_job",
    "sum",
]


prepare_imports()

if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        if name not in _HOMES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        try:
            home = importlib.import_module(f"{__name__}.{_HOMES[name]}")
        except ModuleNotFoundError as error:
            from dpstream.accounting.extras import missing_extra

            raise missing_extra(error, f"dpstream.{name}") or error from None
        globals()[name] = attribute = getattr(home, name)
        return attribute


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})

"""Census tables on Dataflow: the launcher starts them and does not wait.

Parameters, data and output are folders of an object store.  The launcher's machine is deleted
afterwards, so no account is there: charge an account where it is (``dpstream census plan`` shows
the figures), or make the tables there.  The rest of the order is kept.  The run id is written into
the output as ``run.json`` before the pipeline is built.  Starting again after an interruption
continues under this run id, which gives the same bytes.  If two processes begin at once, one of
them publishes.  The manifest is written last, after all tables: an output without it is not an
output.  Other records under the same run id are refused before any table of them is written; where
the manifest is there, the records are not looked at any more.
"""

import argparse
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import apache_beam as beam
import msgspec

from dpstream.accounting.errors import UsageError, required
from dpstream.accounting.tabulation.parameters import UNITS
from dpstream.dp_transforms.noise.secret_source import SecretSource
from dpstream.pipelines.ask.draft import MANIFEST, RUN, Begun, File, decoded, of_run
from dpstream.pipelines.launch import dataflow
from dpstream.pipelines.project.project import Project, load_project, secret_of, unit_of
from dpstream.pipelines.tabulation.config import Choice
from dpstream.pipelines.tabulation.flow import Task, build, sealed
from dpstream.pipelines.tabulation.inputs import (
    Inputs,
    Prepared,
    check_records,
    digest_of,
    prepared,
    public_paths,
)
from dpstream.pipelines.tabulation.private import PIECE_BYTES, Piece
from dpstream.pipelines.tabulation.remote import fetched, get, put, stamp_of
from dpstream.pipelines.tabulation.work import parts_of
from dpstream.state.ledger.events import new_run_id


class TablesParameters(NamedTuple):
    """The parameters of the template.

    Attributes:
        parameters, data, out: URLs of folders.
        choice: what is asked for, beside the files.
        keys: the reference to the secret for workers.
    """

    parameters: str
    data: str
    out: str
    choice: Choice
    keys: SecretSource

    @classmethod
    def of(cls, project: Project, name: str | None, out: str) -> "TablesParameters":
        """Return the parameters for a census section of a project file.

        Raises:
            UsageError: there is no such section, its data set has no privacy unit, or a folder or
                the secret is on the launcher's machine, which is deleted afterwards.
        """
        name, section = project.census(name)
        data_set, _ = project.data_set(section.data_set, f"census.{name}.data_set")
        unit_of(project, data_set, "census tables", UNITS[section.program])
        secret = secret_of(project, data_set)
        places = {
            f"census.{name}.parameters": section.parameters,
            f"census.{name}.data": section.data,
            "--out_folder": out,
        }
        parameters, data, out = dataflow.in_stores(places, secret)
        choice = Choice(section.program, section.noise, section.estimates)
        return cls(parameters, data, out, choice, secret)


class Begin(NamedTuple):
    """An execution that has begun.

    Attributes:
        task: the task of the workers.
        prepared: what is computed from the public files.
        done: whether its manifest exists already.
    """

    task: Task
    prepared: Prepared
    done: bool


def begin(options: TablesParameters) -> Begin:
    """Check the public files and write the run id into the output, unless it is there.

    Raises:
        UsageError: the output is another execution's.
    """
    program = options.choice.program
    with fetched(options.parameters, options.data, program) as (parameters, data):
        digest = digest_of(public_paths(parameters, data, program))
    inputs = Inputs(options.parameters, options.data, options.choice, digest)
    public = prepared(inputs)
    receipt, begun = get(options.out, MANIFEST), get(options.out, RUN)
    stands = None if receipt is None else decoded(receipt)
    stamp = None
    if stands is None:  # a later look at the records would tell of them
        check_records(inputs)
        stamp = stamp_of(options.data, program)
    with options.keys.ring() as keys:
        parts = [b"table", public.plan.hash.encode(), options.data.encode()]
        request, fingerprint = keys.source_fingerprint(parts), keys.fingerprint
        read = keys.source_fingerprint([*parts, repr(stamp).encode()])
    run_record = None if begun is None else msgspec.json.decode(begun, type=Begun)
    if stands is not None:
        run_id, answers = stands.run_id, stands.answers(request)
    elif run_record is not None:
        run_id, answers = run_record.run_id, run_record.answers(read)
    else:
        run_id, answers = new_run_id(), True
        put(options.out, File(RUN, msgspec.json.encode(Begun(run_id, of_run(read, run_id)))))
    if not answers:
        raise UsageError("--out_folder", "is another execution's", "name a new folder")
    letters = str(Path(tempfile.gettempdir(), f"dpstream-dead-letters-{run_id}"))
    keys_of = options.keys.of_run(run_id, fingerprint)
    task = Task(inputs, run_id, options.out, letters, keys_of, request, stamp)
    return Begin(task, public, stands is not None)


def pipeline_of(began: Begin, pipeline: beam.Pipeline) -> None:
    """Add the transforms of an execution to a pipeline."""
    task = began.task
    name, size, _ = required(task.stamp, "records of a store have one")
    path = f"{task.inputs.data}/{name}"
    pieces = [Piece(path, at, min(at + PIECE_BYTES, size)) for at in range(0, size, PIECE_BYTES)]
    published = build(pipeline, task, pieces, len(parts_of(began.prepared)))
    sealed(published, task, task.keys.insecure_test_secret is not None)


def start(project: Path, own: argparse.Namespace, beam_args: list[str]) -> dict[str, Any]:
    """Start the execution, or describe it without starting: public names and options only."""
    opened = load_project(project, own.environment)
    launch = TablesParameters.of(opened, own.name, own.out_folder)
    beam_flags = dataflow.flags(beam_args, streaming=False)
    if own.dry_run == "true":
        return {
            "parameters": launch.parameters,
            "data": launch.data,
            "out_folder": launch.out,
            **launch.choice._asdict(),
            "options": dataflow.options_of(beam_flags),
        }
    began = begin(launch)
    if not began.done:
        dataflow.submit(lambda pipeline: pipeline_of(began, pipeline), beam_flags)
    plan = began.prepared.plan.hash
    return {"run_id": began.task.run_id, "plan_hash": plan, "done": began.done}

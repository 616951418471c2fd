"""Make census tables on Dataflow and leave it there: what the flex template of tables runs.

Parameters, data and output are folders of a store.  Nobody waits, and no ledger is on a machine
that is thrown away: who keeps one charges it where it is (``dpstream tabulate plan`` has the
figures), or makes the tables there.  The rest of the order holds.  The run id is put into the
output as ``run.json`` before the pipeline is built; whoever is cut off and starts again goes on
under it, which is the same bytes.  Of two who begin at once one publishes.  The manifest is put
there last, once all tables are: an output without it is none.  Other records under the same run id
are refused before a table of them is put.
"""

import argparse
import json
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import apache_beam as beam
import msgspec
from apache_beam.options.pipeline_options import PipelineOptions

from dpstream.accounting.errors import (
    DpstreamError,
    InvariantError,
    PolicyError,
    UsageError,
)
from dpstream.dp_transforms.noise.key_source import KeySource
from dpstream.pipelines.runners.settings import refuse_at_least_once
from dpstream.pipelines.tabulation.config import Choice
from dpstream.pipelines.tabulation.draft import MANIFEST, RUN, Begun, File, decoded, of_run
from dpstream.pipelines.tabulation.files import public_paths
from dpstream.pipelines.tabulation.flow import Task, build, sealed
from dpstream.pipelines.tabulation.inputs import Inputs, Prepared, digest_of, prepared
from dpstream.pipelines.tabulation.pieces import PIECE_BYTES, Piece
from dpstream.pipelines.tabulation.remote import fetched, get, put, stamp_of
from dpstream.pipelines.tabulation.work import parts_of
from dpstream.state.private_log import unexpected
from dpstream.state.run_ids import new_run_id

RUNNER = "DataflowRunner"


class Asked(NamedTuple):
    """What the template is given.

    Attributes:
        parameters, data, out: URLs of folders.
        choice: what is asked for beside the files; keys: where workers find the key.
    """

    parameters: str
    data: str
    out: str
    choice: Choice
    keys: KeySource

    @classmethod
    def of(cls, own: argparse.Namespace) -> "Asked":
        """Of the launcher's own flags.

        Raises:
            UsageError: a folder or the key is on a machine that is thrown away.
        """
        folders = own.parameters_folder, own.data_folder, own.out_folder
        names = ("--parameters_folder", "--data_folder", "--out_folder")
        for name, folder in zip(names, folders, strict=True):
            if "://" not in folder:
                raise UsageError(
                    name, "is on the launcher's machine, which is thrown away", "use gs://"
                )
        if not own.key.startswith("gcp:"):
            raise UsageError(
                "--key", "is on the launcher's machine, which is thrown away",
                "use gcp:projects/P/secrets/S/versions/N, which the workers read for themselves",
            )  # fmt: skip
        choice = Choice(own.program, own.noise, own.estimates)
        parameters, data, out = (folder.rstrip("/") for folder in folders)
        return cls(parameters, data, out, choice, KeySource(own.key))


class Begin(NamedTuple):
    """An execution that has begun.

    Attributes:
        task: of the workers; found: what follows from the public files.
        done: its manifest stands already.
    """

    task: Task
    found: Prepared
    done: bool


def begin(asked: Asked) -> Begin:
    """Check the public files and put the run id into the output, unless it is there.

    Raises:
        PolicyError: the output is another execution's.
    """
    program = asked.choice.program
    with fetched(asked.parameters, asked.data, program) as (parameters, data):
        digest = digest_of(public_paths(parameters, data, program))
    inputs = Inputs(asked.parameters, asked.data, asked.choice, digest)
    found, stamp = prepared(inputs), stamp_of(asked.data, program)
    with asked.keys.ring() as keys:
        parts = [b"table", found.plan.hash.encode(), asked.data.encode(), repr(stamp).encode()]
        request, fingerprint = keys.source_fingerprint(parts), keys.fingerprint
    receipt, begun = get(asked.out, MANIFEST), get(asked.out, RUN)
    stands = None if receipt is None else decoded(receipt)
    known = None if begun is None else msgspec.json.decode(begun, type=Begun)
    if any(of is not None and not of.answers(request) for of in (stands, known)):
        raise PolicyError("--out_folder", "is another execution's", "name a new folder")
    if known is None:
        run_id = new_run_id()
        known = Begun(run_id, of_run(request, run_id))
        put(asked.out, File(RUN, msgspec.json.encode(known)))
    letters = str(Path(tempfile.gettempdir(), f"dpstream-dead-letters-{known.run_id}"))
    keys_of = asked.keys.of_run(known.run_id, fingerprint)
    task = Task(inputs, known.run_id, asked.out, letters, keys_of, request, stamp)
    return Begin(task, found, stands is not None)


def pipeline_of(began: Begin, pipeline: beam.Pipeline) -> None:
    """Put the transforms of an execution into a pipeline."""
    task = began.task
    if task.stamp is None:
        raise InvariantError("records of a store have one")
    name, size, _ = task.stamp
    path = f"{task.inputs.data}/{name}"
    pieces = [
        Piece(path, at, min(at + PIECE_BYTES, size)) for at in range(0, size, PIECE_BYTES)
    ]  # fmt: skip
    published = build(pipeline, task, pieces, len(parts_of(began.found)))
    sealed(published, task, task.keys.insecure_test_key is not None)


def flags(given: Sequence[str]) -> list[str]:
    """Beam's flags for Dataflow: those given, and what the pipeline rests on.

    Raises:
        UsageError: a flag that breaks exactly-once processing, or another runner.
    """
    asked = PipelineOptions(list(given))
    refuse_at_least_once(asked)
    options = asked.get_all_options()
    if options["runner"] not in (None, RUNNER):
        raise UsageError("--runner", f"must be {RUNNER} here", "leave it out")
    if options["streaming"]:
        raise UsageError("--streaming", "is for jobs without an end", "leave it out")
    added = [f"--runner={RUNNER}"] if options["runner"] is None else []
    if options["sdk_container_image"] and options["sdk_location"] == "default":
        added.append("--sdk_location=container")  # the image has the SDK: nothing is staged
    return [*given, *added]


def launch(began: Begin, beam_args: Sequence[str]) -> None:
    """Hand the pipeline over, and come back."""
    submit(lambda pipeline: pipeline_of(began, pipeline), beam_args)


def submit(built: Callable[[beam.Pipeline], None], beam_args: Sequence[str]) -> None:
    """Hand a pipeline that ends over to Dataflow, and come back.

    Args:
        built: puts the transforms into the pipeline that it is given.
    """
    from apache_beam.options.pipeline_options import StandardOptions

    from dpstream.pipelines.runners.table import make_runner

    without = [flag for flag in beam_args if not flag.startswith("--runner=")]
    engine = make_runner(RUNNER, without)
    engine.options.view_as(StandardOptions).streaming = False
    pipeline = beam.Pipeline(runner=engine.runner, options=engine.options)
    built(pipeline)
    pipeline.run()


def parser() -> argparse.ArgumentParser:
    """Parameters of the template; all others are Beam's."""
    found = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    found.add_argument("--parameters_folder", required=True, help="config.json and code lists")
    found.add_argument("--data_folder", required=True, help="GRF-C.txt and the records")
    found.add_argument("--out_folder", required=True, help="where the tables are put")
    found.add_argument("--key", required=True, help="gcp:projects/P/secrets/S/versions/N")
    found.add_argument("--program", choices=("p", "h"), default="p", help="persons or households")
    found.add_argument("--noise", choices=("census", "rounded"), default="census")
    found.add_argument("--estimates", choices=("census", "combined"), default="census")
    found.add_argument(
        "--dry_run", nargs="?", const="true", default="false", choices=("true", "false"),
        help="check the folders' names and print the options, start nothing",
    )  # fmt: skip
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """The launcher's command line; exit codes as of ``dpstream``."""
    own, beam_args = parser().parse_known_args(argv)
    try:
        asked, whole = Asked.of(own), flags(beam_args)
        if own.dry_run == "true":
            print(json.dumps(describe(asked, whole)))
            return 0
        began = begin(asked)
        if not began.done:
            launch(began, whole)
        plan = began.found.plan.hash
        print(json.dumps({"run_id": began.task.run_id, "plan_hash": plan, "done": began.done}))
        return 0
    except DpstreamError as error:
        coded = error
    except Exception as error:
        coded = unexpected("launch", error)
    print(f"{coded.kind}: {coded}")
    return coded.exit_code


def describe(asked: Asked, beam_args: Sequence[str]) -> dict[str, Any]:
    """What would be started: public names and options only."""
    options = PipelineOptions(list(beam_args)).get_all_options(drop_default=True)
    return {
        "parameters_folder": asked.parameters,
        "data_folder": asked.data,
        "out_folder": asked.out,
        **asked.choice._asdict(),
        "options": {name: value for name, value in sorted(options.items()) if value is not None},
    }

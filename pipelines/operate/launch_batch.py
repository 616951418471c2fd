"""Answer a session's batch on Dataflow and leave it there: what the flex template of batches runs.

The batch was charged, and its ticket's name committed, where the ledger is
(``pipelines.session.ticket``).  Table, ticket and output are in a store; table and ticket are
private.  The ticket's name is put into the output before the pipeline is built; whoever is cut off
and starts again goes on with it, which is the same bytes, and an output that has another one is
refused.  The answer is put last, whole.
"""

import argparse
import json
from collections.abc import Sequence
from typing import Any, NamedTuple

import apache_beam as beam
import msgspec
from apache_beam.options.pipeline_options import PipelineOptions

from dpstream.accounting.errors import DpstreamError, PolicyError, UsageError
from dpstream.dp_transforms.noise.key_source import KeySource
from dpstream.pipelines.operate.launch_tables import flags, submit
from dpstream.pipelines.session.batch import shards_for
from dpstream.pipelines.session.flow import ANSWER, Task, build
from dpstream.pipelines.session.ticket import Ticket, opened
from dpstream.pipelines.tabulation.draft import File
from dpstream.pipelines.tabulation.remote import get, put
from dpstream.state.private_log import unexpected

#: Of which ticket an output is.
BATCH = "batch.json"
#: Shards at least: cells are measured by that many workers.
_WORKERS = 16


class Asked(NamedTuple):
    """What the template is given.

    Attributes:
        ticket: URL of the file; table, out: URLs of folders.
        keys: where workers find the key.
    """

    ticket: str
    table: str
    out: str
    keys: KeySource

    @classmethod
    def of(cls, own: argparse.Namespace) -> "Asked":
        """Of the launcher's own flags.

        Raises:
            UsageError: a place or the key is on a machine that is thrown away.
        """
        for name in ("ticket", "table_folder", "out_folder"):
            if "://" not in getattr(own, name):
                raise UsageError(
                    f"--{name}", "is on the launcher's machine, which is thrown away", "use gs://"
                )
        if not own.key.startswith("gcp:"):
            raise UsageError(
                "--key", "is on the launcher's machine, which is thrown away",
                "use gcp:projects/P/secrets/S/versions/N, which the workers read for themselves",
            )  # fmt: skip
        table, out = own.table_folder.rstrip("/"), own.out_folder.rstrip("/")
        return cls(own.ticket, table, out, KeySource(own.key))


class Begin(NamedTuple):
    """A batch that has begun.

    Attributes:
        task: of the workers; ticket: what it is; done: its answer stands already.
    """

    task: Task
    ticket: Ticket
    done: bool


def begin(asked: Asked) -> Begin:
    """Check the ticket and put its name into the output, unless it is there.

    Raises:
        UsageError: there is no ticket.
        PolicyError: it is not of this key, or the output is another's.
    """
    folder, _, name = asked.ticket.rpartition("/")
    data = get(folder, name)
    if data is None:
        raise UsageError("--ticket", "is not there", "put the ticket of the paid batch there")
    with asked.keys.ring() as keys:
        (ticket, mac), fingerprint = opened(data, keys), keys.fingerprint
    mine = msgspec.json.encode({"run_id": ticket.run_id, "ticket": mac})
    begun = get(asked.out, BATCH)
    if begun not in (None, mine):
        raise PolicyError("--out_folder", "is another batch's", "name a new folder")
    if begun is None:
        put(asked.out, File(BATCH, mine))
    shards = shards_for(ticket.table.space, ticket.question, ticket.boxes, _WORKERS)
    keys_of = asked.keys.of_run(ticket.run_id, fingerprint)
    task = Task(
        ticket.table, asked.table, ticket.question, ticket.read, ticket.run_id, asked.out,
        shards, keys_of,
    )  # fmt: skip
    return Begin(task, ticket, get(asked.out, ANSWER) is not None)


def pipeline_of(began: Begin, pipeline: beam.Pipeline) -> None:
    """Put the transforms of a batch into a pipeline."""
    build(pipeline, began.task, began.ticket.parts)


def parser() -> argparse.ArgumentParser:
    """Parameters of the template; all others are Beam's."""
    found = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    found.add_argument("--ticket", required=True, help="the ticket of the paid batch")
    found.add_argument("--table_folder", required=True, help="the table's parts")
    found.add_argument("--out_folder", required=True, help="where the answer is put")
    found.add_argument("--key", required=True, help="gcp:projects/P/secrets/S/versions/N")
    found.add_argument(
        "--dry_run", nargs="?", const="true", default="false", choices=("true", "false"),
        help="check the names and print the options, start nothing",
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
            submit(lambda pipeline: pipeline_of(began, pipeline), whole)
        print(json.dumps({"run_id": began.ticket.run_id, "done": began.done}))
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
        "ticket": asked.ticket,
        "table_folder": asked.table,
        "out_folder": asked.out,
        "options": {name: value for name, value in sorted(options.items()) if value is not None},
    }

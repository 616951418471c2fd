"""A session's batch on Dataflow: the launcher starts it and does not wait.

The batch was charged, and its ticket's name committed, where the account is
(``pipelines.session.ticket``).  Table, ticket and output are in an object store; table and ticket
are private.  The ticket's name is written into the output before the pipeline is built.  Starting
again after an interruption continues with that ticket, which gives the same bytes; an output with
another ticket is refused.  The answer is written last, as a whole.
"""

from typing import NamedTuple

import apache_beam as beam
import msgspec

from dpstream.accounting.errors import UsageError
from dpstream.dp_transforms.noise.secret_source import SecretSource
from dpstream.pipelines.ask.draft import File, get, put
from dpstream.pipelines.project.project import Project, secret_of
from dpstream.pipelines.session.config import session_table
from dpstream.pipelines.session.records.flow import ANSWER, Task, build, shards_for
from dpstream.pipelines.session.ticket import Ticket, opened

#: Of which ticket an output is.
BATCH = "batch.json"
#: Shards at least: cells are measured by that many workers.
_WORKERS = 16


class BatchParameters(NamedTuple):
    """The parameters of the template.

    Attributes:
        ticket: URL of the file.
        table, out: URLs of folders.
        keys: the reference to the secret for workers.
    """

    ticket: str
    table: str
    out: str
    keys: SecretSource

    @classmethod
    def of(cls, project: Project, name: str | None, ticket: str, out: str) -> "BatchParameters":
        """Return the parameters for a table of a project file whose records have their own budgets.

        Raises:
            UsageError: there is no such table, or a path or the secret is on the launcher's
                machine, which is deleted afterwards.
        """
        name, section = session_table(project, name)
        data_set, _ = project.data_set(section.data_set, f"table.{name}.data_set")
        secret = secret_of(project, data_set)
        places = {
            "--ticket": ticket,
            f"table.{name}.coordinates": section.coordinates or "",
            "--out_folder": out,
        }
        fixes = {field: "use gs://" for field, place in places.items() if "://" not in place}
        if secret.kind != "gcp":
            fixes["secret"] = (
                "use gcp:projects/P/secrets/S/versions/N, which the workers read for themselves"
            )
        for field, fix in fixes.items():
            raise UsageError(field, "is on the launcher's machine, which is thrown away", fix)
        ticket, table, out = (place.rstrip("/") for place in places.values())
        return cls(ticket, table, out, secret)


class Begin(NamedTuple):
    """A batch that has begun.

    Attributes:
        task: the task of the workers.
        ticket: the ticket.
        done: whether its answer exists already.
    """

    task: Task
    ticket: Ticket
    done: bool


def begin(options: BatchParameters) -> Begin:
    """Check the ticket and write its name into the output, unless it is there.

    Raises:
        UsageError: there is no ticket, it was not made with this secret, or the output is
            another's.
    """
    folder, _, name = options.ticket.rpartition("/")
    data = get(folder, name)
    if data is None:
        raise UsageError("--ticket", "is not there", "put the ticket of the paid batch there")
    with options.keys.ring() as keys:
        (ticket, mac), fingerprint = opened(data, keys), keys.fingerprint
    mine = msgspec.json.encode({"run_id": ticket.run_id, "ticket": mac})
    begun = get(options.out, BATCH)
    if begun not in (None, mine):
        raise UsageError("--out_folder", "is another batch's", "name a new folder")
    if begun is None:
        put(options.out, File(BATCH, mine))
    question = ticket.question.canonical
    shards = shards_for(ticket.table.space, question, ticket.boxes, _WORKERS)
    keys_of = options.keys.of_run(ticket.run_id, fingerprint)
    task = Task(
        ticket.table,
        options.table,
        question,
        ticket.question,
        ticket.read,
        ticket.run_id,
        options.out,
        shards,
        keys_of,
    )
    return Begin(task, ticket, get(options.out, ANSWER) is not None)


def pipeline_of(began: Begin, pipeline: beam.Pipeline) -> None:
    """Add the transforms of a batch to a pipeline."""
    build(pipeline, began.task, began.ticket.parts)

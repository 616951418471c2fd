"""A job's releases read back from Kafka, each held against its seal."""

import itertools
from collections.abc import Mapping

import numpy as np
import pyarrow as pa

from dpstream.accounting.errors import PolicyError
from dpstream.dp_transforms.batches import key_fields, release_schema
from dpstream.pipelines.connectors.files.formats import rows_of_text
from dpstream.pipelines.connectors.kafka.topic import KafkaTopic, decoded, no_release
from dpstream.pipelines.connectors.messages import SealMessage, digest_of, is_row, lines
from dpstream.pipelines.connectors.sink import Name
from dpstream.pipelines.jobs.job import Job


def read_kafka_releases(job: Job) -> pa.Table:
    """Every sealed release of a job's topic as one table, each row once.

    Where the topic lets go of what is old (``compact,delete``), a release of which rows are gone is
    left out.

    Returns:
        The columns of `dp_transforms.batches.release_schema`, ordered by window, trigger and key:
        the rows that `pipelines.connectors.write.read_releases` gives of the sink of files.

    Raises:
        PolicyError: a name has two values, or a seal does not fit its rows.
    """
    sink, plan = job.sink, job.plan
    topic = KafkaTopic(sink.servers or "", sink.topic or "", sink.options)
    rows, seals = dict[str, bytes](), dict[Name, SealMessage]()
    # Seals first: the rows of a seal that is there are there, and a live topic grows.
    described = topic.describe()
    others = range(1, described.partitions)
    for key, value in itertools.chain(topic.read([0]), topic.read(others)):
        if is_row(key):
            if not value or b"\n" in value:  # a row is one line
                raise no_release()
            if rows.setdefault(key, value) != value:
                raise _two_values()
        if key.startswith("seal-"):
            seal = decoded(value, SealMessage)
            if seal is None or seals.setdefault((seal.window, seal.trigger), seal) != seal:
                raise no_release()
    schema = release_schema(plan)
    table = _table(rows, schema)
    return _sealed(table, rows, seals, job, "delete" in described.policies).select(schema.names)


def _table(rows: Mapping[str, bytes], schema: pa.Schema) -> pa.Table:
    """Rows with their names, in the order of these."""
    names = sorted(rows)
    try:
        table = rows_of_text(lines([rows[name] for name in names]), schema)
        table = table.append_column("_name", pa.array(names, pa.string()))
    except (pa.ArrowException, ValueError):
        raise no_release() from None
    if any(table[name].null_count for name in ("window_start", "trigger", "release_id")):
        raise no_release()
    return table


def _sealed(
    table: pa.Table,
    rows: Mapping[str, bytes],
    seals: Mapping[Name, SealMessage],
    job: Job,
    goes: bool,
) -> pa.Table:
    """The rows of sealed releases, in order, each release held against its seal.

    Args:
        goes: rows may be gone.
    """
    line = job.plan.timeline
    start = table["window_start"].cast(pa.int64()).to_numpy()
    trigger = table["trigger"].to_numpy()
    window = (start - line.start) // line.slide
    keep = np.zeros(table.num_rows, np.bool_)
    names = table["_name"].to_pylist()
    step = window * (line.triggers + 1) + trigger
    order = np.argsort(step, kind="stable")
    steps = step[order]
    for (of_window, of_trigger), seal in seals.items():
        number = of_window * (line.triggers + 1) + of_trigger
        begin, end = np.searchsorted(steps, (number, number + 1))
        mine = order[begin:end]
        if goes and len(mine) < seal.rows:
            continue
        found = digest_of((names[i], rows[names[i]]) for i in mine)
        if (len(mine), found) != (seal.rows, seal.digest):
            raise PolicyError(
                "sink.topic",
                f"holds not what the seal of window {of_window}, trigger {of_trigger} says",
                "name a new topic, and write the store's releases to it with"
                " `dpstream state releases JOB`",
            )
        keep[mine] = True
    keys = [(f.name, "ascending") for f in key_fields(job.plan)]
    kept = table.filter(pa.array(keep))
    return kept.sort_by([("window_start", "ascending"), ("trigger", "ascending"), *keys])


def _two_values() -> PolicyError:
    """Somebody has published something else under a name that was taken."""
    return PolicyError(
        "sink.topic",
        "holds two values of one release id",
        "do not use it: name a new topic, and write the store's releases to it with"
        " `dpstream state releases JOB`",
    )

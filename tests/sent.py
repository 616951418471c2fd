"""What a job hands to a service, as one digest: run with another order of its input and other
hash seeds, for the tests of the sinks that cannot be read back."""

import hashlib
import sys
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

from dpstream.pipelines.connectors.bigquery.sink import BigQueryTables
from dpstream.pipelines.connectors.pubsub.sink import Message, PubsubTopic
from dpstream.state import open as stores
from tests.published import Published

SINKS = {
    "pubsub": 'kind = "pubsub"\ntopic = "projects/p/topics/t"',
    "bigquery": 'kind = "bigquery"\ntable = "p.d.t"',
}


def shuffled(folder: Path, seed: int) -> None:
    """Put the rows of a place's input in another order."""
    path = folder / "in.csv"
    head, *rows = path.read_text().splitlines()
    order = np.random.default_rng(seed).permutation(len(rows))
    path.write_text("\n".join([head, *(rows[i] for i in order)]) + "\n")


def sent(folder: Path, kind: str, seed: int) -> str:
    """The digest of all that a run sends: what belongs together in the order it was sent."""
    published, contents = Published(folder), defaultdict[str, list[str]](list)
    if seed:
        shuffled(folder, seed)

    def send(_: Any, messages: Iterable[Message]) -> None:
        for message in messages:
            release = f"{message.order} {message.attributes.get('trigger')}"
            contents[release].append(repr((message.value, sorted(message.attributes.items()))))

    def append(_: Any, table: str, schema: Any, rows: Iterable[bytes]) -> None:
        contents[table] += [row.hex() for row in rows]

    with (
        mock.patch.object(PubsubTopic, "send", send),
        mock.patch.object(PubsubTopic, "look"),
        mock.patch.object(BigQueryTables, "append", append),
        mock.patch.object(BigQueryTables, "look"),
    ):
        published.run(SINKS[kind])
    stores.close_all()
    assert sum(map(len, contents.values())) > 20
    return hashlib.blake2b(repr(sorted(contents.items())).encode(), digest_size=16).hexdigest()


if __name__ == "__main__":
    print(sent(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])))

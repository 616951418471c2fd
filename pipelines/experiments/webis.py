"""The real Reddit corpus of Table 2: ``corpus-webis-tldr-17.json`` as records of one day.

The file is JSON Lines (as it is, or zipped) with fields author, body, normalizedBody, content,
summary, subreddit, ... of which author and subreddit are read.  It is streamed: memory is one
block of lines and one row group.  It has no times; as in the paper (section 5) every post gets
a uniform instant of one day, here from a seed, in corpus order.

The author ``[deleted]`` stands for many people.  It is kept as one unit: its first C posts
count, and no guarantee is claimed for the people behind it.
"""

import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, cast

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from dpstream.accounting.errors import UsageError
from dpstream.pipelines.connectors.files.jsonl import read_jsonl
from dpstream.pipelines.connectors.files.rows import Refused
from dpstream.pipelines.synth import DAY_MICROS, Synth

FIELDS = ("author", "subreddit")


@dataclass
class PostCount:
    """What became of the lines of a corpus.

    Attributes:
        posts: lines that became records.
        malformed: lines that are not a JSON object, or too long.
        unnamed: objects without an author or a subreddit.
    """

    posts: int = 0
    malformed: int = 0
    unnamed: int = 0


@contextmanager
def open_corpus(path: Path) -> Iterator[BinaryIO]:
    """The corpus' JSON Lines as a stream; of a zip archive its one ``.json`` member.

    Raises:
        UsageError: unreadable, or not one JSON file in the archive.
    """
    fix = "give corpus-webis-tldr-17.json or the zip archive it comes in"
    try:
        if not zipfile.is_zipfile(path):
            with open(path, "rb") as plain:
                yield plain
            return
        with zipfile.ZipFile(path) as archive:
            names = [n for n in archive.namelist() if n.endswith((".json", ".jsonl"))]
            if len(names) != 1:
                raise UsageError("--webis", "is an archive without one .json file", fix)
            with archive.open(names[0]) as member:
                yield cast(BinaryIO, member)
    except (OSError, zipfile.BadZipFile):
        raise UsageError("--webis", "cannot be read", fix) from None


def batches(stream: BinaryIO, layout: Synth, tally: PostCount) -> Iterator[pa.RecordBatch]:
    """The posts as records of ``layout.schema`` in corpus order; ``tally`` is counted up.

    Args:
        stream: JSON Lines; bad lines are counted and left out.
        layout: seed, start and schema (users as text); its counts are not used.
    """
    rng = np.random.default_rng(np.random.SeedSequence((layout.seed, 17, 1)))
    held, rows = list[pa.RecordBatch](), 0
    for part in read_jsonl(stream, FIELDS):
        if isinstance(part, Refused):
            tally.malformed += len(part.offsets)
            continue
        named = pc.and_(*(pc.greater(pc.binary_length(part.batch[f]), 0) for f in FIELDS))
        posts = part.batch.filter(named)
        tally.posts += posts.num_rows
        tally.unnamed += part.batch.num_rows - posts.num_rows
        held.append(_timed(posts, layout, rng))
        rows += posts.num_rows
        if rows >= layout.row_group_rows:
            yield _joined(held, layout)
            held, rows = [], 0
    if rows:
        yield _joined(held, layout)


def some(source: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """The batches of ``source``.

    Raises:
        UsageError: there is none.
    """
    empty = True
    for batch in source:
        empty = False
        yield batch
    if empty:
        raise UsageError("--webis", "holds no post", "give corpus-webis-tldr-17.json or its zip")


def _timed(posts: pa.RecordBatch, layout: Synth, rng: np.random.Generator) -> pa.RecordBatch:
    times = layout.start + rng.integers(0, DAY_MICROS, posts.num_rows)
    time = pa.array(times).view(pa.timestamp("us", tz="UTC"))
    columns = [*(posts[f].cast(pa.string()) for f in FIELDS), time]
    return pa.RecordBatch.from_arrays(columns, schema=layout.schema)


def _joined(held: list[pa.RecordBatch], layout: Synth) -> pa.RecordBatch:
    return pa.Table.from_batches(held, layout.schema).combine_chunks().to_batches()[0]

"""Webis-TLDR-17, the Reddit corpus of the paper's Table 2 (section 5.2): its shape, and itself.

The query is COUNT(*) GROUP BY subreddit with C = 17 over one day in which every user's posts
are shuffled uniformly.  The corpus itself has no times.

Known (the paper): 3.8 million posts of 1.4 million users (3,848,330 posts by the corpus'
dataset card); C = 17 is the 99th percentile of posts per user; Table 2.

Assumed, so that the generated data has the figures of Table 2 that depend on the data alone:

* AskReddit holds 15.3% of all posts.  Then Table 2's Linf of 102,250, which is what bounding
  to C cuts from the largest key, says that bounding cuts 17.3% of all posts.
* One account holds 10.1% of all posts (the corpus files all deleted users under one name); the
  others follow a Zipf-Mandelbrot law, q = 2.249, s = 2.971, at most 10,000.  These three figures
  solve: mean 2.749 posts a user, P(> 17 posts) = 1%, 17.3% cut.
* A second subreddit holds 9.15% (from Table 2's L2 beside its Linf); the others, 29,648 of
  them, follow a Zipf-Mandelbrot law, q = 14, s = 1.28, a compromise: the mechanism as published
  (mode ``paper``, simulated at full size) finds 1,319 keys with L1 1.18M and L2 121,762 where
  Table 2 has 1,473, 0.99M and 127,721 (T = 100); 993 and 1.27M for 1,181 and 1.07M (T = 1000).
* A post's subreddit is independent of its author.

With fewer users everything but the number of subreddits shrinks in proportion.

The real corpus, ``corpus-webis-tldr-17.json``, is JSON Lines (as it is, or zipped) with fields
author, body, normalizedBody, content, summary, subreddit, ... of which author and subreddit are
read.  It is streamed: memory is one block of lines and one row group.  As in the paper (section 5)
every post gets a uniform instant of one day, here from a seed, in corpus order.  The author
``[deleted]`` stands for many people.  It is kept as one unit: its first C posts count, and no
guarantee is claimed for the people behind it.
"""

import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, NamedTuple, cast

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from dpstream.accounting.arrays import Float64, Int64
from dpstream.accounting.errors import UsageError
from dpstream.pipelines.formats.rows import Refused
from dpstream.pipelines.formats.texts import read_jsonl
from tests.bench.paper.synth import (
    DAY_MICROS,
    MAX_USERS,
    Synth,
    Zipf,
    draw_sizes,
    numbered,
    records_of,
)

#: Section 5.2.
USERS, POSTS, CONTRIBUTIONS = 1_400_000, 3_848_330, 17
#: See the module's docstring.
POSTS_PER_USER = Zipf(q=2.249, s=2.971, most=10_000)
SHARED_ACCOUNT = 0.101
LARGEST = (0.153, 0.0915)
OTHERS = Zipf(q=14.0, s=1.28, most=29_648)
FIELDS = ("author", "subreddit")


class Reddit(NamedTuple):
    """Parameters of a generated corpus.

    Attributes:
        users: accounts, the shared one included.
        seed: the same parameters give the same records.
        row_group_rows: rows of a Parquet row group.
    """

    users: int = USERS
    seed: int = 0
    row_group_rows: int = 1_000_000

    def check(self) -> "Reddit":
        """Refuse sizes beyond the limits; returns itself."""
        self.layout.check()
        if not 2 <= self.users <= MAX_USERS:
            raise UsageError("users", f"must be from 2 to {MAX_USERS}", "correct it")
        return self

    @property
    def layout(self) -> Synth:
        """Schema, day and row groups, as of the other generator, with users as text."""
        return Synth(seed=self.seed, row_group_rows=self.row_group_rows, user_type="string")


def key_cdf() -> Float64:
    """P[subreddit <= k] for the ranks in order; the last entry is exactly 1."""
    rest = 1.0 - sum(LARGEST)
    heads = np.cumsum(LARGEST)
    return np.asarray(np.concatenate([heads, heads[-1] + rest * OTHERS.cdf()]).clip(max=1.0))


def posts_by_account(users: int, rng: np.random.Generator) -> Int64:
    """(users,) posts of each account; the last one is the shared account."""
    own = draw_sizes(POSTS_PER_USER.cdf(), users - 1, rng)
    shared = round(own.sum() * SHARED_ACCOUNT / (1 - SHARED_ACCOUNT))
    return np.append(own, max(1, shared))


def batches(params: Reddit) -> Iterator[pa.RecordBatch]:
    """The posts in time order: user (text), key (the subreddit) and time.

    Raises:
        UsageError: a size is beyond its limit.
    """
    params.check()
    root = np.random.SeedSequence((params.seed, 17))
    count_rng, time_rng, key_rng = (np.random.default_rng(s) for s in root.spawn(3))
    sizes = posts_by_account(params.users, count_rng)
    keys = (key_cdf(), numbered("r", len(LARGEST) + OTHERS.most))
    return records_of(sizes, keys, (time_rng, key_rng), params.layout)


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


def corpus_batches(stream: BinaryIO, layout: Synth, tally: PostCount) -> Iterator[pa.RecordBatch]:
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


def checked(source: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
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

"""The Reddit-shaped generator follows its laws; the loader streams the real corpus' format."""

import io
import json
import zipfile
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner, Result
from scipy import stats

from dpstream.pipelines.formats.lines import BLOCK_BYTES
from tests.bench.paper import reddit
from tests.bench.paper.__main__ import paper
from tests.bench.paper.reddit import LARGEST, OTHERS, POSTS_PER_USER, Reddit
from tests.bench.paper.synth import DAY_MICROS
from tests.pipelines.cli.called import printed


def call(*args: str | Path) -> Result:
    return CliRunner().invoke(paper, [str(a) for a in args])


def test_the_figures_of_the_corpus() -> None:
    """Mean, 99th percentile and what bounding cuts: those the docstring says they solve."""
    law = np.diff(POSTS_PER_USER.cdf(), prepend=0.0)
    posts = np.arange(1, POSTS_PER_USER.most + 1)
    own = reddit.USERS * np.dot(law, posts)
    total = own / (1 - reddit.SHARED_ACCOUNT)
    assert total == pytest.approx(reddit.POSTS, rel=2e-3)
    assert law[reddit.CONTRIBUTIONS :].sum() == pytest.approx(0.01, rel=0.01)
    counted_posts = reddit.USERS * np.dot(law, np.minimum(posts, reddit.CONTRIBUTIONS))
    assert 1 - counted_posts / total == pytest.approx(0.173, abs=0.001)
    assert (1 - counted_posts / total) * LARGEST[0] * total == pytest.approx(102_250, rel=0.02)
    cdf = reddit.key_cdf()
    assert len(cdf) == 29_650 and cdf[-1] == 1.0 and np.all(np.diff(cdf) >= 0)


@pytest.fixture(scope="module")
def posts(tmp_path_factory: pytest.TempPathFactory) -> pa.Table:
    path = tmp_path_factory.mktemp("reddit") / "posts.parquet"
    result = call("reddit", path, "--users", "60000", "--seed", "3", "--json")
    assert result.exit_code == 0, result.output
    table = pq.read_table(path)
    assert printed(result.stdout) == {"posts": table.num_rows, "bad_lines": 0, "unnamed": 0}
    return table


def test_generated_posts_follow_the_laws(posts: pa.Table) -> None:
    assert posts.schema.equals(Reddit().layout.schema)
    by_user = np.sort(posts["user"].value_counts().field("counts").to_numpy())
    assert len(by_user) == 60_000
    assert by_user[-1] / posts.num_rows == pytest.approx(reddit.SHARED_ACCOUNT, abs=1e-4)
    law = np.diff(POSTS_PER_USER.cdf(), prepend=0.0)
    edges = np.append(np.arange(1, 25), POSTS_PER_USER.most + 1)
    observed = np.histogram(by_user[:-1], edges)[0]
    expected = np.add.reduceat(law, edges[:-1] - 1) * 59_999
    assert stats.chisquare(observed, expected).pvalue > 1e-6
    other = np.diff(POSTS_PER_USER._replace(s=2.8).cdf(), prepend=0.0)
    other_expected = np.add.reduceat(other, edges[:-1] - 1) * 59_999
    assert stats.chisquare(observed, other_expected).pvalue < 1e-6, "another law is told apart"

    rank = pc.utf8_slice_codeunits(posts["key"], 1).cast(pa.int64()).to_numpy() - 1
    edges = np.concatenate([[0, 1, 2, 5, 10, 50, 200, 1000, 5000], [2 + OTHERS.most]])
    observed = np.histogram(rank, edges)[0]
    share = np.diff(np.append(0.0, reddit.key_cdf())[edges])
    assert stats.chisquare(observed, share * posts.num_rows).pvalue > 1e-6

    time = posts["time"].cast(pa.int64()).to_numpy() - Reddit().layout.start
    assert np.all(np.diff(time) >= 0)
    assert stats.kstest(time / DAY_MICROS, "uniform").pvalue > 1e-6


def test_seeds() -> None:
    def rows(seed: int) -> pa.Table:
        return pa.Table.from_batches(reddit.batches(Reddit(users=300, seed=seed)))

    assert rows(1).equals(rows(1))
    assert not rows(1).equals(rows(2))


GOOD = [
    {"author": f"a{i % 400}", "body": "x" * (i % 300), "content": "c", "subreddit": f"s{i % 5}"}
    for i in range(2000)
]
BAD = [
    b"not json",
    b'{"author": "a", "subreddit": "s"',
    b'["author", "subreddit"]',
    b"17",
    b'{"author": {"name": "a"}, "subreddit": "s"}',
    b'{"author": "\xff\xfe", "subreddit": "s"}',
]
UNNAMED = [
    b'{"author": null, "subreddit": "s"}',
    b'{"author": "a"}',
    b'{"author":"","subreddit":"s"}',
]


def corpus() -> bytes:
    """Good lines with bad ones among them, blank lines, and no line feed at the end."""
    lines = [json.dumps(row).encode() for row in GOOD]
    for place, line in enumerate([*BAD, b"", *UNNAMED]):
        lines.insert(150 * place + 1, line)
    return b"\n".join(lines)


@pytest.mark.parametrize("zipped", [False, True])
def test_the_real_corpus(tmp_path: Path, zipped: bool) -> None:
    source = tmp_path / "corpus"
    if zipped:
        with zipfile.ZipFile(source, "w", zipfile.ZIP_DEFLATED) as archive:
            archive.writestr("corpus-webis-tldr-17.json", corpus())
            archive.writestr("README.txt", "read me")
    else:
        source.write_bytes(corpus())
    out = tmp_path / "posts.parquet"
    result = call("reddit", out, "--webis", source, "--row-group-rows", "700", "--json")
    assert result.exit_code == 0, result.output
    assert printed(result.stdout) == {
        "posts": len(GOOD),
        "bad_lines": len(BAD),
        "unnamed": len(UNNAMED),
    }
    table = pq.read_table(out)
    assert table.schema.equals(Reddit().layout.schema)
    assert table["user"].to_pylist() == [row["author"] for row in GOOD]
    assert table["key"].to_pylist() == [row["subreddit"] for row in GOOD]
    time = table["time"].cast(pa.int64()).to_numpy() - Reddit().layout.start
    assert stats.kstest(time / DAY_MICROS, "uniform").pvalue > 1e-6


class Endless(io.RawIOBase):
    """A corpus of many blocks that counts what is asked of it."""

    def __init__(self, lines: int) -> None:
        self._line = json.dumps({"author": "a", "subreddit": "s", "body": "x" * 1000}).encode()
        self.left, self.largest = lines, 0

    def read(self, size: int = -1) -> bytes:
        assert 0 < size <= BLOCK_BYTES, "the file is read as a whole"
        self.largest = max(self.largest, size)
        line_count = min(self.left, size // (len(self._line) + 1))
        self.left -= line_count
        return (self._line + b"\n") * line_count


def test_the_corpus_is_streamed() -> None:
    source, tally = Endless(30_000), reddit.PostCount()
    layout = Reddit(row_group_rows=5_000).layout
    left = []
    for batch in reddit.corpus_batches(source, layout, tally):  # type: ignore[arg-type]
        assert batch.num_rows < 5_000 + 10_000
        left.append(source.left)
    assert tally.posts == 30_000
    assert left[0] > 15_000, "the first rows come before the file is read to its end"


@pytest.mark.parametrize("content", [b"", b"none\n", b'{"author": null}\n', None])
def test_no_corpus(tmp_path: Path, content: bytes | None) -> None:
    source = tmp_path / "corpus.json"
    if content is not None:
        source.write_bytes(content)
    result = call("reddit", tmp_path / "out.parquet", "--webis", source)
    assert result.exit_code == 2 and "--webis" in result.stderr
    assert not (tmp_path / "out.parquet").exists()


def test_archives_without_a_corpus(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "x.zip", "w") as archive:
        archive.writestr("a.json", "{}")
        archive.writestr("b.json", "{}")
    result = call("reddit", tmp_path / "out.parquet", "--webis", tmp_path / "x.zip")
    assert result.exit_code == 2 and "one .json file" in result.stderr


def test_table2_on_the_real_format(tmp_path: Path) -> None:
    source = tmp_path / "corpus.json"
    source.write_bytes(corpus())
    args = ("--webis", source, "--triggers", "2", "--modes", "sticky", "--epsilon", "50")
    result = call("table2", *args, "--contributions", "20", "--shards", "1", "--json")
    assert result.exit_code == 0, result.output
    report = printed(result.stdout)
    assert report["data"] == "webis-tldr-17" and len(report["runs"]) == 5
    assert report["runs"][0]["keys"] == 5 and report["runs"][0]["records"] == len(GOOD)

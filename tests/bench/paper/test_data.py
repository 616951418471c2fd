"""Data of the experiments: the synthetic day, Reddit posts, and the true histograms."""

import io
import json
import os
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner, Result
from scipy import stats

from dpstream.pipelines.demo import first_of_each
from dpstream.pipelines.formats.lines import BLOCK_BYTES
from tests.bench.paper import reddit
from tests.bench.paper.__main__ import paper
from tests.bench.paper.reddit import LARGEST, OTHERS, POSTS_PER_USER, Reddit
from tests.bench.paper.synth import (
    DAY_MICROS,
    KEY_Q,
    KEY_S,
    RECORDS_PER_USER,
    Synth,
    Zipf,
    batches,
    draw,
    generate,
)
from tests.bench.paper.truth import (
    Columns,
    Scoreboard,
    Truth,
    errors,
    first_of_pair,
    load,
)
from tests.golden.refusals import Refused
from tests.pipelines.cli.called import printed


def pmf(law: Zipf) -> np.ndarray:
    weights = [(x - 1 + law.q) ** -law.s for x in range(1, law.most + 1)]
    return np.array(weights) / sum(weights)


@pytest.mark.parametrize("law", [Zipf(26, 6.738, 2000), Zipf(1000, 1.4, 5000), Zipf(1, 1.0, 1)])
def test_the_law(law: Zipf) -> None:
    cdf = law.cdf()
    assert cdf[-1] == 1.0
    assert np.all(np.diff(cdf) >= 0)
    np.testing.assert_allclose(cdf, np.cumsum(pmf(law)), rtol=1e-12)
    assert law.mean() == pytest.approx(np.dot(pmf(law), np.arange(1, law.most + 1)))


def test_the_figures_of_the_data_set() -> None:
    assert RECORDS_PER_USER.mean() == pytest.approx(5.905, abs=0.002)
    assert 1 - RECORDS_PER_USER.cdf()[9] == pytest.approx(0.150, abs=0.001)


@pytest.mark.parametrize("seed", [1, 2])
def test_draws_follow_the_law(seed: int) -> None:
    law = Zipf(RECORDS_PER_USER.q, RECORDS_PER_USER.s, 100_000)
    sample = draw(law.cdf(), 400_000, np.random.default_rng(seed)) + 1
    edges = np.append(np.arange(1, 40), law.most + 1)
    observed = np.histogram(sample, edges)[0]
    expected = np.add.reduceat(pmf(law), edges[:-1] - 1) * len(sample)
    assert stats.chisquare(observed, expected).pvalue > 1e-6
    # The test has power: a law with one less in q is told apart.
    other = np.add.reduceat(pmf(Zipf(25, law.s, law.most)), edges[:-1] - 1) * len(sample)
    assert stats.chisquare(observed, other).pvalue < 1e-6


def test_a_data_set(tmp_path: Path) -> None:
    params = Synth(users=50_000, keys=20_000, seed=3, row_group_rows=70_000)
    path = tmp_path / "x.parquet"
    rows = generate(params, path)
    table = pq.read_table(path)
    assert table.num_rows == rows
    assert table.schema.equals(params.schema)
    mean, sd = RECORDS_PER_USER.mean(), 7.0
    assert abs(rows / 50_000 - mean) < 6 * sd / 50_000**0.5
    groups = pq.ParquetFile(path).metadata
    assert groups.row_group(0).num_rows == 70_000
    times = table.column("time").cast(pa.int64()).to_numpy() - params.start
    assert times.min() >= 0 and times.max() < DAY_MICROS
    assert np.all(np.diff(times) >= 0)
    assert stats.kstest(times / DAY_MICROS, "uniform").pvalue > 1e-6
    users = table.column("user").to_numpy()
    assert len(np.unique(users)) == 50_000 and users.min() == 1 and users.max() == 50_000
    keys = pc.utf8_slice_codeunits(table.column("key"), 1).cast(pa.int64()).to_numpy()
    expected = pmf(Zipf(KEY_Q, KEY_S, 20_000))
    edges = np.arange(0, 20_000, 500)
    observed = np.histogram(keys - 1, np.append(edges, 20_000))[0]
    assert stats.chisquare(observed, np.add.reduceat(expected, edges) * rows).pvalue > 1e-6
    # A user's key and time tell nothing about the user.
    assert abs(np.corrcoef(users, times)[0, 1]) < 6 / rows**0.5
    assert abs(np.corrcoef(users, keys)[0, 1]) < 6 / rows**0.5


def test_seeds_and_row_groups() -> None:
    def rows(**change: Any) -> list[dict[str, Any]]:
        params = Synth(users=500, keys=100, seed=1, row_group_rows=300)._replace(**change)
        return pa.Table.from_batches(batches(params)).to_pylist()

    base = rows()
    assert rows() == base
    assert rows(row_group_rows=77) == base
    assert rows(seed=2) != base
    text = rows(user_type="string")
    assert [r["user"] for r in text] == [f"u{r['user']:07d}" for r in base]
    assert base[0]["key"][0] == "k"
    start = 1_357_016_400_000_000
    later = rows(start=start)
    shift = later[0]["time"] - base[0]["time"]
    assert all(b["time"] - a["time"] == shift for a, b in zip(base, later, strict=True))


def test_files_are_complete_or_absent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refused: Refused
) -> None:
    path = tmp_path / "x.parquet"
    params = Synth(users=10, keys=5)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(os, "replace", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        generate(params, path)
    assert list(tmp_path.iterdir()) == []
    generate(params, path)
    first = path.read_bytes()
    refused(generate, params, path)
    generate(params, path, overwrite=True)
    assert path.read_bytes() == first


@pytest.mark.parametrize(
    "change", [{"users": 0}, {"users": 1 << 27}, {"keys": 0}, {"row_group_rows": 0}, {"seed": -1}]
)
def test_sizes_have_limits(change: dict[str, Any], refused: Refused) -> None:
    refused(lambda: Synth(**change).check())


@pytest.mark.slow
def test_full_scale(tmp_path: Path) -> None:
    rows = generate(Synth(users=10_000_000, seed=7), tmp_path / "full.parquet")
    assert abs(rows - 59_050_000) <= 20_000


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


HALF = DAY_MICROS // 2


def columns() -> Columns:
    return Columns(
        pa.array(["a", "b"]), np.array([0, 1, 0], np.int32), np.array([0, 1, HALF]),
        np.array([0, 0, 1], np.int32),
    )  # fmt: skip


def test_records_are_read_in_order_of_time(tmp_path: Path) -> None:
    start = Synth().start
    time = pa.array([start + 9, start + 3]).view(pa.timestamp("us", "UTC"))
    pq.write_table(pa.table({"user": [7, 5], "key": ["x", "y"], "time": time}), tmp_path / "x")
    data = load(tmp_path / "x")
    assert data.time.tolist() == [3, 9] and data.names.take(data.key).to_pylist() == ["y", "x"]
    assert len(load(tmp_path / "x", users=False).user) == 0 and len(data) == 2


def test_counts_by_trigger_and_errors() -> None:
    truth = Truth(columns(), 2)
    assert [truth.added(t).tolist() for t in (1, 2)] == [[1, 1], [1, 0]]
    releases = pa.table({"key": ["a", "a", "b"], "trigger": [1, 2, 2], "count": [3.0, 2.0, 4.0]})
    scores = errors(truth, releases)
    assert scores == {"keys": 2, "l1": 3.0, "l2": 3.0, "linf": 3.0, "l1_average": 3.0, "updates": 3}


def test_what_cannot_be_measured() -> None:
    truth = Truth(columns(), 2)
    with pytest.raises(ValueError, match="does not occur"):
        truth.codes_of(pa.chunked_array([["z"]]))
    with pytest.raises(ValueError, match="not every trigger"):
        Scoreboard(truth).errors()


def test_first_rows() -> None:
    group = np.array([2, 1, 2, 2, 1])
    assert first_of_each(group, 2).tolist() == [True, True, True, False, True]
    user, key = np.array([0, 0, 1, 0], np.int32), np.array([5, 5, 5, 6], np.int32)
    assert first_of_pair(user, key).tolist() == [True, False, True, True]
    steps = np.array([1, 2, 2, 2], np.int32)
    assert first_of_pair(user, key, steps).all()

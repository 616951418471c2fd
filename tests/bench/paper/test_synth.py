"""The generator of Table 1: exact laws, seeded, in time order."""

import os
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from scipy import stats

from dpstream.accounting.errors import UsageError
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


def test_files_are_complete_or_absent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "x.parquet"
    params = Synth(users=10, keys=5)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(os, "replace", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        generate(params, path)
    assert list(tmp_path.iterdir()) == []
    generate(params, path)
    first = path.read_bytes()
    with pytest.raises(UsageError):
        generate(params, path)
    generate(params, path, overwrite=True)
    assert path.read_bytes() == first


@pytest.mark.parametrize(
    "change", [{"users": 0}, {"users": 1 << 27}, {"keys": 0}, {"row_group_rows": 0}, {"seed": -1}]
)
def test_sizes_have_limits(change: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        Synth(**change).check()


@pytest.mark.slow
def test_full_scale(tmp_path: Path) -> None:
    rows = generate(Synth(users=10_000_000, seed=7), tmp_path / "full.parquet")
    assert abs(rows - 59_050_000) <= 20_000

"""`dpstream sql` against the peers: one statement, one file, one budget, in one run.

    python -m tests.bench.sql_peers

Each peer runs in an environment of its own (`tests/bench/environments`), which the command makes.
dpstream runs first and last, each time as the whole command in a process of its own.  Beside
seconds, CPU seconds and peak memory: the keys that were released, and the distance (L1) of counts
and sums from the exact ones over all keys, where a key that was not released counts as 0.
"""

import argparse
import json
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq

from tests.bench import environments
from tests.bench.common import emit, machine
from tests.bench.sql import STATEMENT, cold, data
from tests.bench.sql_peer_runs import PEERS


def distance(records: Path, key: Any, columns: dict[str, Any]) -> dict[str, float]:
    """Released keys, and the L1 distance of each column (``n``, ``s``) from the exact one."""
    table = pq.read_table(records)
    keys, value = table["key"].to_numpy(), table["value"].to_numpy()
    errors: dict[str, float] = {"keys": len(key)}
    for name, weights in (("n", None), ("s", value)):
        exact = np.bincount(keys, weights)
        estimate = np.zeros(len(exact))
        estimate[np.asarray(key, np.int64)] = np.asarray(columns[name], np.float64)
        errors[f"l1_{name}"] = round(float(np.abs(estimate - exact).sum()))
    return errors


def ours(folder: Path, catalog: Path) -> dict[str, Any]:
    """The whole command, with a new charge."""
    measured, output = cold(catalog)
    rows = json.loads(output)["rows"]
    columns = {name: [row["values"][name] for row in rows] for name in ("key", "s", "n")}
    return {"peer": "dpstream", **measured, **distance(folder / RECORDS, columns["key"], columns)}


#: Peer -> its environment.
ENVIRONMENTS = {"smartnoise": "smartnoise", "opendp-polars": "peers"}


def theirs(name: str, folder: Path) -> dict[str, Any]:
    """A peer in its own environment."""
    python = str(environments.python_of(ENVIRONMENTS[name]))
    script, out = Path(__file__).with_name("sql_peer_runs.py"), folder / f"{name}.parquet"
    words = [python, str(script), name, str(folder / RECORDS), str(out)]
    output = subprocess.run(words, check=True, stdout=subprocess.PIPE, text=True).stdout
    released = pq.read_table(out).to_pydict()
    measured = json.loads(output.splitlines()[-1])
    return {"peer": name, **measured, **distance(folder / RECORDS, released["key"], released)}


RECORDS = "records.parquet"


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        catalog = data(folder, options.rows)
        runs = [ours(folder, catalog)]
        runs += [theirs(peer, folder) for peer in PEERS]
        runs.append(ours(folder, catalog))
    emit({"bench": "sql_peers", "statement": STATEMENT, "runs": runs, "machine": machine()},
         options.out)  # fmt: skip


if __name__ == "__main__":
    main()

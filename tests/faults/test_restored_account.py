"""A question that is asked again on other records, after its account was restored from a backup.

Account, head and everything beside them are as before the question, and the run id is the same one.
Nobody can notice that; but the noise of both answers is independent, so that their difference is
not the exact one, and on the same records the answer has the same bytes.
"""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import dpstream
from dpstream.dp_transforms import tuning
from dpstream.pipelines.tuning import choose
from tests import accounts
from tests.faults.systems import SYSTEMS, done
from tests.fixed import fixed_run_ids, held_noise
from tests.pipelines.frames.visits import KEY, account, visits
from tests.pipelines.sql.asking import COUNTED, answer_to, data_set, dp
from tests.pipelines.tabulation.oracle import published
from tests.pipelines.tuning.asking import ASK, PROJECT, USERS, records
from tests.pipelines.workload.survey import write

RUN = "5a" * 16
Figures = dict[tuple[Any, ...], float]


class Kind(NamedTuple):
    """A kind of question, in the current folder.

    Attributes:
        make: writes inputs, before the backup; add: more records, after it.
        ask: what is released but for its date, and figures whose exact difference is whole.
    """

    make: Callable[[Path], None]
    add: Callable[[], None]
    ask: Callable[[], tuple[bytes, Figures]]


def _key(folder: Path) -> None:
    (folder / "noise.secret").write_text(KEY)
    (folder / "noise.secret").chmod(0o600)


def _frame(folder: Path) -> None:
    folder.mkdir()
    _key(folder)
    pq.write_table(visits(), folder / "visits.parquet")


def _frame_asked() -> tuple[bytes, Figures]:
    table = pq.read_table("visits.parquet")
    answer = dpstream.count(table, unit="user", key="page", epsilon=1.0, max_rows=5, max_keys=8,
                           public_keys=[f"p{n}" for n in range(10)], **account(Path()))  # fmt: skip
    rows = answer.table.to_pylist()
    return json.dumps(rows).encode(), {(row["page"],): row["count"] for row in rows}


def _rows_added(name: str) -> None:
    table = pq.read_table(name)
    more = table.slice(0, 3).to_pylist()
    unit = next(column for column in ("user", "uid") if column in table.column_names)
    for number, row in enumerate(more):
        row[unit] = 10**6 + number
    pq.write_table(pa.concat_tables([table, pa.Table.from_pylist(more, table.schema)]), name)


def _sql(folder: Path) -> None:
    folder.mkdir()
    data_set(folder)


def _sql_asked() -> tuple[bytes, Figures]:
    answer = answer_to(Path(), dp(f"page, {COUNTED} AS n"))
    rows = answer.table.to_pylist()
    return json.dumps(rows).encode(), {(row["page"],): row["n"] for row in rows}


def _tuning(folder: Path) -> None:
    for name in ("in", "keys"):
        (folder / name).mkdir(parents=True)
    (folder / "in" / "a.csv").write_text(records(USERS))
    _key(folder / "keys")
    accounts.write(folder / "dpstream.toml", PROJECT)


def _tuning_added() -> None:
    with open("in/a.csv", "a") as file:
        file.write("someone,k1,2024-01-01T00:10:00Z,3\n")


def _tuning_asked() -> tuple[bytes, Figures]:
    drawn = list[Any]()

    def noisy(*args: Any) -> Any:
        drawn.extend(tuning.noisy(*args))
        return drawn

    with mock.patch.object(choose, "noisy", noisy):
        done("choose", "hourly", *ASK, "--as", "new")
    nodes = np.concatenate(drawn).tolist()
    return Path("dpstream.toml").read_bytes(), {(n,): node for n, node in enumerate(nodes)}


def _session(folder: Path) -> None:
    SYSTEMS["session"].make(folder)
    here = Path.cwd()
    os.chdir(folder)
    done(*SYSTEMS["session"].before[0])
    os.chdir(here)


def _session_added() -> None:
    Path("more.csv").write_text("name,a,b,epsilon,rho\nx1,0,2,2.0,0.5\nx2,1,2,2.0,0.5\n")
    done("session", "add", "small", "more.csv")


def _session_asked() -> tuple[bytes, Figures]:
    words = ("session", "ask", "small", "count", "sum(b)", "--by", "a=4", "--where")
    text = done(*words, "epsilon >= 1", "--epsilon", "0.01", "--json").stdout
    rows = json.loads(text)["rows"]
    counts = {(n,): row["values"]["count"] for n, row in enumerate(rows)}
    return json.dumps(rows).encode(), counts


def _survey(folder: Path) -> None:
    SYSTEMS["tables"].make(folder)
    job = folder / "dpstream.toml"  # with less epsilon, so that few of the noises are 0
    job.write_text(job.read_text().replace("epsilon = 6.0", "epsilon = 0.5", 1))
    write(folder / "pure.json", [{"factors": {"age": "range", "sex": "identity"}}])


def _survey_added() -> None:
    table = pq.read_table("records.parquet")
    more = table.slice(0, 40).to_pylist()
    for number, row in enumerate(more):
        row["user"] = 10**6 + number
    pq.write_table(pa.concat_tables([table, pa.Table.from_pylist(more, table.schema)]),
                   "records.parquet")  # fmt: skip


def _survey_asked(workload: str, option: str) -> Callable[[], tuple[bytes, Figures]]:
    def ask() -> tuple[bytes, Figures]:
        done("workload", "answer", workload, option, "--out", "out", "--cache", "cache")
        path = Path("out/answers.parquet")
        values = pq.read_table(path).column("value").to_pylist()
        return path.read_bytes(), {(n,): value for n, value in enumerate(values)}

    return ask


def _census_added() -> None:
    with open("data/person-records.txt") as file:
        rows = file.readlines()
    Path("data/person-records.txt").write_text("".join([*rows[:2], *rows[1:]]))


def _census_asked() -> tuple[bytes, Figures]:
    done(*SYSTEMS["census"].charge)
    files = sorted(Path("out").rglob("*.csv"))
    return b"".join(path.read_bytes() for path in files), dict(published(Path("out/t1")))


KINDS = {
    "frame": Kind(_frame, lambda: _rows_added("visits.parquet"), _frame_asked),
    "sql": Kind(_sql, lambda: _rows_added("visits.parquet"), _sql_asked),
    "tuning": Kind(_tuning, _tuning_added, _tuning_asked),
    "session": Kind(_session, _session_added, _session_asked),
    "workload, pure": Kind(_survey, _survey_added,
                           _survey_asked("pure.json", "--mechanism=geometric")),
    "workload, tables": Kind(_survey, _survey_added,
                             _survey_asked("tables.json", "--tables")),
    "census": Kind(SYSTEMS["census"].make, _census_added, _census_asked),
}  # fmt: skip


def moved(kind: Kind, folder: Path, *changes: bool) -> tuple[bool, Figures]:
    """Whether the same records have the same bytes, and what more records add to each figure.

    Args:
        changes: whether records are added before each question.
    """
    kind.make(folder / "here")
    shutil.copytree(folder / "here", folder / "backup")
    answers = []
    for changed in changes:
        os.chdir(folder)
        shutil.rmtree("here")
        shutil.copytree("backup", "here")
        os.chdir("here")
        if changed:
            kind.add()
        with fixed_run_ids(lambda: RUN):
            answers.append(kind.ask())
    (first, figures), (again, _), (_, more) = answers[0], answers[-2], answers[-1]
    both = figures.keys() & more.keys()
    return first == again, {name: more[name] - figures[name] for name in both}


@pytest.mark.parametrize("name", KINDS)
def test_noise_on_other_records_is_another(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for folder in ("named", "held"):
        (tmp_path / folder).mkdir()
    same, by = moved(KINDS[name], tmp_path / "named", False, False, True)
    assert same
    with held_noise():  # as if names had no digest: the exact difference comes out
        _, exact = moved(KINDS[name], tmp_path / "held", False, True)
    one, other = (np.array([of[key] for key in by.keys() & exact.keys()]) for of in (by, exact))
    assert np.abs(other - np.rint(other)).max() < 1e-6 and np.abs(other).max() >= 1
    assert len(one) and (np.abs(one - other) > 0.01).mean() > 0.4

"""What commands print by default is the same for two inputs that differ in private rows.

Each command runs on an input and on a neighbour that has one unit more and rows that are unusable.
Compared are stderr and ``--json`` as a scheduler keeps them: without ``--operator`` and without a
terminal, run ids, instants and released values masked.
"""

import ast
import json
import os
import pty
import re
import select
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import dpstream.pipelines.cli as commands
from dpstream.state import open as stores
from tests import accounts
from tests.growing import arrive, place
from tests.pipelines.cli.called import call, prepared
from tests.pipelines.sql.asking import COUNTED, data_set, dp, visits
from tests.pipelines.sql.shop import LOOKED_UP
from tests.pipelines.sql.shop import dp as streamed
from tests.pipelines.sql.shop import folder as visited
from tests.pipelines.tabulation.office import Office, office, project
from tests.pipelines.workload.survey import survey, write

#: What is released, or drawn anew in every run.
RELEASED = {"released", "rows", "answers", "nulls", "bounds", "run_id", "receipt", "answered",
            "contributions", "cut", "sd", "per_key", "busiest"}  # fmt: skip
Prepared = Callable[[Path, bool], list[str | Path]]


def run_job(folder: Path, more: bool) -> list[str | Path]:
    place(folder, kind="csv")
    arrive(folder, 1)
    if more:
        _append(folder / "in" / "day-0.csv", "7777,p1,2024-01-01 00:00:00Z,1\n" + "x,p,now,\n" * 5)
    return ["run", "--project", folder, "--through", "2024-01-02"]


def run_empty_job(folder: Path, more: bool) -> list[str | Path]:
    """Nothing is released: because no key is wide enough, or because every record is unusable."""
    args = run_job(folder, False)
    rows = "user,page,at,amount\n" + ("x,p,now,\n" * 5 if more else "1,p,2024-01-01 00:00:00Z,1\n")
    (folder / "in" / "day-0.csv").write_text(rows)
    return args


def run_statement(folder: Path, more: bool) -> list[str | Path]:
    project = visited(folder)
    if more:
        row = "u1,p0,2024-01-01T01:10:00Z,1.0,1,true,2024-01-01\n"
        _append(folder / "in" / "0.csv", row + ",p0,noon,NaN,many,?,\n" * 4)
    return ["sql", "--stream", "daily", streamed(LOOKED_UP), "--project", project]


def session_init(folder: Path, more: bool) -> list[str | Path]:
    table = prepared(folder)
    if more:
        _append(folder / "small.csv", "r90,0,1,1.0,0.5\nr91,none,1,1.0,0.5\nr92,0,0,nan,0.5\n")
    return ["table", "init", *table]


def session_add(folder: Path, more: bool) -> list[str | Path]:
    _done("table", "init", *(table := prepared(folder)))
    rows = "name,a,b,epsilon,rho\nr80,0,1,1.0,0.5\n"
    (folder / "more.csv").write_text(rows + "r81,0,1,1.0,0.5\nr0,0,1,1,1\nz,q,1,1,1\n" * more)
    return ["table", "change", *table, folder / "more.csv"]


def session_delete(folder: Path, more: bool) -> list[str | Path]:
    _done("table", "init", *(table := prepared(folder)))
    (folder / "gone.csv").write_text("name\nr1\n" + "r2\nnobody\n" * more)
    return ["table", "change", *table, folder / "gone.csv", "--delete"]


def tables(folder: Path, more: bool) -> list[str | Path]:
    made: Office = office(folder)
    _done("secret", "new", folder / "noise.secret")
    if more:
        _append(made.path("person-records.txt"), "200|1|True|01|001|000100|1000" + "|01" * 10)
    file = project(folder, made, secret="file:noise.secret")
    return ["census", "execute", "--project", file, "--out", folder / "out"]


def workload_once(folder: Path, more: bool) -> list[str | Path]:
    survey(folder, 500)
    if more:
        path = folder / "records.parquet"
        rows = pq.read_table(path)
        pq.write_table(pa.concat_tables([rows, rows.slice(0, 3)]), path)
    ranges = write(folder / "r.json", [{"factors": {"age": "range", "sex": "identity"}}])
    return ["workload", "answer", ranges, "--project", folder, "--mechanism=geometric", "--out",
            folder / "out", "--cache", folder / "cache"]  # fmt: skip


def workload_stream(folder: Path, more: bool) -> list[str | Path]:
    args = workload_once(folder, more)
    return [*(arg for arg in args if arg != "--mechanism=geometric"), "--over-time"]


def statement(folder: Path, more: bool) -> list[str | Path]:
    rows = visits()
    data_set(folder, pa.concat_tables([rows, rows.slice(0, 1)]) if more else rows)
    return ["sql", "--project", folder, dp(f"page, {COUNTED} AS n") + " ORDER BY page"]


def tuning(folder: Path, more: bool) -> list[str | Path]:
    text = (place(folder) / "dpstream.toml").read_text()
    account = 'account = { path = "l.db", limit = { epsilon = 900.0, delta = 0.1 } }\n'
    head = "[data_set.shop]\n"
    assert head in text
    accounts.write(folder / "dpstream.toml", text.replace(head, head + account))
    arrive(folder, 2 if more else 1)
    return ["choose", "--project", folder, "--first", "1d", "--epsilon", "20", "--delta", "1e-3",
            "--quantile", "0.9", "--as", "chosen"]  # fmt: skip


def store(folder: Path, more: bool) -> list[str | Path]:
    _done(*run_job(folder, more))
    return ["state", "info", "--project", folder]


def page(folder: Path, more: bool) -> list[str | Path]:
    _done(*run_job(folder, more))
    return ["report", "--project", folder, "--out", folder / "page.html"]


#: Of each command that reads private records: how it is called, and whether it counts them.
COMMANDS: list[tuple[Prepared, bool]] = [
    (run_job, True), (run_empty_job, True), (session_init, True), (session_add, True),
    (session_delete, True), (tables, False), (workload_once, False), (statement, False),
    (tuning, False),
]  # fmt: skip
LONGER = [(run_statement, True), (workload_stream, False), (store, False), (page, False)]


@pytest.mark.parametrize(
    ("prepare", "counts"), COMMANDS, ids=lambda of: getattr(of, "__name__", "")
)
def test_neighbours_print_the_same(prepare: Prepared, counts: bool, tmp_path: Path) -> None:
    outputs = [_printed(prepare, tmp_path, more) for more in (False, True)]
    assert outputs[0] == outputs[1]
    if counts:
        words, figures = _printed(prepare, tmp_path, True, "--operator")
        assert figures["operator_only"] and len(words) > len(outputs[1][0])


def test_json_has_no_counts_unless_asked(tmp_path: Path) -> None:
    args = run_job(tmp_path, True)
    assert "operator_only" not in json.loads(_done(*args, "--json"))
    again = json.loads(_done(*args, "--json", "--operator"))
    assert again["operator_only"]["records"]["read"] == 0  # it is all released already


def test_on_a_terminal_counts_are_shown(tmp_path: Path) -> None:
    """A real terminal as stderr; stdout is a pipe and has none of them."""
    args = [str(arg) for arg in session_init(tmp_path, True)]
    outer, inner = pty.openpty()
    command = [sys.executable, "-m", "dpstream", *args]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=inner, check=True)
    os.close(inner)
    terminal_text = b""
    while select.select([outer], [], [], 5)[0]:
        try:
            terminal_text += os.read(outer, 4096)
        except OSError:  # the terminal's other end is closed
            break
    os.close(outer)
    assert b"10 records, 7 usable" in terminal_text and b"records" not in done.stdout


def test_one_module_decides() -> None:
    """No other command prints for the operator by itself, or asks whether this is a terminal."""
    for path in Path(commands.__file__).parent.glob("*.py"):
        if path.name == "private_counts.py":
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                assert not node.value.lower().startswith("operator only"), path.name
            if isinstance(node, ast.Attribute) and node.attr == "isatty":
                assert "stderr" not in ast.unparse(node), path.name


def _printed(prepare: Prepared, tmp_path: Path, more: bool, *flags: str) -> tuple[str, Any]:
    """stderr of the command, and what its --json says, on a fresh folder of the same name."""
    folder, out = tmp_path / "data", list[Any]()
    for form in ((), ("--json",)):
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        result = call(*prepare(folder, more), *form, *flags)
        stores.close_all()
        assert result.exit_code == 0, result.output
        out.append(_masked(result.stderr))
        if form:
            return "".join(out), _without_values(json.loads(result.stdout))
    raise AssertionError


def _masked(text: str) -> str:
    text = re.sub(r"\b[0-9a-f]{12,64}\b", "ID", text)
    return re.sub(r"\d{4}-\d\d-\d\dT[\d:.+Z]+", "INSTANT", text)


def _without_values(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _without_values(v) for k, v in value.items() if k not in RELEASED}
    return [*map(_without_values, value)] if isinstance(value, list) else value


def _append(path: Path, text: str) -> None:
    with open(path, "a", encoding="utf-8") as file:
        file.write(text)


def _done(*args: str | Path) -> str:
    result = call(*args)
    stores.close_all()
    assert result.exit_code == 0, result.output
    return result.stdout

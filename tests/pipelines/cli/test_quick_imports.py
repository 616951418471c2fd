"""What a quick command may import: everything else is loaded by the command that needs it."""

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from dpstream.pipelines.jobs.secret import new_secret
from tests.bench.common import child_seconds

#: Beside the standard library and the project's own modules.
ALLOWED = {"click", "typing_extensions", "dpstream"}

#: What planning must not wait for: the runner, the compiler, statistics, a second accountant.
TOO_SLOW = (
    *("apache_beam", "numba", "llvmlite", "scipy.stats", "scipy.signal", "dp_accounting"),
    *("matplotlib", "grpc", "google.cloud", "dpstream.dp_transforms.noise.prf"),
)

#: What a plan and a first job do without besides: of SciPy the special functions are enough.
SCIPY = ("scipy.optimize", "scipy.fft", "scipy.linalg.interpolative")

PROJECT = """
version = 1

[data_set.site]
unit = { name = "user", type = "int" }
secret = "file:site.secret"

[table.records]
path = "records/*.parquet"
unit_column = "user"
time_column = "at"

[job.daily]
table = "records"
key = ["page"]
aggregate.count = { kind = "count" }
start = "2024-01-01T00:00:00Z"
end = "2024-02-01T00:00:00Z"
window = "1d"
release_every = "15m"
budget = { epsilon = 1.0, delta = 1e-8, covers = "lifetime" }
contributions = 8
sink = { kind = "parquet", path = "releases" }
"""

LOADED = """
import json, sys
before = set(sys.modules)
from dpstream.pipelines.cli.main import main
try:
    main()
except SystemExit:
    pass
print()
print(json.dumps(sorted(set(sys.modules) - before)))
"""


def loaded(arguments: list[str]) -> set[str]:
    """Modules that a command loads."""
    command = [sys.executable, "-c", LOADED, *arguments]
    out = subprocess.run(command, capture_output=True, text=True, check=True)
    return set(json.loads(out.stdout.splitlines()[-1]))


@pytest.mark.parametrize(
    "arguments",
    [
        ["--help"],
        ["plan", "--help"],
        ["sql", "--help"],
        ["census", "plan", "--help"],
        ["workload", "plan", "--help"],
        ["workload", "answer", "--help"],
    ],
)
def test_help_loads_no_library_that_works_on_data(arguments: list[str]) -> None:
    names = {name.partition(".")[0] for name in loaded(arguments)} - sys.stdlib_module_names
    public = {name for name in names if not name.startswith("_")}
    assert public <= ALLOWED
    assert {"click", "dpstream"} <= public


def test_a_plan_loads_neither_runner_nor_compiler(tmp_path: Path) -> None:
    (tmp_path / "dpstream.toml").write_text(PROJECT)
    new_secret(tmp_path / "site.secret")
    assert {*TOO_SLOW, *SCIPY} & (names := loaded(["plan", "--project", str(tmp_path)])) == set()
    assert {"dpstream.accounting.tuning.outlook", "scipy.special"} <= names


def test_a_plan_of_few_triggers_loads_neither_arrow_nor_linear_algebra(tmp_path: Path) -> None:
    """Encoders of up to 64 triggers are found without it."""
    assert '"15m"' in PROJECT
    (tmp_path / "dpstream.toml").write_text(PROJECT.replace('"15m"', '"1h"'))
    new_secret(tmp_path / "site.secret")
    names = loaded(["plan", "--project", str(tmp_path)])
    assert {"pyarrow", "scipy.linalg", "numba"} & names == set()
    assert "dpstream.accounting.strategies.dense" in names


def seconds(*arguments: str) -> float:
    """CPU seconds of a command in a process of its own, imports and all."""
    return spent("from dpstream.pipelines.cli.main import main; main()", *arguments)


def spent(code: str, *arguments: str) -> float:
    before = child_seconds()
    subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, check=True)
    return child_seconds() - before


def is_quick(*arguments: str, ratio: float, prepare: Callable[[], object] = lambda: None) -> bool:
    """Whether one of three calls takes at most so many times what it takes to load NumPy and
    SciPy's functions, which tells the speed of the machine at that time.

    Args:
        prepare: called before each.
    """
    for _ in range(3):
        prepare()
        if seconds(*arguments) < ratio * spent("import numpy, scipy.special"):
            return True
    return False


def test_a_plan_and_a_first_job_take_little_time(tmp_path: Path) -> None:
    """For imports and all they do: 0.6 CPU seconds each where NumPy and SciPy take 0.35."""
    from tests.pipelines.drafting import FLAGS, commits

    file, folder = str(commits(tmp_path / "a.parquet")), tmp_path / "project"

    def empty() -> None:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()

    first = ["init", file, *FLAGS, "--project", str(folder)]
    assert is_quick(*first, ratio=2.5, prepare=empty)
    assert is_quick("plan", "--project", str(folder), ratio=2.5)


def test_a_first_job_waits_for_neither(tmp_path: Path) -> None:
    from tests.pipelines.drafting import FLAGS, commits

    file = str(commits(tmp_path / "a.parquet"))
    names = loaded(["init", file, *FLAGS, "--project", str(tmp_path), "--public-sample"])
    assert {*TOO_SLOW, *SCIPY, "pandas"} & names == set()
    assert "dpstream.pipelines.drafting.draft" in names and (tmp_path / "dpstream.toml").exists()


def test_what_commands_hide_is_installed_for_the_doctor() -> None:
    """Pandas is part of the tests' environment."""
    command = [sys.executable, "-m", "dpstream", "doctor", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert json.loads(done.stdout)["extras"]["pandas"]["missing"] == []


#: What Beam, Arrow, numba and SciPy import, or would, and no job needs.
NOT_FOR_RUNS = {
    *("pandas", "pymongo", "IPython", "pyparsing", "requests"),
    *("google.pubsub_v1", "google.cloud.bigquery_storage_v1"),
    *("scipy.special._basic", "numpy.f2py", "numba.np.arraymath"),
}


def test_a_run_loads_what_a_run_needs(tmp_path: Path) -> None:
    from tests.pipelines.drafting import FLAGS, commits

    file, project = str(commits(tmp_path / "a.parquet")), ("--project", str(tmp_path))
    loaded(["init", file, *FLAGS, *project, "--public-sample"])
    loaded(["run", *project])  # compiles what is not on disk
    names = loaded(["run", *project, "--fresh"])
    assert NOT_FOR_RUNS & names == set()
    assert {"apache_beam.io", "numba", "scipy.special._ufuncs"} <= names


#: An answer waits for no runner, no compiler and no second accountant.
NOT_FOR_SQL_ALONE = {"pandas", "numba", "llvmlite"}
#: Sessions and tables draw from kernels, with the compiler.
NOT_FOR_ANSWERS = set(TOO_SLOW) - {"numba", "llvmlite", "dpstream.dp_transforms.noise.prf"}
#: Arrow would import pandas where it converts a number, if `main` did not hide it.
NOT_FOR_SQL = NOT_FOR_ANSWERS | NOT_FOR_SQL_ALONE


def test_sql_asks_without_runner_and_second_accountant(tmp_path: Path) -> None:
    from tests.pipelines.sql.asking import COUNTED, data_set, dp

    lists = "MEDIAN(seconds, contribution_bounds_per_row => (0, 100)) AS m, VAR(n) AS v"
    groups = "page, CAST(n AS NUMERIC) > 3 AS b, DATE_ADD(DATE '2024-01-01', INTERVAL n DAY) AS d"
    text = dp(f"{groups}, {COUNTED} AS c, AVG(n) AS a, {lists}", "FROM visits GROUP BY page, b, d")
    words = ["sql", "--project", str(data_set(tmp_path)), text]
    explained, modules = loaded([*words, "--explain"]), loaded(words)
    assert NOT_FOR_SQL & (explained | modules) == set()
    assert {"duckdb", "dpstream.dp_transforms.one_shot"} <= modules


def test_points_are_asked_without_runner_pictures_and_second_accountant(tmp_path: Path) -> None:
    from tests.pipelines.cli import called as sessions

    table = sessions.loaded(tmp_path)
    options = "SELECT WITH DIFFERENTIAL_PRIVACY OPTIONS(epsilon = 1)"
    text = f"{options} COUNT(*) AS n FROM small WHERE epsilon >= 1"
    names = loaded(["sql", text, *table[1:]])
    assert (NOT_FOR_ANSWERS | {"matplotlib"}) & names == set()
    assert {"duckdb", "dpstream.pipelines.session.records.scan"} <= names


def test_a_plan_of_tables_loads_neither_runner_nor_compiler(tmp_path: Path) -> None:
    from tests.pipelines.tabulation.office import office, project

    given = ["--project", str(project(tmp_path, office(tmp_path)))]
    for command in (["plan", *given], ["plan", *given, "--faults"]):
        names = loaded(["census", *command])
        assert set(TOO_SLOW) & names == set()
        assert {"pyarrow", "dpstream.pipelines.tabulation.inputs"} <= names


def test_tables_are_made_without_a_runner(tmp_path: Path) -> None:
    from tests.pipelines.tabulation.office import office, project

    new_secret(tmp_path / "noise.secret")
    file = project(tmp_path, office(tmp_path), secret="file:noise.secret")
    command = ["census", "execute", "--project", str(file), "--out", str(tmp_path / "out")]
    names = loaded(command)
    assert NOT_FOR_ANSWERS & names == set() and (tmp_path / "out" / "manifest.json").exists()


def test_a_plan_of_a_workload_loads_neither_runner_nor_compiler(tmp_path: Path) -> None:
    from tests.pipelines.workload.survey import write

    file = str(write(tmp_path / "w.json"))
    for command in (["--mu", "1"], ["--mu", "1"], ["--epsilon", "1", "--delta", "1e-8"]):
        names = loaded(["workload", "plan", file, *command, "--cache", str(tmp_path / "c")])
        assert set(TOO_SLOW) & names == set()
        assert {"numpy", "dpstream.pipelines.workload.planning"} <= names

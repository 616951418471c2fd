"""What each kind of question releases, under a test key and fixed run ids, by its public interface.

One function a kind asks all its cases in an empty folder and gives the text of each: rows with all
their digits, or the files of a folder.  A kind that runners can answer takes a runner's flags; they
change no byte.
"""

import hashlib
import itertools
import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import scipy.special
from click.testing import CliRunner

import dpstream
from dpstream.dp_transforms.noise.secret_source import SecretSource
from dpstream.pipelines.cli.main import cli
from tests import accounts
from tests.fixed import fixed_run_ids
from tests.golden.pinned import digest, of_files, of_rows
from tests.pipelines.frames import visits as frames
from tests.pipelines.session import tables as small
from tests.pipelines.sql import asking
from tests.pipelines.tabulation.office import office, project
from tests.pipelines.tuning import asking as tuning
from tests.pipelines.workload import survey

KEY = "3f7a91c4d2e85b60718293a4b5c6d7e8f90a1b2c3d4e5f60718293a4b5c6d7e8"
Cases = dict[str, str]


class Kind(NamedTuple):
    """One kind of question.

    Attributes:
        ask: (folder, flags of a runner) -> released text by case.
        runners: whether workers of a runner can answer.
        solved: its figures come from matrices that are solved in floats, whose last bits depend on
            the processor: compared where the processor computes as the one that wrote the file.
    """

    ask: Callable[[Path, Sequence[str]], Cases]
    runners: bool = False
    solved: bool = False


def processor() -> str:
    """A digest of what this processor makes of some sums, logarithms, and a matrix's inverse."""
    at = np.linspace(0.1, 9.7, 203)
    matrix = np.tril(np.ones((13, 13))) + np.diag(at[:13])
    product = matrix @ matrix.T
    parts = [np.exp(-at), np.log(at), scipy.special.log_ndtr(-at), scipy.special.ndtri(at / 10)]
    parts += [product, np.linalg.inv(matrix), np.linalg.eigvalsh(product)]
    return digest(b"".join(np.asarray(part, "<f8").tobytes() for part in parts))


@contextmanager
def _run_ids_of(case: str) -> Iterator[None]:
    """A case's own run ids, however many other cases draw."""
    numbers = itertools.count(1)
    draw = lambda: hashlib.sha256(f"{case} {next(numbers)}".encode()).hexdigest()[:32]  # noqa: E731
    with fixed_run_ids(draw):
        yield


def _call(case: str, *args: Any) -> str:
    """What a command prints."""
    silent = mock.patch("dpstream.pipelines.cli.main.silence")
    with silent, _run_ids_of(case):
        result = CliRunner().invoke(cli, [str(arg) for arg in args])
    assert result.exit_code == 0, result.output
    return result.stdout


def _rows(case: str, *args: Any) -> str:
    """The rows that a command answers."""
    return of_rows(json.loads(_call(case, *args, "--json"))["rows"])


# --- DataFrames ------------------------------------------------------------------------------


def of_frames(folder: Path, _: Sequence[str]) -> Cases:
    """Functions on a table, charged in an account."""
    place = accounts.create(folder / "ledger.db", "visits", (100.0, 1e-5), type_="int")
    account = dpstream.account(place.path, "visits", id=place.id, secret=SecretSource(None, KEY))
    of: dict[str, Any] = {
        "unit": "user", "epsilon": 4.0, "account": account,
    }  # fmt: skip
    by_page, given = {"key": "page"}, {"max_keys": 3, "max_rows": 2}
    geometric = {"max_keys": 2, "mechanism": "geometric"}
    listed = {"public_keys": [f"p{n}" for n in range(3, 13)]}
    seconds: dict[str, Any] = {"value": "seconds"}
    bounds = {"bounds": (0, 80)}
    cases: dict[str, tuple[Any, dict[str, Any]]] = {
        "histogram": (dpstream.histogram, by_page),
        "histogram, max_keys given": (dpstream.histogram, by_page | {"max_keys": 3}),
        "histogram, public keys": (dpstream.histogram, by_page | listed),
        "count": (dpstream.count, {}),
        "count by key": (dpstream.count, by_page),
        "count by key, bounds given": (dpstream.count, by_page | given),
        "count, public keys, pure": (dpstream.count, by_page | listed | given | {"delta": 0}),
        "histogram, geometric": (dpstream.histogram, by_page | geometric),
        "sum, chosen bounds": (dpstream.sum, by_page | seconds),
        "sum, bounds given": (dpstream.sum, by_page | seconds | bounds | given),
        "mean, chosen bounds": (dpstream.mean, seconds),
        "mean by key, bounds given": (dpstream.mean, by_page | seconds | bounds | given),
    }
    table, out = frames.visits(), {}
    for case, (ask, arguments) in cases.items():
        with _run_ids_of(case):
            out[case] = of_rows(ask(table, **of, **arguments).table.to_pylist())
    return out


# --- SQL -------------------------------------------------------------------------------------

_BY_PAGE = "FROM visits GROUP BY page"
_EPSILON_8 = "epsilon = 8, delta = 1e-9, max_groups_contributed = 4"
STATEMENTS = {
    "selection": asking.dp(asking.ALL, options=_EPSILON_8),
    "selection, chosen bounds": asking.dp(
        "page, COUNT(*) AS n, SUM(seconds) AS s, AVG(seconds) AS a", options=_EPSILON_8
    ),
    "quantiles": asking.dp(
        "APPROX_QUANTILES(seconds, 4, contribution_bounds_per_row => (0, 100)) AS q",
        "FROM visits", "epsilon = 8, delta = 1e-9",
    ),
    "public groups": asking.dp(
        "pages.page, COUNT(DISTINCT uid) AS u, AVG(seconds, contribution_bounds_per_group => "
        "(0, 100)) AS a",
        "FROM visits RIGHT OUTER JOIN (SELECT DISTINCT page FROM pages) AS pages "
        "ON visits.page = pages.page GROUP BY pages.page",
        _EPSILON_8 + ", group_selection_strategy = PUBLIC_GROUPS",
    ),
    "join and outer query": "SELECT title, n, n > 100 AS many FROM (" + asking.dp(
        f"title, {asking.COUNTED} AS n",
        "FROM visits JOIN pages ON visits.page = pages.page GROUP BY title", _EPSILON_8,
    ) + ") WHERE n > 0 ORDER BY n DESC LIMIT 2",
    "geometric": asking.dp(
        f"page, {asking.COUNTED} AS n", options=_EPSILON_8 + ", mechanism = GEOMETRIC"
    ),
}  # fmt: skip


def of_sql(folder: Path, runner: Sequence[str]) -> Cases:
    """Statements on a data set of a private and a public table."""
    ask = ("sql", "--project", asking.data_set(folder))
    return {case: _rows(case, *ask, text, *runner) for case, text in STATEMENTS.items()}


# --- sessions --------------------------------------------------------------------------------


def of_session(folder: Path, runner: Sequence[str]) -> Cases:
    """Questions of a table whose records have budgets of their own, one after the other."""
    rows = [f"r{n},{n % 5},{n * n % 11},{(n % 8 + 1) / 4},{(n % 4 + 1) / 4}" for n in range(800)]
    small.small_config_at(folder, "name,a,b,epsilon,rho\n" + "\n".join(rows) + "\n")
    cases = {
        "all points": ("epsilon = 0.25", "COUNT(*) AS n", "WHERE epsilon >= 0.25"),
        "grid": (
            "epsilon = 0.5, drop = TRUE", "a, RANGE_BUCKET(b, [5]) AS r, COUNT(*) AS n",
            "WHERE b IS NOT NULL GROUP BY a, r",
        ),
        "several figures of two boxes": (
            "epsilon = 0.5, drop = TRUE",
            "SUM(b) AS s, AVG(b) AS m, MEDIAN(b) AS med, PERCENTILE_CONT(b, 0.25) AS q",
            "WHERE a = 0 OR b >= 7",
        ),
        "what is left of each budget": (
            "epsilon = 0.75, drop = TRUE", "a, COUNT(*) AS n", "GROUP BY a",
        ),
        "rho": ("rho = 0.25, drop = TRUE", "a, COUNT(*) AS n, AVG(b) AS m", "GROUP BY a"),
    }  # fmt: skip
    return {
        case: _rows(
            case, "sql", "--project", folder,
            f"SELECT WITH DIFFERENTIAL_PRIVACY OPTIONS({options}) {items} FROM small {more}",
            *runner,
        )
        for case, (options, items, more) in cases.items()
    }  # fmt: skip


# --- tuning ----------------------------------------------------------------------------------


def of_tuning(folder: Path, _: Sequence[str]) -> Cases:
    """The jobs that are chosen."""
    (folder / "in").mkdir()
    (folder / "in" / "a.csv").write_text(tuning.records(tuning.USERS))
    (folder / "keys").mkdir()
    key = folder / "keys" / "noise.secret"
    key.write_text(KEY)
    key.chmod(0o600)
    file = folder / "dpstream.toml"
    tuning.write(file, ("epsilon = 3.0", "epsilon = 50.0"))
    cases = {
        "the noise of keys": ["--epsilon", "4"],
        "quantile": ["--epsilon", "4", "--quantile", "0.9"],
        "cover and clamps": ["--epsilon", "8", "--cover", "0.95", "--bounds"],
    }
    out = {}
    for number, (case, options) in enumerate(cases.items()):
        before = file.read_text()
        words = ("choose", "hourly", "--project", folder, "--as", f"chosen{number}")
        _call(case, *words, "--first", "12h", *options)
        assert file.read_text().startswith(before)
        out[case] = file.read_text().removeprefix(before).lstrip("\n")
    return out


# --- census tables ---------------------------------------------------------------------------


def _tabulated(folder: Path, program: str, names: Sequence[str], runner: Sequence[str]) -> Cases:
    """The folders of two executions of one program."""
    made = office(folder)
    config = json.loads(made.path("config.json").read_text())
    thresholds = f"thresholds_{program}"
    if program == "p":  # every detail is reached in a small office
        made.configure(**{thresholds: {label: [4, 20, 60] for label in config[thresholds]}})
    key = folder / "noise.secret"
    key.write_text(KEY)
    key.chmod(0o600)

    def execute(case: str, name: str, limit: tuple[float, float] | None, noise: str) -> Path:
        out, own = folder / case.replace(" ", "-"), program if limit else "p"
        file = project(
            folder, made, name=name, secret=f"file:{key}", limit=limit, program=own, noise=noise
        )
        _call(case, "census", "execute", "--project", file, "--out", out, *runner)
        return out

    if program == "h":
        persons = execute("persons for households", "persons", None, "census")
        shutil.copytree(persons / "t1", made.data / "pop-group-totals.txt")
    name, limit = {"p": "persons", "h": "households"}[program], (200.0, 1e-9)
    noises = {"census noise": "census", "rounded noise": "rounded"}
    return {
        case: of_files(execute(case, name, limit, noise), names) for case, noise in noises.items()
    }


def of_census_persons(folder: Path, runner: Sequence[str]) -> Cases:
    """Tables of persons."""
    return _tabulated(folder, "p", ("t1/state-1-000.csv", "t2/state-1-000.csv"), runner)


def of_census_households(folder: Path, runner: Sequence[str]) -> Cases:
    """Tables of households."""
    return _tabulated(
        folder, "h", ("t3/T03001/state-1-000.csv", "t4/T04001/state-1-000.csv"), runner
    )


# --- workloads -------------------------------------------------------------------------------

_RANGES = [{"factors": {"age": "range", "sex": "identity"}}]
WORKLOADS: dict[str, tuple[list[Any], list[str]]] = {
    "mixed Gaussian noise": (survey.QUERIES, ["--strategy", "eigen"]),
    "over time, not negative": (
        _RANGES, ["--strategy", "identity", "--over-time", "--nonnegative"],
    ),
    "pure": (_RANGES, ["--mechanism=geometric"]),
    "tables": ([{"ways": 2}, {"ways": 1}, {"factors": {}}], ["--tables"]),
}  # fmt: skip


def of_workloads(folder: Path, runner: Sequence[str]) -> Cases:
    """Folders of answers."""
    out = {}
    for number, (case, (queries, options)) in enumerate(WORKLOADS.items()):
        own = folder / str(number)
        survey.survey(own)
        workload, answers = survey.write(own / "asked.json", queries), own / "answers"
        once = {"--mechanism=geometric", "--tables"} & set(options)
        _call(
            case, "workload", "answer", workload, "--project", own, "--out", answers, "--format",
            "csv", "--cache", folder / "cache", "--quiet", *options, *([] if once else runner),
        )  # fmt: skip
        out[case] = of_files(answers, ["answers.csv"])
    return out


#: By the name of the golden file.
KINDS = {
    "frames": Kind(of_frames),
    "sql": Kind(of_sql, runners=True),
    "session": Kind(of_session, runners=True),
    "tuning": Kind(of_tuning, solved=True),
    "census_persons": Kind(of_census_persons, runners=True),
    "census_households": Kind(of_census_households, runners=True),
    "workloads": Kind(of_workloads, solved=True),
}

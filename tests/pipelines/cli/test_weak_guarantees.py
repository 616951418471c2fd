"""A guarantee that promises little is warned of by every system, in text and in JSON; a delta that
lets many units be revealed is refused before anything is charged, unless somebody wants it."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import dpstream
from dpstream.accounting.errors import PolicyError
from dpstream.accounting.strength import WeakGuaranteeWarning
from dpstream.pipelines.jobs.job import Job, load_job
from dpstream.pipelines.jobs.secret import new_secret
from dpstream.state import open as stores
from dpstream.state.ledger.open import PROJECT_FILE
from tests import accounts
from tests.pipelines.cli import called as sessions
from tests.pipelines.cli.called import call, refused
from tests.pipelines.cli.mistakes import visits, with_account
from tests.pipelines.sql.asking import COUNTED, charges, data_set, dp
from tests.pipelines.tabulation.office import SIZE, office, project
from tests.pipelines.workload.survey import survey, write

WEAK = "promises little"


@pytest.fixture(autouse=True)
def _closed() -> Iterator[None]:
    yield
    stores.close_all()


def of_json(*args: str | Path) -> list[str]:
    """The warnings of a command's JSON."""
    done = call(*args, "--json")
    assert done.exit_code == 0, done.output
    warnings: list[str] = json.loads(done.stdout.splitlines()[-1])["warnings"]
    return warnings


@pytest.fixture
def place(tmp_path: Path) -> Callable[..., Path]:
    """A project file with a job on real visits, in which parts are changed."""
    pa.parquet.write_table(visits(), tmp_path / "visits.parquet")
    new_secret(tmp_path / "noise.secret")

    def write(*changes: tuple[str, str]) -> Path:
        text = with_account(10.0, delta=1e-4)
        for old, new in changes:
            assert old in text
            text = text.replace(old, new)
        accounts.write(tmp_path / "dpstream.toml", text)
        return tmp_path / "dpstream.toml"

    return write


EPSILON, DELTA = ("epsilon = 6.0", "epsilon = 12.0"), ("delta = 1e-6", "delta = 0.02")
_REST = ', covers = "lifetime" }\n'
ALLOWED = (
    f"delta = 1e-6{_REST}", f"delta = 0.02{_REST}mechanism.allow_large_delta = true\n",
)  # fmt: skip
LIMIT = "limit = { epsilon = 10.0, delta = 0.0001 }"
#: Limits that are warned of; `account create` and `account limit` refuse the second unasked.
WIDE = (LIMIT, "limit = { epsilon = 100.0, delta = 1e-4 }")
ROOM = (LIMIT, "limit = { epsilon = 30.0, delta = 1e-4 }")
WANTED = (LIMIT, "limit = { epsilon = 10.0, delta = 0.5 }")


def test_streams(place: Callable[..., Path], tmp_path: Path) -> None:
    project = ("--project", place())
    assert not any(WEAK in w for w in of_json("plan", *project))
    place(EPSILON, ROOM)
    assert WEAK in call("plan", *project).stdout
    assert any(WEAK in w for w in of_json("plan", *project))
    place(EPSILON, WIDE)
    done = call("run", *project, "--quiet")
    assert done.exit_code == 0 and done.stderr.count(WEAK) == 2
    assert sum(WEAK in w for w in of_json("run", *project, "--quiet")) == 2
    assert WEAK not in call("run", *project, "--quiet").stderr  # nothing is charged again
    assert call("run", *project, "--quiet", "--fresh").stderr.count(WEAK) == 2


def test_a_large_delta_of_a_job(place: Callable[..., Path], tmp_path: Path) -> None:
    project = ("--project", place(DELTA))
    for command in ("plan", "run", "choose"):
        more = ("--dry-run", "--first", "1d", "--epsilon", "1") if command == "choose" else ()
        assert "allow_large_delta" in refused(command, *project, *more, code=3)
    assert accounts.charges(tmp_path / "ledger.db") == []
    allowed = load_job(place(ALLOWED, WANTED)).plan
    assert sum(WEAK in w for w in of_json("plan", *project)) == 2
    assert allowed.hash != load_job(place()).plan.hash
    place(ALLOWED, WANTED)
    assert call("run", *project, "--quiet").exit_code == 0


def test_the_limit_of_a_job(place: Callable[..., Path]) -> None:
    """The limit is the guarantee of all runs together: it is judged as that of one run is."""
    for changed in (WIDE, WANTED):
        project = ("--project", place(changed))
        assert sum(WEAK in w for w in of_json("plan", *project)) == 1
        assert call("plan", *project).stdout.count(WEAK) == 1
        choose = ("choose", *project, "--dry-run", "--first", "1d", "--epsilon", "1")
        assert sum(WEAK in w for w in of_json(*choose)) == 1
    # The switch of a job is about its own runs alone.
    large = ("account", "limit", "--project", place(ALLOWED), "--epsilon", "9", "--delta", "0.5")
    assert "--allow-large-delta" in refused(*large, code=3)


def test_tuning(place: Callable[..., Path], tmp_path: Path) -> None:
    ask = ("choose", "--project", place(), "--first", "1d", "--dry-run")
    assert of_json(*ask, "--epsilon", "1") == []
    place(WIDE)
    assert len(of_json(*ask, "--epsilon", "12")) == 2  # and the limit's
    assert call(*ask, "--epsilon", "12").stdout.count(WEAK) == 2
    assert "allow_large_delta" in refused(*ask, "--epsilon", "1", "--delta", "0.02", code=3)
    place(ALLOWED, WANTED)
    assert len(of_json(*ask, "--epsilon", "1", "--delta", "0.02")) == 2  # and the limit's


def test_sql(tmp_path: Path) -> None:
    project = ("--project", data_set(tmp_path))
    text = (
        "SELECT WITH DIFFERENTIAL_PRIVACY OPTIONS({}, max_groups_contributed = 2) "
        f"page, {COUNTED} AS n FROM visits GROUP BY page"
    )
    weak = text.format("epsilon = 12, delta = 1e-9")
    for explained in ((*project, weak, "--explain"), (*project, f"EXPLAIN {weak}")):
        assert WEAK in call("sql", *explained).stdout
        done = call("sql", *explained, "--json")
        assert len(json.loads(done.stdout)["statements"][0]["warnings"]) == 1
    large = text.format("epsilon = 1, delta = 0.02")
    assert "large-delta" in refused("sql", *project, large, code=3)
    assert "large-delta" in refused("sql", *project, large, "--explain", code=3)
    assert charges(tmp_path) == []
    wanted = text.format("epsilon = 1, delta = 0.02, allow_large_delta = TRUE")
    [statement] = json.loads(call("sql", *project, wanted, "--explain", "--json").stdout)[
        "statements"
    ]
    assert len(statement["warnings"]) == 1
    no_choice = text.format("epsilon = 1, delta = 0.02, allow_large_delta = 1")
    assert "allow-large-delta" in refused("sql", *project, no_choice)


def test_sql_answers(tmp_path: Path) -> None:
    project = ("--project", data_set(tmp_path, epsilon=10))
    text = (
        "SELECT WITH DIFFERENTIAL_PRIVACY OPTIONS(epsilon = 2, delta = 1e-3, "
        f"max_groups_contributed = 2) page, {COUNTED} AS n FROM visits GROUP BY page"
    )
    accounts.set_limit(tmp_path / "ledger.db", (10.0, 1e-2))
    done = call("sql", *project, text)
    assert done.exit_code == 0, done.output
    assert done.stderr.count(WEAK) == len(of_json("sql", *project, text)) == 1
    assert WEAK not in call("sql", *project, text).stderr
    assert WEAK in call("sql", *project, text, "--fresh").stderr


def test_the_limit_of_an_account(tmp_path: Path) -> None:
    project = ("--project", data_set(tmp_path, epsilon=10))
    ask = (*project, dp(f"page, {COUNTED} AS n"))
    show = ("account", "show", *project)
    assert of_json("sql", *ask, "--explain") == of_json(*show) == []
    accounts.set_limit(tmp_path / "ledger.db", (10.0, 0.5))
    assert len(of_json("sql", *ask, "--explain")) == len(of_json(*show)) == 1
    for args in (("sql", *ask, "--explain"), show):
        assert call(*args).stdout.count(WEAK) == 1


@pytest.mark.parametrize("kind", ["histogram", "count"])
def test_frames(kind: str) -> None:
    def ask(**given: Any) -> Any:
        return getattr(dpstream, kind)(visits(), unit="user", key="page", **given)

    with pytest.warns(WeakGuaranteeWarning, match=WEAK) as caught:
        ask(epsilon=12.0)
    assert caught[0].filename == __file__  # the line of whoever asks
    with pytest.warns(WeakGuaranteeWarning, match="one unit in 50"):
        ask(epsilon=1.0, delta=0.02, allow_large_delta=True)
    with pytest.raises(PolicyError) as error:
        ask(epsilon=1.0, delta=0.02)
    assert "allow_large_delta=True" in error.value.fix


def test_frames_are_refused_before_a_charge(tmp_path: Path) -> None:
    place = accounts.create(tmp_path / "l.db", "visits", (4.0, 1e-4))
    account = dpstream.account(
        place.path, "visits", id=place.id, secret=f"file:{tmp_path / 'noise.secret'}"
    )
    new_secret(tmp_path / "noise.secret")
    with pytest.raises(PolicyError, match="delta"):
        dpstream.histogram(
            visits(), unit="user", key="page", epsilon=1.0, delta=0.02, account=account,
        )  # fmt: skip
    assert accounts.charges(place.path) == []


def test_pipelines_of_python(make_job: Callable[..., Job], place: Callable[..., Path]) -> None:
    with pytest.warns(WeakGuaranteeWarning, match=WEAK):
        dpstream.DPStream(load_job(place(EPSILON)))


def test_sessions(tmp_path: Path) -> None:
    table = sessions.loaded(tmp_path)
    head = "SELECT WITH DIFFERENTIAL_PRIVACY OPTIONS(epsilon = {}) COUNT(*) AS n FROM small"
    ask = ("sql", *table[1:], "--explain")
    assert of_json(*ask, f"{head.format(1)} WHERE epsilon >= 1") == []
    weak = call(*ask, f"{head.format(12)} WHERE epsilon >= 1", "--json")  # refused, and warned of
    assert weak.exit_code == 3 and len(json.loads(weak.stdout)["warnings"]) == 1
    large = tmp_path / "large"
    large.mkdir()
    wide, file = sessions.prepared(large), large / PROJECT_FILE
    assert "most = 2.0" in file.read_text()
    file.write_text(file.read_text().replace("most = 2.0", "most = 12.0"))
    assert len(of_json("table", "init", *wide)) == 1
    statement = ("sql", *wide[1:], f"{head.format(1)} WHERE a = 0 AND epsilon >= 1")
    assert WEAK in call(*statement).stderr
    assert len(of_json(*statement)) == 1


def test_census_tables(tmp_path: Path) -> None:
    made = office(tmp_path, SIZE)
    new_secret(tmp_path / "noise.secret")
    given = ("--project", project(tmp_path, made, secret="file:noise.secret"))
    plan = ("census", "plan", *given)
    assert len(of_json(*plan)) == 1 and WEAK in call(*plan).stdout  # production's budgets
    assert "allow-large-delta" in refused(*plan, "--delta", "0.02", code=3)
    assert call(*plan, "--delta", "0.02", "--allow-large-delta").exit_code == 0
    out = ("census", "execute", *given, "--out", tmp_path / "out")
    assert WEAK in call(*out).stderr
    assert WEAK not in call(*out).stderr
    assert len(of_json(*out)) == 1
    project(tmp_path, made, secret="file:noise.secret", limit=(30.0, 0.02))
    assert call(*plan).stdout.count(WEAK) == 3
    accounts.set_limit(tmp_path / "persons.account.db", (30.0, 1e-9))
    assert call(*plan).stdout.count(WEAK) == 2


def test_workloads(tmp_path: Path) -> None:
    survey(tmp_path, 300)
    workload, cache = tmp_path / "asked.json", ("--cache", tmp_path / "cache")
    plan = ("workload", "plan", workload, *cache)
    assert of_json(*plan, "--epsilon", "1", "--delta", "1e-8") == []
    assert len(of_json(*plan, "--epsilon", "12", "--delta", "1e-8")) == 1
    assert len(of_json(*plan, "--mu", "4")) == 1
    ranges = write(tmp_path / "ranges.json", [{"factors": {"age": "range", "sex": "identity"}}])
    assert (
        len(of_json("workload", "plan", ranges, *cache, "--mechanism=geometric", "--epsilon", "12"))
        == 1
    )
    large = (*plan, "--epsilon", "1", "--delta", "0.02")
    assert "allow-large-delta" in refused(*large, code=3)
    assert len(of_json(*large, "--allow-large-delta")) == 1
    job = tmp_path / "dpstream.toml"
    text = job.read_text()
    weak = text.replace("epsilon = 6.0", "epsilon = 12.0", 1)
    assert weak != text
    accounts.write(job, weak)
    answer = ("workload", "answer", workload, "--project", job, *cache, "--out")
    done = call(*answer, tmp_path / "out")
    assert done.exit_code in (0, 3), done.output
    assert done.stderr.count(WEAK) == 2  # of the job and of its ledger's limit
    assert WEAK not in call(*answer, tmp_path / "out").stderr
    again = (*answer, tmp_path / "again")
    assert len(of_json(*again, "--dry-run", "--fresh")) == 1

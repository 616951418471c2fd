"""Questions of a tuning before a record is read, and what `dpstream check` holds of its answer."""

import gzip
import json
import re
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest

from dpstream.accounting.errors import UsageError
from dpstream.accounting.fields import Aggregate
from dpstream.pipelines.jobs.job import load_job
from dpstream.pipelines.project.copying import append_section, check_new_name
from dpstream.pipelines.project.job_section import ChoiceSection
from dpstream.pipelines.project.project import Project, load_project
from dpstream.pipelines.stream.begin import begin
from dpstream.pipelines.tuning.ask import (
    Request,
    ask,
    base_job,
    in_column_units,
    render,
)
from dpstream.state.ledger.contract import AnswerLog, Ledger
from dpstream.state.sqlite.database import sqlite3
from tests import accounts
from tests.golden.pinned import check, of_refusals, refusal
from tests.golden.refusals import Refused
from tests.pipelines.tuning.asking import (  # noqa: F401
    ASK,
    PROJECT,
    account,
    call,
    choose,
    closed,
    done,
    entries,
    jobs,
    load,
    pairs_of,
    project_file,
    records,
    write,
)
from tests.projects import write_project

BOUNDS = ", bounds = [0, 120]"
MEAN = f'aggregate.seconds = {{ kind = "mean", column = "seconds"{BOUNDS} }}\n'


@pytest.mark.parametrize("grid", [1.0, 0.1, 0.01, 0.3, 1e-6, 0.7, 0.25, 2.0**-24, 2.0**-30])
@pytest.mark.parametrize(
    ("low", "high"),  # the last: the nearest float lies inside
    [(-7, 13), (0, 1), (-3_333_333, 10**7), (-835_840_887_170_031, 902_871_036_464_559)],
)
def test_bounds_snap_back_to_their_grid_units(grid: float, low: int, high: int) -> None:
    bounds = in_column_units(low, high, grid)
    made = Aggregate("x", "sum", "x", bounds=bounds, grid=grid)
    assert made.grid_bounds() == (low, high)


@pytest.mark.parametrize("layout", ["lines", "tables", "inline"])
def test_what_was_chosen_is_read_back_however_the_job_is_written(
    layout: str, tmp_path: Path
) -> None:
    """The file keeps every byte, the new section the comments; store and folder are its own."""
    changes = {
        "lines": [("key = ", "# mine\nkey = ")],
        "tables": [
            ('aggregate.views = { kind = "count" }\n', "# mine\n"),
            (MEAN, ""),
            ('sink = { kind = "parquet", path = "releases" }\n',
             '[job.daily.sink]\nkind = "parquet"\npath = "releases"\n'
             '[job.daily.aggregate.views]\nkind = "count"\n'
             '[job.daily.aggregate.seconds]\nkind = "mean"\ncolumn = "seconds"\n'),
        ],
        "inline": [("contributions = 8\n", 'contributions = 8  # mine\nstore = "a/daily.db"\n')],
    }[layout]  # fmt: skip
    path = write_project(tmp_path, *changes)
    before = path.read_bytes()
    choice = ChoiceSection("proxy", bounds=("seconds",))
    project = load_project(path)
    text, section = render(project, "daily", "chosen", 9, (("seconds", 0, 5),), choice)
    append_section(project, "chosen", text, section, "--as")
    assert path.read_bytes().startswith(before) and section.count("# mine") == 1
    made, old = load_job(path, "chosen"), load_project(path).sections.job["daily"]
    assert made.plan.privacy.contributions == 9 and made.section.choice == choice
    assert made.plan.aggregates[1].bounds == (0, 5)
    assert made.state.store == f"sqlite:{tmp_path}/chosen.store.db"
    assert made.sink.path == f"{tmp_path}/releases-chosen" and old["contributions"] == 8


def test_missing_bounds_come_from_a_declared_range(tmp_path: Path, refused: Refused) -> None:
    project = load_project(write_project(tmp_path))
    assert base_job(project, "daily", False)[1] == ()
    job, names = base_job(project, "daily", True)
    assert names == ("seconds",) and job.plan.privacy.contributions == 1
    assert project.sections.job["daily"]["contributions"] == 8, "the project stays as it is"
    missing = load_project(write_project(tmp_path, (BOUNDS, "")))
    refused(base_job, missing, "daily", False)


def test_a_new_job_takes_no_others_place(tmp_path: Path) -> None:
    project = load_project(path := write_project(tmp_path))
    check_new_name(project, "new", "--as")
    for name in ("daily", "a b"):
        assert refusal(check_new_name, project, name, "--as") == "UsageError --as"
    choice = ChoiceSection("proxy")
    for _ in range(2):  # the same again is left alone
        text, section = render(load_project(path), "daily", "new", 9, (), choice)
        append_section(load_project(path), "new", text, section, "--as")
    before = path.read_bytes()
    text, section = render(load_project(path), "daily", "new", 7, (), choice)
    assert (
        refusal(append_section, load_project(path), "new", text, section, "--as")
        == "UsageError --as"
    )
    assert path.read_bytes() == before


def project_in(folder: Path) -> Project:
    """A project with a job over a week, without an account."""
    return load_project(write_project(folder))


REFUSED: list[dict[str, Any]] = [
    {}, {"first": "2h"}, {"first": "2h", "epsilon": 1.0}, {"proxy": "/x/*.csv", "epsilon": 1.0},
    {"proxy": "/x/*.csv", "fresh": True}, {"proxy": "/x/*.csv", "first": "8d"},
    {"proxy": "/x/*.csv", "quantile": 0.5, "cover": 0.5}, {"proxy": "/x/*.csv", "scale": 0.0},
]  # fmt: skip


def test_what_is_refused(tmp_path: Path) -> None:
    project = project_in(tmp_path)
    calls = {
        f"{given}": partial(ask, Request(project, "daily", "new", **given)) for given in REFUSED
    }
    check(Path(__file__).with_name("requests.txt"), of_refusals(calls))


def test_other_data_costs_nothing_and_the_digest_is_the_questions(tmp_path: Path) -> None:
    project = project_in(tmp_path)
    before = project.path.read_bytes()
    request = Request(project, "daily", "new", proxy="/x/*.csv")
    question, description = ask(request), ask(request).describe()
    assert (description["how"], description["epsilon"], description["histograms"]) == (
        "proxy",
        None,
        [],
    )
    assert question.digest == ask(request).digest and len(question.digest) == 32
    assert question.digest != ask(request._replace(quantile=0.5)).digest
    assert question.digest == ask(request._replace(new="other")).digest
    assert project.path.read_bytes() == before


EDITS = {
    "contributions": (r"contributions = \d+", "contributions = 3"),
    "aggregate.total.bounds": (r"bounds = \[-[\d., ]*\]", "bounds = [-1, 1]"),
    "choice.epsilon": (r"epsilon = 1.0", "epsilon = 0.5"),
    "choice.mu": (r"mu = [\d.]+", "mu = 0.1"),
    "choice.first": (r'first = "12h"', 'first = "6h"'),
    "choice.bounds": (r'bounds = \["total"\]', "bounds = []"),
    "choice.run_id": (r'run_id = "..', 'run_id = "zz'),
    "choice.receipt": (r'receipt = "..', 'receipt = "zz'),
    "choice.question": (r'question = "..', 'question = "zz'),
    "choice.how": (r'how = "private"', 'how = "proxy"'),
    "account": (r"account = .*", ""),
}


def located(field: str) -> str:
    """The field with the names of the sections that have it."""
    first, _, rest = field.partition(".")
    if first in ("unit", "account"):
        return f"data_set.deliveries.{field}"
    return f"table.records.{rest}" if first == "table" else f"job.new.{field}"


def test_edited_figures_are_refused(project: Path) -> None:
    done(choose(project))
    text, edited = project.read_text(), project.with_name("edited.toml")
    assert load(project) == ""
    for field, (old, new) in EDITS.items():
        assert re.search(old, text), field
        accounts.write(edited, re.sub(old, new, text))
        assert load(edited) == located(field)
    accounts.write(
        edited, text.replace("epsilon = 2.0", "epsilon = 1.5")
    )  # the stream's own budget
    assert load(edited) == ""


PERIOD = ('covers = "lifetime"', 'covers = "1d"')
#: The unit of the tuning, written otherwise: what `dpstream run` would charge to another unit.
UNITS = {
    "start": ('start = "2024-01-01T00:00:00Z"', 'start = "2023-12-31T23:00:00Z"'),
    "budget.covers": ('covers = "1d"', 'covers = "2d"'),
    "table.time_column": ('time_column = "time"', 'time_column = "at"'),
    "table.unit_column": ('{ name = "user" }', '{ name = "user", type = "bytes" }'),
    "unit.name": ('{ name = "user" }', '{ name = "person" }'),
}


def test_the_unit_of_a_tuning_cannot_be_edited(project: Path) -> None:
    write(project, PERIOD)
    done(choose(project, ask=("--first", "12h", "--epsilon", "1")))
    text, edited = project.read_text(), project.with_name("edited.toml")
    assert load(project) == ""
    for field, (old, new) in UNITS.items():
        assert old in text, field
        accounts.write(edited, text.replace(old, new))
        assert load(edited) == located(field)
    accounts.write(edited, text.replace("2024-01-01T00:00:00Z", "2023-12-31T00:00:00Z"))  # a period
    assert load(edited) == ""


def test_a_tuning_without_its_charge_is_refused(project: Path) -> None:
    """Also by ``begin``, for a job that was loaded in time."""
    done(choose(project))
    made = load_job(project, "new")
    for sql in (
        "DELETE FROM blobs",
        "DELETE FROM log WHERE number > 0",
    ):
        with sqlite3.connect(account(project)) as db:
            db.execute(sql)
        assert refusal(begin, made) == "PolicyError account.path"
    account(project).unlink()
    with pytest.raises(UsageError) as refused:
        load_job(project, "new")
    assert refused.value.field == "data_set.deliveries.account.path"
    assert not account(project).exists()


def test_an_uncharged_one_is_caught(project: Path) -> None:
    with (
        mock.patch.object(Ledger, "append"),
        mock.patch.object(AnswerLog, "_is_of_kind", lambda *_: True),
        mock.patch.object(AnswerLog, "_digest", lambda *_: "0" * 32),
    ):
        assert choose(project).exit_code == 3
    assert entries(project) == 0 and "new" not in jobs(project)


def test_tuned_by_looking_is_refused_and_public_is_not(project: Path) -> None:
    runnable = (
        ("key = [", "contributions = 4\nkey = ["), ("grid = 0.5", "grid = 0.5, bounds = [0, 9]"),
    )  # fmt: skip
    for how, field in (("data", "job.hourly.choice.how"), ("public", ""), ("proxy", "")):
        write(project, *runnable, ("choice.range", f'choice.how = "{how}"\nchoice.range'))
        assert load(project, "hourly") == field


# --- other data -----------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["path", "copy", "link", "glob"])
def test_the_jobs_own_data_is_no_proxy(project: Path, tmp_path: Path, how: str) -> None:
    """Its exact figures would be a release without noise and without a charge."""
    own = project.parent / "in" / "a.csv"
    proxy = {"path": own, "copy": tmp_path / "c.csv", "link": tmp_path / "l.csv"}.get(how, own)
    if how == "copy":
        proxy.write_bytes(own.read_bytes())
    if how == "link":
        proxy.hardlink_to(own)
    pattern = own.parent / "*.csv" if how == "glob" else proxy
    result = choose(project, "new", "--json", ask=("--proxy", str(pattern)))
    assert result.exit_code == 3 and json.loads(result.stderr)["field"] == "--proxy"
    assert "new" not in jobs(project)


def test_proxy_is_exact_uncharged_and_labelled(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (project.parent / "old.csv").write_text(records(50).replace("2024", "2020"))
    monkeypatch.chdir(project.parent)
    line = next(line for line in PROJECT.splitlines() if line.startswith("account"))
    write(project, (f"{line}\n", ""))
    flags = ("--proxy", "old.csv", "--proxy-start", "2020-01-01T00:00:00Z", "--quantile", "0.9")
    made = json.loads(done(choose(project, "a", "--json", ask=(*flags, "--first", "12h"))).stdout)
    pairs = [pairs_of(u) for u in range(50)]
    assert made["contributions"] == 4 * np.quantile(pairs, 0.9, method="inverted_cdf")
    assert made["run_id"] is None and entries(project) == 0
    plan_text = done(call("plan", "a", "--project", project)).stdout
    assert "contributions and bounds of total chosen from other data: no charge" in plan_text
    proposal = json.loads(done(choose(project, "b", "--json", ask=flags)).stdout)
    everyone = pairs + [1] * 150
    assert proposal["contributions"] == np.quantile(everyone, 0.9, method="inverted_cdf")
    assert choose(project, "c", "--epsilon", "1", ask=flags).exit_code == 2
    empty = choose(project, "c", ask=(*flags[:2], "--proxy-start", "1999-01-01T00:00:00Z"))
    assert empty.exit_code == 2 and "no usable record" in empty.stderr


@pytest.mark.parametrize("ask", [ASK, ("--proxy", "in/a.csv", "--first", "12h")])
def test_a_file_that_is_cut_off_is_refused_before_the_charge(
    project: Path, ask: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(project.parent)
    packed = gzip.compress((project.parent / "in" / "a.csv").read_bytes())
    (project.parent / "in" / "a.csv").write_bytes(packed[:-5])
    if ask is not ASK:
        (project.parent / "in").rename(project.parent / "old")
        (project.parent / "in").mkdir()
        ask = ("--proxy", "old/a.csv", *ask[2:])
    result = choose(project, "new", "--json", ask=ask)
    field = "table.path" if ask is ASK else "--proxy"
    assert result.exit_code == 2 and json.loads(result.stderr)["field"] == field
    assert entries(project) == 0

"""``dpstream account forecast``: against what an account then does, and against the formulas."""

import datetime as dt
import math
import re
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from scipy.optimize import brentq
from scipy.stats import norm

from dpstream.accounting.budget.allocation import allocate
from dpstream.accounting.errors import PolicyError
from dpstream.pipelines.jobs.job import load_job
from dpstream.pipelines.operate.account_view import view
from dpstream.pipelines.operate.forecast import forecast
from dpstream.pipelines.project.project import load_project
from dpstream.pipelines.render.account import forecast_text
from dpstream.pipelines.stream.begin import begin
from dpstream.state import open as stores
from tests.pipelines.cli.called import call, printed

START = dt.datetime(2026, 1, 1, tzinfo=dt.UTC)


def micros(year: int, month: int = 1, day: int = 1) -> int:
    return int(dt.datetime(year, month, day, tzinfo=dt.UTC).timestamp()) * 1_000_000


def made(folder: Path, covers: str) -> Path:
    """A project with one job of the year 2026; nothing is charged."""
    folder.mkdir(exist_ok=True)
    rows = {"user": ["a"], "page": ["p"], "time": [START]}
    pq.write_table(pa.table(rows), folder / "visits.parquet")
    options = (
        "--unit user --key page --time time --start 2026-01-01 --end 2027-01-01 --window day"
        f" --every 1d --covers {covers} --epsilon 2 --delta 1e-6 --job daily"
    )
    file = folder / "dpstream.toml"
    result = call(
        "init", folder / "visits.parquet", *options.split(), "--project", file, "--new-account"
    )
    assert result.exit_code == 0, result.output
    return file


def foreseen(file: Path, until: int, now: int = micros(2026)) -> dict[str, Any]:
    return forecast(load_project(file), None, now, until)


def begun(file: Path, year: int) -> None:
    """Charge the job for another year, with a store and a folder of its own."""
    text = file.read_text()
    for field, value in (("start", year), ("end", year + 1)):
        text = re.sub(
            rf'^{field} = "[^"]*"', f'{field} = "{value}-01-01T00:00:00Z"', text, flags=re.M
        )
    text = re.sub(r"daily[^\"./]*\.store", f"daily{year}.store", text)
    file.write_text(re.sub(r"releases/daily[0-9]*", f"releases/daily{year}", text))
    try:
        begin(load_job(file))
    finally:
        stores.close_all()


def test_the_account_then_does_what_was_foreseen(tmp_path: Path) -> None:
    file = made(tmp_path, "lifetime")
    before = foreseen(file, micros(2040))
    accepted = [run for run in before["runs"] if run["accepted"]]
    refused = before["refused"]["daily"]
    assert [run["begins"] for run in accepted] == [
        f"{2026 + i}-01-01" for i in range(len(accepted))
    ]
    assert refused["begins"] == f"{2026 + len(accepted)}-01-01"
    for run in accepted:
        begun(file, int(run["begins"][:4]))
        account = view(str(next(tmp_path.glob("*.account.db"))))
        assert account["used"] == pytest.approx(run["used"])
    # What is charged is foreseen no more, and what follows is as it was.
    after = foreseen(file, micros(2040))
    assert sum(run["charged"] for run in after["runs"]) == len(accepted)
    assert after["refused"] == before["refused"]
    with pytest.raises(PolicyError):
        begun(file, 2026 + len(accepted))
    epsilon, delta = refused["enough"]
    limit = f"account limit visits --project {file} --epsilon {epsilon} --delta {delta}"
    assert call(*limit.split()).exit_code == 0
    begun(file, 2026 + len(accepted))


def epsilon_of_weeks(mu: float, weeks: int, delta: float) -> float:
    """Of so many Gaussian mechanisms, by the curve of their sum."""
    total = mu * weeks**0.5

    def beyond(epsilon: float) -> float:
        log = epsilon + norm.logcdf(-total / 2 - epsilon / total)
        return float(norm.cdf(total / 2 - epsilon / total) - math.exp(log)) - delta

    return float(brentq(beyond, 0, 1000, xtol=1e-9))


def test_years_that_do_not_meet_cost_a_week_no_more_and_a_person_their_sum(tmp_path: Path) -> None:
    file = made(tmp_path, "7d")
    figures = foreseen(file, micros(2031))
    used = {round(run["used"], 9) for run in figures["runs"]}
    assert len(used) == 1 and len(figures["runs"]) == 5 and not figures["refused"]
    budget, bound = allocate(load_job(file).plan), load_job(file).plan.privacy.contributions
    for date, (epsilon, delta) in figures["by_date"][1:]:
        days = (dt.datetime.fromisoformat(date).replace(tzinfo=dt.UTC) - START) / dt.timedelta(1)
        weeks = int(-(-days // 7))
        own = epsilon_of_weeks(budget.mu, weeks, figures["limit"]["delta"])
        # Rounded up, by the sums of an account, which are exact.
        assert own <= epsilon * (1 + 1e-9) and epsilon == pytest.approx(own, rel=1e-3), date
        thresholds = weeks * bound * budget.b
        assert delta == pytest.approx(figures["limit"]["delta"] + thresholds, rel=1e-6)


def test_the_page_and_the_table(tmp_path: Path) -> None:
    file = made(tmp_path, "lifetime")
    out = tmp_path / "forecast.html"
    command = ("account", "forecast", "--project", file, "--until", "2040-01-01")
    table = call(*command, "--out", out)
    assert table.exit_code == 0 and "<svg" in out.read_text()
    for run in printed(call(*command, "--json").output)["runs"]:
        assert run["begins"] in table.output and run["begins"] in out.read_text()
    assert call("account", "forecast", "--project", file, "--until", "2020-01-01").exit_code == 2
    # Runs that use the same share of the limit are one row.
    weekly = (
        "account",
        "forecast",
        "--project",
        made(tmp_path / "w", "7d"),
        "--until",
        "2036-01-01",
    )
    rows = [line for line in call(*weekly).output.splitlines() if line.startswith("daily ")]
    assert [row.split()[1:3] for row in rows] == [["10", "2026-01-01"]]
    # Where a job has too many runs before the date, the forecast ends sooner, and says when.
    many = foreseen(file, micros(2026 + 2000))
    assert len(many["runs"]) <= 101 and many["until"] < "2200"
    assert f"{many['until']}, not {many['asked_until']}" in forecast_text(many)

"""The report: its figures are the plan's and the releases', its page safe for any key.

Errors by the true size of a key (from real records in test_data).
"""

import gzip
import json
import logging
import math
import tomllib
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path

import msgspec
import numpy as np
import pyarrow as pa
import pytest

from dpstream.accounting.budget.allocation import allocate
from dpstream.accounting.budget.calibration import committed_text
from dpstream.accounting.figures import human, human_up
from dpstream.accounting.guarantee import describe
from dpstream.dp_transforms.release import stamped_run_id
from dpstream.pipelines.jobs.job import Job
from dpstream.pipelines.render.charts import WIDTH
from dpstream.pipelines.report.data import PAGE_NUMBERS
from dpstream.pipelines.report.report import STAMPS, Decade, decades_of, finite_median, summed
from dpstream.pipelines.report.text import KEY_TEXT, visible
from dpstream.state.store import RunIdentity
from tests.pipelines.report.runs import weeks
from tests.reports import RUN, call, check_page, data_of, edit, put, report, row, three_triggers


def test_keys_are_grouped_by_decades(make_job: Callable[..., Job]) -> None:
    table = pa.table({
        "_n": [0, 1, 9, 10, 99, 100], "_released": [True, True, False, True, True, False],
        "records": [5.0, 2.0, 1.0, 4.0, 6.0, None], "total": [1.0] * 5 + [None],
    })  # fmt: skip
    decades = decades_of(make_job().plan, table)
    assert [one[:4] for one in decades] == [
        (0, 0, 1, 1),
        (1, 9, 2, 1),
        (10, 99, 2, 2),
        (100, 999, 1, 0),
    ]
    assert [one.errors["records"] for one in decades] == [5.0, 2.0, 5.0, None]
    assert isinstance(decades[0], Decade)


def test_a_median_of_what_is_known() -> None:
    assert finite_median(np.array([1.0, np.nan, 3.0])) == 2.0
    assert finite_median(np.array([np.nan])) is None


def test_partial_sums_add_up() -> None:
    part = pa.table({"window": [0, 1, 0], "_n": [1, 2, 3]})
    sums = summed(part, ["window"], part.schema).sort_by("window")
    assert sums.to_pydict() == {"window": [0, 1], "_n": [4, 2]}


MakeJob = Callable[..., Job]
UNITS = 'aggregate.people = { kind = "units" }\nstart ='
EVIL = [
    "<script>alert(1)</script>",
    '"><img src=x onerror=alert(1)>',
    "$\\frac{a}{b$ &amp; {{ 7*7 }} #0a0b00 url(#x)",
    "nul\x00 turned \u202e round\nline",
    "k" * 1000,
    "",
]


@pytest.fixture(autouse=True)
def keep_logging() -> Iterator[None]:
    """The command line silences the process's logs; other tests need theirs."""
    yield
    logging.disable(logging.NOTSET)


def secure(job: Job) -> Job:
    return edit(job, ('insecure_test_secret = "' + "0f" * 32 + '"', 'secret = "file:shop.secret"'))


def test_page_of_a_part_finished_run(make_job: MakeJob, tmp_path: Path) -> None:
    job = make_job()
    three_triggers(job, [f"key {i}" for i in range(8)])
    page, text, figures = report(job, tmp_path)
    check_page(page, text)
    assert "Not finished: 0 of 1 day complete; figures of the newest" in page.text
    assert "3 of 4" in page.of("dd")
    # The reader comes first, then what only experts read, in one part that is closed.
    assert [s["aria-labelledby"] for s in page.every("section")] == [
        "figures", "protection", "reading", "use",
        "guarantee", "released", "error", "budget", "noise", "settings",
    ]  # fmt: skip
    assert text.index('aria-labelledby="use"') < text.index("<details") < text.index('"guarantee"')
    # six small multiples and one scatter for each of two columns, keys by trigger, noise of
    # selection and of values; of one window there is no trend
    assert len(page.every("svg")) == 2 * (6 + 1) + 1 + 2
    busiest = [f"key {i}" for i in range(7, 1, -1)]
    assert [entry["key"] for entry in figures["busiest"]] == busiest
    # titles of the six small multiples of the last column, before those of other charts
    assert [title for title in page.of("bdi") if title.startswith("key ")][-6:] == busiest
    assert [line[0] for line in data_of(page)["keys"]] == [*busiest, "key 1", "key 0"]
    assert figures["busiest"][0]["columns"]["records"] == {"value": 803.0, "sd": 5.0}
    assert f"803 ± {human(WIDTH * 5.0)}" in page.of("td")
    assert figures["releases"]["drawn_window"] == [{"trigger": t, "keys": 8} for t in (1, 2, 3)]
    assert figures["releases"]["windows"][0]["keys"] == 8
    assert RUN in page.of("code") and figures["run_ids"] == [RUN]
    assert job.plan.hash in page.of("code")


def test_figures_are_those_of_the_plan(make_job: MakeJob, tmp_path: Path) -> None:
    job = make_job()
    three_triggers(job, ["a"])
    page, _, figures = report(job, tmp_path)
    promised = describe(job.plan, allocate(job.plan))
    assert figures["plan"] == json.loads(json.dumps(promised))
    assert figures["plan_hash"] == promised["plan_hash"] == job.plan.hash
    assert promised["guarantee"]["text"] + "." in page.of("p")
    definitions = {name: after for (tag, name), (_, after) in pairwise(page.parts) if tag == "dt"}
    assert "epsilon 6 for one user" in page.of("a")
    assert definitions["mu (Gaussian DP)"] == human_up(promised["split"]["mu"])
    assert definitions["theta, part of delta for thresholds"] == "0.4"
    assert definitions["b, chance per key and round"] == human_up(promised["split"]["b"])
    assert definitions["delta for thresholds"] == human_up(promised["split"]["delta_thresholds"])
    chosen, cells = promised["selection"], page.of("td")
    assert f"{chosen['units_for_half_chance_easiest']} units" in page.of("strong")
    assert f", and with {chosen['units_for_half_chance_last']} at the last" in page.text
    for stream in promised["streams"]:
        assert f"{100 * stream['share']:.1f} %" in cells and human(stream["sigma"]) in cells
    for column in promised["columns"]:
        assert human(column["sd_mean"]) in cells and human(column["sd_final"]) in cells
    assert human(promised["tau"][-1]) in cells
    assert set(promised["assumptions"]) < set(page.of("li"))


def test_keys_can_be_any_text(make_job: MakeJob, tmp_path: Path) -> None:
    job = make_job()
    three_triggers(job, EVIL)
    page, text, figures = report(job, tmp_path)
    check_page(page, text)
    labels = {entry["key"] for entry in figures["busiest"]}
    assert labels == {visible(key) or "(empty text)" for key in EVIL}
    assert labels <= {" ".join(label.split()) for label in page.of("bdi")}
    assert EVIL[0] in page.of("bdi") and "<script>alert" not in text
    assert EVIL[2] in page.of("bdi")
    spoken = " ".join(attrs["aria-label"] or "" for attrs in page.every("svg"))
    assert EVIL[0] in spoken and EVIL[2] in spoken
    assert "\x00" not in text and "\u202e" not in text and "k" * (KEY_TEXT + 1) not in text
    assert "nul\\u0000 turned \\u202e round\\u000aline" in labels


def test_names_of_columns_can_be_any_text(make_job: MakeJob, tmp_path: Path) -> None:
    evil = "<b onload=x>$\\\\frac"
    job = edit(make_job(), ("aggregate.total", f'aggregate."{evil}"'))
    name = job.plan.aggregates[1].name
    put(job, 1, [{**row("a", 50.0), name: 150.0, f"{name}_sd": 4.0}])
    page, text, _ = report(job, tmp_path)
    check_page(page, text)
    assert "<b " not in text and name in page.of("th") and name in page.of("h4")


@pytest.mark.parametrize("sound", [True, False])
@pytest.mark.parametrize("insecure", [False, True])
def test_banner_of_stamped_runs(
    make_job: MakeJob, tmp_path: Path, sound: bool, insecure: bool
) -> None:
    job = secure(make_job())
    budget = msgspec.structs.replace(allocate(job.plan), has_guarantee=sound)
    numbers = committed_text(job.plan, budget)
    identity = RunIdentity(job.plan.hash, RUN, 0, 4, "", "", "", insecure, calibration=numbers)
    put(job, 1, [row("a", 50.0)], run_id=stamped_run_id(job.plan, identity))
    page, text, figures = report(job, tmp_path)
    check_page(page, text)
    wanted = [s for s, yes in zip(STAMPS, (not sound, insecure), strict=True) if yes]
    assert figures["stamps"] == wanted and figures["run_ids"] == [RUN]
    banners = [a for a in page.every("div") if a.get("class") == "bad"]
    assert len(banners) == len(wanted) and all(a["role"] == "alert" for a in banners)
    for stamp in STAMPS:
        assert any(s.startswith(f"{stamp}: ") for s in page.of("strong")) == (stamp in wanted)
    assert ("may be published" in page.text) == (not wanted)
    assert [
        s in call("--project", job.path, "--out", tmp_path / "b.html").stdout for s in STAMPS
    ] == [s in wanted for s in STAMPS]


def test_banner_of_an_insecure_job_without_releases(make_job: MakeJob, tmp_path: Path) -> None:
    job = make_job()
    Path(job.sink.path).mkdir()
    page, _, figures = report(job, tmp_path)
    assert figures["stamps"] == ["INSECURE"]
    assert any(text.startswith("INSECURE") for text in page.of("strong"))


def test_releases_of_two_runs_are_told(make_job: MakeJob, tmp_path: Path) -> None:
    job = secure(make_job())
    put(job, 1, [row("a", 50.0)], run_id=RUN)
    put(job, 2, [row("a", 50.0)], run_id="cd" * 16)
    page, _, figures = report(job, tmp_path)
    assert figures["run_ids"] == [RUN, "cd" * 16]
    assert "Releases of 2 runs lie in one folder." in page.of("strong")


def test_runs_without_releases_or_keys_say_so(make_job: MakeJob, tmp_path: Path) -> None:
    job = make_job()
    Path(job.sink.path).mkdir()
    page, text, figures = report(job, tmp_path)
    check_page(page, text)
    assert "Nothing was published: there are no releases yet." in page.of("strong")
    assert figures["releases"]["present"] == 0 and figures["run_ids"] == []
    put(job, 1, [])
    put(job, 2, [])
    page, text, figures = report(job, tmp_path)
    check_page(page, text)
    words = "Nothing was published: no key was selected in the 2 releases there are."
    assert words in page.of("strong") and "About 0" not in page.text
    chosen = figures["plan"]["selection"]["units_for_half_chance_easiest"]
    assert f"about {chosen} are needed for a 50% chance" in page.text
    assert "No key was released" in call("--project", job.path, "--out", tmp_path / "b.html").stdout
    assert figures["releases"]["windows"][0]["keys"] == 0 and figures["busiest"] == []
    assert len(page.every("svg")) == 2  # the noise, which needs no release


def test_public_keys_and_a_single_trigger(make_job: MakeJob, tmp_path: Path) -> None:
    (tmp_path / "keys.csv").write_text("key\na\nb\n")
    public = ("sink =", 'public_keys = "keys.csv"\nsink =')
    job = edit(make_job(), public, ('"6h"', '"1d"'), ("start =", UNITS))
    put(job, 1, [{**row("a", 50.0), "people": 9.0, "people_sd": 2.0}])
    page, text, figures = report(job, tmp_path)
    check_page(page, text)
    assert "All keys are public: none has to be selected" in page.text
    assert "tau" not in page.text and figures["plan"]["tau"] is None
    assert "Complete: 1 day." in page.text
    assert "units" in page.of("th") and len(page.every("svg")) == 3  # nothing grows


def test_template_is_installed_with_the_package() -> None:
    root = Path(__file__).parents[3]
    project = tomllib.loads((root / "pyproject.toml").read_text())
    listed = project["tool"]["setuptools"]["package-data"]["dpstream.pipelines"]
    packed = {path for pattern in listed for path in (root / "pipelines").glob(pattern)}
    assert set((root / "pipelines" / "templates").iterdir()) <= packed
    assert any(name.startswith("jinja2") for name in project["project"]["dependencies"])


def test_values_that_are_not_defined(make_job: MakeJob, tmp_path: Path) -> None:
    job = make_job()
    put(job, 1, [{**row("a", 0.0), "total": None, "total_sd": None}])
    page, text, figures = report(job, tmp_path)
    check_page(page, text)
    assert figures["busiest"][0]["columns"]["total"] == {"value": None, "sd": None}
    assert "No value other than 0 is defined." in page.text and "–" in page.of("td")


def refused(job: Job, *flags: str | Path) -> tuple[int, str]:
    result = call("--project", job.path, "--json", *flags)
    error = json.loads(result.stderr)
    assert "Traceback" not in result.output and result.stdout == ""
    return result.exit_code, error["field"]


def test_refusals(make_job: MakeJob, tmp_path: Path) -> None:
    job, out = make_job(), tmp_path / "page.html"
    assert refused(job, "--out", out) == (2, "sink.path")
    put(job, 1, [row("a", 50.0)])
    other = tmp_path / "notes.html"
    other.write_text("mine")
    assert refused(job, "--out", other) == (2, "--out")
    assert other.read_text() == "mine"
    assert refused(job, "--out", tmp_path / "none" / "page.html") == (4, "--out")
    assert refused(job, "--out", out, "--truth", tmp_path / "none.csv") == (2, "--truth")
    (tmp_path / "half.csv.gz").write_bytes(gzip.compress(b"user,key,time,value\n")[:-9])
    assert refused(job, "--out", out, "--truth", tmp_path / "half.csv.gz") == (2, "--truth")
    (tmp_path / "in" / "a.csv").write_text("user,key,time,value\n")
    inside = Path(job.sink.path) / "page.html"
    assert refused(job, "--out", inside, "--truth", tmp_path / "in" / "a.csv") == (3, "--out")
    assert not out.exists() and not inside.exists()
    first = next(Path(job.sink.path).rglob("window-*/*.parquet"))
    content = first.read_bytes()
    first.write_bytes(content[:-9])
    assert refused(job, "--out", out) == (2, "release window-000000/trigger-000001.parquet")
    first.write_bytes(content)
    assert call("--project", job.path, "--out", out).exit_code == 0
    assert call("--project", job.path, "--out", out).exit_code == 0  # its own page is replaced


def test_another_plan_is_refused(make_job: MakeJob, tmp_path: Path) -> None:
    job = make_job()
    put(job, 1, [row("a", 50.0)])
    cheaper = edit(job, ("epsilon = 6.0", "epsilon = 1.0"))
    assert refused(cheaper, "--out", tmp_path / "page.html") == (2, "sink.path")
    job = edit(job, ("epsilon = 1.0", "epsilon = 6.0"))
    put(job, job.plan.timeline.triggers + 1, [])
    assert refused(job, "--out", tmp_path / "page.html") == (2, "sink.path")


def test_page_holds_no_path_and_no_key(make_job: MakeJob, tmp_path: Path) -> None:
    job = make_job()
    three_triggers(job, ["a"])
    page, text, figures = report(job, tmp_path)
    figures.pop("page")
    for private in (str(tmp_path), "0f" * 32, "store.db"):
        assert private not in text and private not in json.dumps(figures)
    settings = figures["settings"]
    assert settings["contributions"] == "4" and settings["window"] == "1 day"
    assert settings["source"] == "csv:*.csv" and settings["secret"].startswith("INSECURE")
    cells = [*page.of("th"), *page.of("td")]
    assert set(settings) <= set(cells) and set(settings.values()) <= set(cells)


def test_no_local_path_on_the_page(make_job: MakeJob, tmp_path: Path) -> None:
    job = edit(make_job(), ('path = "in/*.csv"', f'path = "{tmp_path}/in/private.csv"'))
    three_triggers(job, ["a"])
    page, text, figures = report(job, tmp_path)
    figures.pop("page")
    assert "csv:private.csv" in page.of("code") and page.of("h1") == ["daily"]
    assert figures["settings"]["source"] == "csv:private.csv"
    assert str(tmp_path) not in text and str(tmp_path) not in json.dumps(figures)


def test_final_values_of_every_window(make_job: MakeJob, tmp_path: Path) -> None:
    job = weeks(make_job(), [f"key {n}" for n in range(9)], 12)
    put(job, 1, [], window=11)  # the last window stands open, almost empty
    page, text, figures = report(job, tmp_path)
    check_page(page, text)
    spoken = [attrs["aria-label"] or "" for attrs in page.every("svg")]
    trends = [words for words in spoken if words.startswith("Final ")]
    assert len(trends) == 3 * 6 and all(" by window: " in words for words in trends)
    assert "windows with a key" in page.of("dt") and "12 of 12" in page.of("dd")
    assert figures["releases"]["keys"] == 9
    assert len(data_of(page)["starts"]) == 12
    # What can be pointed at says its window and value.
    tips = [json.loads(a["data-tips"] or "") for a in page.every("div") if a.get("data-tips")]
    assert "2024-01-12 UTC to 2024-01-13 UTC: " in tips[0][-1][2] and "±" in tips[0][-1][2]
    assert all(0 <= x <= 1 and 0 <= y <= 1 for x, y, _ in tips[0])
    assert "may fall from one day to the next" in text


def test_a_fall_is_no_fall_of_contributions_where_each_period_has_its_own(
    make_job: MakeJob, tmp_path: Path
) -> None:
    job = edit(make_job(), ('covers = "lifetime"', 'covers = "1d"'))
    _, text, _ = report(weeks(job, ["key"], 3), tmp_path)
    assert "may fall from window to window" not in text


def test_large_runs_stay_small(make_job: MakeJob, tmp_path: Path) -> None:
    job = edit(make_job(), ('end = "2024-01-02T', 'end = "2024-01-13T'))
    rows = [row(f"key {n:05}", 20_000.0 - n) for n in range(10_000)]
    for window in range(12):
        put(job, 4, rows, window)
    page, text, figures = report(job, tmp_path)
    check_page(page, text)
    data = data_of(page)
    numbers = sum(len(c["values"]) + len(c["sds"]) for c in data["columns"])
    assert numbers <= PAGE_NUMBERS and len(data["keys"]) == 10_000 == figures["releases"]["keys"]
    assert "The 10,000 busiest of 10,000 rows, each with its newest value" in page.text
    assert len(text) < 2_500_000


def test_same_releases_same_bytes_in_every_format(make_job: MakeJob, tmp_path: Path) -> None:
    outputs = []
    for kind in ("parquet", "csv", "jsonl", "parquet"):
        job = edit(make_job(sink=kind), ('path = "releases"', f'path = "releases-{kind}"'))
        if not Path(job.sink.path).exists():
            three_triggers(job, ["007", "true", "a,\"b'"])
        _, text, figures = report(job, tmp_path)
        figures["settings"].pop("sink.kind")
        outputs.append((text.replace(f'<td class="note">{kind}</td>', ""), figures))
    assert all(other == outputs[0] for other in outputs[1:])


def test_typed_keys(make_job: MakeJob, tmp_path: Path) -> None:
    for kind in ("parquet", "csv", "jsonl"):
        job = edit(
            make_job(sink=kind),
            ('key = ["key"]', 'key = [{ column = "i", type = "int" }, '
             '{ column = "b", type = "bool" }, { column = "y", type = "bytes" }]'),
            ('path = "releases"', f'path = "releases-{kind}"'),
        )  # fmt: skip
        values = {k: v for k, v in row("", 50.0).items() if k != "key"}
        put(job, 1, [{"i": -7, "b": True, "y": b"\x00\xff", **values}])
        put(job, 2, [{"i": -7, "b": True, "y": b"\x00\xff", **values}])
        _, _, figures = report(job, tmp_path)
        assert [entry["key"] for entry in figures["busiest"]] == ["-7 · True · 0x00ff"]


def test_numbers_for_people() -> None:
    numbers = [0, 1, 12_345.6, 999.5, 45.67, 4.567, 0.12345, 1e-9, 2.18e-8, -5.0, 1e15, None]
    assert [human(n) for n in [*numbers, math.nan]] == [
        "0", "1", "12,346", "1,000", "45.7", "4.57", "0.123", "1e-9", "2.18e-8", "-5", "1e15",
        "–", "–",
    ]  # fmt: skip

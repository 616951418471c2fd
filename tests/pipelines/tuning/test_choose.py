"""Choosing C and bounds: proxies are other data, figures can be run, and jobs are written."""

import gzip
import json
import re
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import msgspec
import numpy as np
import pytest

from dpstream.accounting.budget.allocation import allocate
from dpstream.accounting.tuning.question import encoder_matrix
from dpstream.pipelines.connectors.files.source import recorded
from dpstream.pipelines.jobs.job import Job, load_job
from dpstream.pipelines.project.project import load_project
from dpstream.pipelines.stream.begin import begin
from dpstream.pipelines.tuning import choose as module
from dpstream.pipelines.tuning.ask import CheckedRequest, Request, ask
from dpstream.pipelines.tuning.choose import (
    read_off_runnable,
    refuse_own_data,
    with_bounds,
)
from dpstream.state import open as stores
from tests import accounts
from tests.golden.pinned import check, of_cases
from tests.golden.refusals import Refused
from tests.pipelines.tuning.asking import (  # noqa: F401
    ASK,
    CANARY,
    PROJECT,
    USERS,
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
    value_of,
    write,
)

TEXT = b"user,key,time,value\nu,k,2024-01-01T00:00:00Z,1\n"


@pytest.mark.parametrize("packed", [False, True])
def test_a_copy_of_the_jobs_own_file_is_refused(
    packed: bool, tmp_path: Path, make_job: Callable[..., Job], refused: Refused
) -> None:
    job, other = make_job("csv"), tmp_path / "other"
    (tmp_path / "in" / "a.csv").write_bytes(TEXT)
    other.mkdir()
    (other / "x.csv").write_bytes(TEXT.replace(b",1\n", b",3\n"))
    refuse_own_data(job, recorded(job, f"{other}/*", "--proxy"))
    (other / "y.csv").write_bytes(gzip.compress(TEXT) if packed else TEXT)
    if packed:
        (other / "y.csv").rename(other / "y.csv.gz")
    refused(lambda: refuse_own_data(job, recorded(job, f"{other}/*", "--proxy")))


@pytest.fixture
def checked(project: Path) -> CheckedRequest:
    request = Request(load_project(project), "hourly", "new", proxy="/x/*.csv", quantile=0.9)
    return ask(request)


def nodes(question: CheckedRequest, pairs: int) -> list[np.ndarray]:
    """Noise-free nodes of 900 units with so many pairs, and of values between -20 and 20."""
    node_values = []
    for of, value in zip(question.design.histograms, (pairs, 20), strict=True):
        counts = np.zeros(of.cells, np.int64)
        counts[np.searchsorted(of.candidates, value)] = 900
        node_values.append(encoder_matrix(of.cells) @ counts)
    return node_values


def test_the_largest_bound_that_can_be_run(checked: CheckedRequest) -> None:
    """Nobody gets a C whose noise cannot be drawn, and no figures of another one."""
    few = read_off_runnable(checked, nodes(checked, 3))
    assert few.contributions == 3 and few.cut == pytest.approx(0) and few.notes == ()
    many = read_off_runnable(checked, nodes(checked, 1_000))
    assert 3 < many.contributions < 1_000 and many.cut is None is many.sd
    assert "sampler" in many.notes[-1]
    plan = with_bounds(checked, many.bounds)
    replace = msgspec.structs.replace
    for count, runs in ((many.contributions, True), (many.contributions + 1, False)):
        other = replace(plan, privacy=replace(plan.privacy, contributions=count))
        if runs:
            allocate(other)
        else:
            with pytest.raises(Exception, match="sampler"):
                allocate(other)


def test_choose_writes_a_job_that_runs(project: Path) -> None:
    result = done(choose(project))
    assert "good from" in result.stdout and entries(project) == 1
    before, section = project.read_text().split("[job.new]")
    assert before.count("KEEP THIS COMMENT") == section.count("KEEP THIS COMMENT") == 1
    assert "# and this one" in section
    made = load_job(project, "new")
    # Pairs are 1 .. 6 alike: the 0.9 quantile is 6; 12 hours of 48 are extrapolated by 4.
    assert 20 <= made.plan.privacy.contributions <= 28
    low, high = made.plan.aggregates[1].grid_bounds()
    assert -48 <= low <= -28 and 28 <= high <= 48  # 5% tails of -20 .. 20 on a grid of 0.5
    assert made.section.choice is not None and made.section.choice.range == {
        "total": (-100.0, 200.0)
    }
    run, resumed = begin(made)
    assert not resumed and entries(project) == 2 and run.plan == made.plan
    plan_text = done(call("plan", "new", "--project", project)).stdout
    assert re.search(r"Tuning .* first 12h of this stream .*together: \(2\.\d+, 2e-08\)", plan_text)
    figures = json.loads(done(call("plan", "new", "--project", project, "--json")).stdout)
    assert figures["choice"]["epsilon"] == 1.0 and figures["choice"]["total"]["epsilon"] > 2.0


def test_figures_are_exact_when_the_noise_is_negligible(project: Path) -> None:
    write(project, ("epsilon = 3.0, delta = 1e-6", "epsilon = 1e6, delta = 1e-6"))
    ask = ("--first", "12h", "--epsilon", "1000")
    pairs = [pairs_of(u) for u in range(USERS)]
    values = [value_of(u) for u in range(USERS)]
    for target in ("0.5", "0.9"):
        out = f"q{target[-1]}"
        result = json.loads(
            done(choose(project, out, "--quantile", target, "--json", ask=ask)).stdout
        )
        assert result["contributions"] == 4 * np.quantile(
            pairs, float(target), method="inverted_cdf"
        )
    low, high = result["bounds"]["total"]
    for edge, inside in ((low, -16), (high, 16)):
        assert abs(edge) in (16, 20, 24) and np.sign(edge) == np.sign(inside)
    assert np.mean(np.array(values) < low) <= 0.05 >= np.mean(np.array(values) > high)
    covered = json.loads(done(choose(project, "c", "--cover", "0.9", "--json", ask=ask)).stdout)
    covered_shares = [np.minimum(pairs, c).sum() / sum(pairs) for c in range(7)]
    assert covered["contributions"] == 4 * next(c for c in range(7) if covered_shares[c] >= 0.9)


def test_stamps_beyond_the_first_hours_are_not_read(project: Path) -> None:
    late = "".join(
        f"v{u},k1,2024-01-01T01:00:00Z,5,2024-01-01T12:00:00Z\n" for u in range(20 * USERS)
    )
    text = records(USERS).replace("user,key,time,value", "user,key,time,value,stamp")
    lines = [
        line if line.startswith("user") else f"{line},{line.split(',')[2]}"
        for line in text.splitlines()
    ]
    (project.parent / "in" / "a.csv").write_text("\n".join(lines) + "\n" + late)
    write(project, ('path = "in/*.csv"', 'path = "in/*.csv"\nstamp = "stamp"'))
    assert json.loads(done(choose(project, "new", "--json")).stdout)["contributions"] >= 20


def test_bounds_flag_chooses_those_that_are_there_too(project: Path) -> None:
    given_bounds = ("grid = 0.5", "grid = 0.5, bounds = [-100, 200]")
    write(project, given_bounds, ("choice.range = { total = [-100, 200] }\n", ""))
    assert json.loads(done(choose(project, "a", "--json")).stdout)["bounds"] == {}
    given = load_job(project, "a").plan.aggregates[1]
    assert given.bounds == (-100.0, 200.0)
    accounts.emptied(account(project))
    tuned = json.loads(done(choose(project, "b", "--bounds", "--json")).stdout)["bounds"]
    assert -25 < tuned["total"][0] < 0 < tuned["total"][1] < 25


def test_c_is_lowered_to_what_can_be_drawn(project: Path) -> None:
    write(project, ("grid = 0.5", "grid = 0.02"), ("[-100, 200]", "[-20, 40]"))
    result = json.loads(done(choose(project, "new", "--json", "--scale", "100")).stdout)
    assert result["contributions"] < 400 and "smaller C" in result["notes"][-1]
    assert load_job(project, "new").plan.privacy.contributions < 400


# --- charged before anything is drawn ------------------------------------------------------------


def test_the_same_question_is_answered_again_and_another_is_charged(project: Path) -> None:
    first = json.loads(done(choose(project, "a", "--json")).stdout)
    accounts.set_limit(account(project), (9.0, 1e-6))
    (project.parent / "in" / "b.csv").write_text(records(1))  # other rows are no other question
    with mock.patch.object(module, "tally", side_effect=AssertionError):  # reads no record
        again = json.loads(done(choose(project, "b", "--json")).stdout)
        done(choose(project, "b"))  # the same bytes may stand there
    a, b = (jobs(project)[name] for name in "ab")
    assert (
        not again["charged"]
        and a["choice"] == b["choice"]
        and a["sink"] != b["sink"]
        and entries(project) == 1
    )
    assert again["run_id"] == first["run_id"]
    second = json.loads(done(choose(project, "c", "--json", "--quantile", "0.8")).stdout)
    assert entries(project) == 2 and second["run_id"] != first["run_id"] and second["charged"]
    for number, flags in enumerate((("--fresh",), ("--as-of", "May")), 3):
        other = json.loads(done(choose(project, f"as{number}", "--json", *flags)).stdout)
        assert other["charged"] and entries(project) == number
    assert "as_of" not in jobs(project)["as3"]["choice"]
    assert jobs(project)["as4"]["choice"]["as_of"] == "May" and load(project, "as4") == ""
    done(choose(project, "as4", "--as-of", "May"))
    for taken, flags in (("a", ("--as-of", "May")), ("as4", ("--as-of", "June")), ("as4", ())):
        refused = choose(project, taken, "--json", *flags)  # before it is charged
        assert refused.exit_code == 2 and json.loads(refused.stderr)["field"] == "--as"
    assert entries(project) == 4


def test_names_are_no_part_of_the_question(project: Path) -> None:
    """Of the job, of its aggregates, and the order of its key's columns."""
    text = project.read_text()
    project.write_text(text.replace('key = ["key"]', 'key = ["key", "value"]'))
    first = json.loads(done(choose(project, "new", "--json")).stdout)
    assert first["charged"] and list(first["bounds"]) == ["total"]
    for number, (old, new, job, label) in enumerate(
        [("total", "amount", "hourly", "amount"), ("records =", "rows =", "hourly", "total"),
         ("[job.hourly]", "[job.nightly]", "nightly", "total"),
         ('["key"]', '["value", "key"]', "hourly", "total")]
    ):  # fmt: skip
        key = text if '"key"' in old else text.replace('key = ["key"]', 'key = ["key", "value"]')
        project.write_text(key.replace(old, new))
        words = ("choose", job, "--project", project, *ASK, "--as", f"new{number}", "--json")
        again = json.loads(done(call(*words)).stdout)
        assert not again["charged"] and again["run_id"] == first["run_id"]
        assert list(again["bounds"]) == [label]
        assert list(again["bounds"].values()) == list(first["bounds"].values())
        names = [row["name"] for row in again["asked"]["histograms"]]
        assert names[1:] == [label]
        made = load_job(project, f"new{number}")  # its figures are checked against the receipt
        assert made.plan.privacy.contributions == first["contributions"]
    assert entries(project) == 1
    project.write_text(key.replace('column = "value", grid = 0.5', 'column = "value", grid = 0.25'))
    other = json.loads(done(choose(project, "new", "--json")).stdout)
    assert other["charged"] and entries(project) == 2


# --- receipts -------------------------------------------------------------------------------------


def test_too_few_units_say_nothing_of_how_few(project: Path) -> None:
    errors = []
    for users in (0, 1, 40):
        (project.parent / "in" / "a.csv").write_text(records(users))
        accounts.emptied(account(project))
        result = choose(project)
        assert result.exit_code == 3 and "new" not in jobs(project)
        errors.append(result.stderr)
        assert entries(project) == 1
    assert len(set(errors)) == 1 and "too small to choose by" in errors[0]
    again = choose(project, "new")
    assert again.stderr == errors[0] and entries(project) == 1
    dry = choose(project, "new", "--dry-run")
    assert dry.exit_code == 3 and "too small to choose by" in dry.stdout
    assert "from 2" in dry.stdout and entries(project) == 1


def test_units_beyond_the_largest_candidate_take_it(project: Path) -> None:
    """Half of the units send 3 or more pairs; at most 2 are candidates."""
    flags = ("--json", "--max-contributions", "8", "--quantile", "0.9")
    result = json.loads(done(choose(project, "new", *flags)).stdout)
    assert result["contributions"] == 8 and "beyond --max-contributions" in result["notes"][0]


_LINE = next(line for line in PROJECT.splitlines() if line.startswith("account"))
#: The words of a command, and parts of the project file that are replaced.
REFUSED: list[tuple[tuple[str, ...], tuple[str, str] | None]] = [
    *(
        (("hourly", *words), None)
        for words in (
            ("--epsilon", "1", "--as", "new"),
            ("--first", "12h", "--as", "new"),
            ("--first", "3d", "--epsilon", "1", "--as", "new"),
            ("--first", "0s", "--epsilon", "1", "--as", "new"),
            ("--first", "soon", "--epsilon", "1", "--as", "new"),
            ("--first", "1m", "--epsilon", "1", "--as", "new"),
            ("--first", "12h", "--epsilon", "1e-7", "--as", "new"),
            (*ASK, "--as", "new", "--cover", "0.9", "--quantile", "0.5"),
            (*ASK, "--as", "new", "--scale", "0"),
            (*ASK, "--as", "hourly"),
            (*ASK, "--as", "in/new"),
            ASK,
            (*ASK, "--as", "new", "--as-of", "a\nb"),
        )
    ),
    *(
        (("hourly", *ASK, "--as", "new"), change)
        for change in (
            (f"{_LINE}\n", ""),
            ("epsilon = 3.0, delta = 1e-6", "epsilon = 2.01, delta = 1e-8"),
            ("choice.range = { total = [-100, 200] }", ""),
            ("range = { total", "range = { totl = [0, 1], total"),
            ("[-100, 200]", "[-1e9, 1e9]"),
            ("[-100, 200]", '["a", 2]'),
            ('{ kind = "count" }', '"count"'),
        )
    ),
]


def test_refused_before_any_charge(project: Path) -> None:
    refusals = {}
    for words, change in REFUSED:
        write(project, *([change] if change else [PROJECT]))
        result = call("choose", *words, "--project", project, "--json")
        refusal = json.loads(result.stderr)
        assert result.exit_code == refusal["exit_code"] and entries(project) == 0
        assert "new" not in jobs(project)
        text = f"{result.exit_code} {refusal['field']}: {refusal['rule']}. Fix: {refusal['fix']}."
        refusals[f"{' '.join(words)!r} {change or ''}"] = f"{text}\n"
    text = of_cases(refusals).replace(str(project), "PROJECT")
    check(Path(__file__).with_name("choose.txt"), text)


def test_dry_run_reads_no_data_and_costs_nothing(project: Path) -> None:
    file = project.parent / "in" / "a.csv"
    file.write_bytes(file.read_bytes().partition(b"\n")[0] + b"\nno, record\n")
    text = done(call("choose", "--project", project, *ASK, "--dry-run")).stdout
    assert "Cost        (1, 1e-08)-DP per unit" in text and "units (95%)" in text
    figures = json.loads(
        done(call("choose", "--project", project, *ASK, "--dry-run", "--json")).stdout
    )
    assert {h["name"] for h in figures["histograms"]} == {"pairs per unit", "total"}
    assert figures["histograms"][0]["units_for_5_points"] > 100
    assert entries(project) == 0 and list(jobs(project)) == ["hourly"]
    (project.parent / "keys" / "noise.secret").unlink()
    refused = call("choose", "--project", project, *ASK, "--dry-run", "--json")
    without = json.loads(refused.stdout)
    assert refused.exit_code == without["acceptance"]["refusal"]["exit_code"] == 2
    assert without["acceptance"]["refusal"]["field"] == "secret"
    assert without["histograms"] == figures["histograms"]
    text = project.read_text()
    project.write_text(re.sub(r"(?m)^secret = .*\n", "", text))
    named = call("choose", "--project", project, *ASK, "--dry-run", "--json")
    assert named.exit_code == 2, named.output
    assert json.loads(named.stdout)["acceptance"]["refusal"]["field"] == "secret"


def test_the_guides_example_runs(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    guide = (Path(__file__).parents[3] / "docs" / "guides" / "tuning.md").read_text()
    lines = re.findall(r"^dpstream (choose .*?)(?:  #.*)?$", guide, re.MULTILINE)
    assert len(lines) >= 2
    monkeypatch.chdir(project.parent)
    (project.parent / "last-year.csv").write_text(records(50))
    for line in lines:
        done(call(*(word.strip("'") for word in line.split())))
    assert entries(project) == 1 and load(project, "chosen") == ""


def test_a_test_key_is_stamped(project: Path) -> None:
    write(project, ('secret = "file:keys/noise.secret"', f'insecure_test_secret = "{"0f" * 32}"'))
    assert "INSECURE" in done(choose(project)).stderr
    assert load_job(project, "new").insecure


# --- noise against what is cut -------------------------------------------------------------------


def heavy(users: int) -> str:
    """Most users have 2 records, one in eight has 40: a quantile of .9 would be 40."""
    counts = [40 if u % 8 == 0 else 2 for u in range(users)]
    rows = [
        f"{CANARY}p{u},k{i % 7},2024-01-01T{(u + i) % 12:02d}:30:00Z,{value_of(u)}"
        for u in range(users)
        for i in range(counts[u])
    ]
    return "user,key,time,value\n" + "\n".join(rows) + "\n"


def test_noise_is_weighed_against_what_is_cut(project: Path, tmp_path: Path) -> None:
    """Small keys cannot bear the noise of a large C; what is cut is said."""
    (tmp_path / "other.csv").write_text(heavy(800))
    ask = ("--proxy", str(tmp_path / "other.csv"), "--json")
    proposals = {
        flags: json.loads(done(choose(project, f"n{i}", *flags, ask=ask)).stdout)
        for i, flags in enumerate(
            [("--key-records", "20"), ("--key-records", "20000"), ("--quantile", "0.9")]
        )
    }
    small, large, blind = proposals.values()
    assert small["contributions"] < 10 < large["contributions"] == blind["contributions"] == 40
    covered_share = (7 * min(2, small["contributions"]) + min(40, small["contributions"])) / (
        7 * 2 + 40
    )
    assert small["cut"] == pytest.approx(1 - covered_share, abs=0.02) and large["cut"] == 0
    assert 0 < small["sd"] < large["sd"] / 3
    assert large["per_key"] and all(other["sd"] < large["sd"] for other in large["per_key"])
    for i, proposal in enumerate((small, large)):
        planned = json.loads(done(call("plan", f"n{i}", "--project", project, "--json")).stdout)
        assert proposal["sd"] == pytest.approx(planned["columns"][0]["sd_final"])


def test_a_proposed_bound_per_key_may_be_taken(project: Path) -> None:
    """It was released with the receipt; any other C is one that somebody chose by looking."""
    proposal = json.loads(done(choose(project, "new", "--json")).stdout)
    other, text = proposal["per_key"][0], project.read_text()
    bounds = f"contributions = {other['contributions']}\nper_key_bound = {other['bound']}\n"
    accounts.write(project, text.replace(f"contributions = {proposal['contributions']}\n", bounds))
    assert load(project) == ""
    most = max(proposal["contributions"], *(o["contributions"] for o in proposal["per_key"]))
    for wrong in (f"contributions = {most + 1}\nper_key_bound = 1\n",
                  f"contributions = {most + 1}\n"):  # fmt: skip
        accounts.write(
            project, text.replace(f"contributions = {proposal['contributions']}\n", wrong)
        )
        assert load(project) == "job.new.contributions"


def test_the_new_job_runs_beside_the_old_one(project: Path) -> None:
    """Neither goes on with the other's store, and neither writes into the other's folder."""
    runs = 'contributions = 4\nstore = "hourly.store.db"\nkey = ["key"]'
    write(project, ('key = ["key"]', runs), ("grid = 0.5", "grid = 0.5, bounds = [-100, 200]"),
          ("epsilon = 3.0", "epsilon = 9.0"))  # fmt: skip
    done(call("run", "hourly", "--project", project))
    done(choose(project, "new", "--bounds"))
    stores.close_all()
    made = json.loads(done(call("run", "new", "--project", project, "--json")).stdout)
    assert made["run_id"] and entries(project) == 3
    for folder in ("releases", "releases-new"):
        assert list((project.parent / folder).rglob("*.parquet"))
    assert project.with_name("hourly.store.db").exists()
    assert project.with_name("new.store.db").exists()
    again = json.loads(done(call("run", "hourly", "--project", project, "--json")).stdout)
    assert again["run_id"] != made["run_id"] and entries(project) == 3

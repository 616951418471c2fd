"""Jobs of a project file: decoded strictly; every refusal names field, rule and fix."""

import os
import re
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dpstream.accounting import limits
from dpstream.accounting.budget.allocation import allocate
from dpstream.accounting.errors import DpstreamError, UsageError
from dpstream.accounting.plan.plan import Plan
from dpstream.dp_transforms.noise.secret_source import SecretSource
from dpstream.pipelines.jobs.job import Job, load_job
from dpstream.pipelines.jobs.keys import read_public_keys
from dpstream.pipelines.jobs.secret import new_secret
from dpstream.pipelines.project.project import decode_project
from dpstream.pipelines.project.text import duration_micros, instant_micros
from tests.golden.refusals import Refused

PATH = Path("/nowhere/dpstream.toml")
JOB = """
version = 1
[data_set.flights]
unit = { name = "tailnum", type = "string" }
account = { path = "ledger.db", id = "0acc0acc0acc0acc" }
secret = "file:noise.secret"
[table.flights]
path = "flights/*.parquet"
unit_column = "tailnum"
time_column = "time_hour"
[job.weekly]
table = "flights"
key = ["origin", "carrier"]
aggregate.flights = { kind = "count" }
aggregate.mean_delay = { kind = "mean", column = "dep_delay", bounds = [-60, 60], grid = 1 }
start = "2013-01-01T05:00:00Z"
end = "2014-01-07T05:00:00Z"
max_skew = "0s"
window = "7d"
release_every = "12h"
allowed_lateness = "0s"
budget = { epsilon = 6.0, delta = 1e-9, covers = "7d" }
contributions = 8
mechanism.strategy = "tree"
store = "flights.db"
shards = 4
sink = { kind = "parquet", path = "releases/" }
"""


def write(folder: Path, text: str = JOB) -> Path:
    path = folder / "dpstream.toml"
    path.write_text(text)
    return path


def load(folder: Path, old: str = "", new: str = "") -> Job:
    assert old in JOB
    return load_job(write(folder, JOB.replace(old, new, 1)))


def test_the_example_of_the_design(tmp_path: Path) -> None:
    job = load(tmp_path)
    assert isinstance(job.plan, Plan)
    assert job.plan.source == "parquet:flights/*.parquet"
    assert job.plan.timeline.triggers == 14
    assert job.plan.timeline.windows == 53
    assert job.plan.timeline.period == 7 * 86_400_000_000
    assert job.plan.timeline.slide == job.plan.timeline.window
    assert job.plan.privacy.contributions == 8
    assert job.plan.public_keys is None
    assert job.columns == ("tailnum", "origin", "carrier", "time_hour", "dep_delay")
    assert job.secret.file == str(tmp_path / "noise.secret")
    assert job.state.path == tmp_path / "flights.db"
    assert job.ledger is not None and job.ledger.path == str(tmp_path / "ledger.db")
    assert job.sink.path == str(tmp_path / "releases")
    assert job.source.path == str(tmp_path / "flights/*.parquet")
    assert not job.insecure


def test_the_plan_depends_on_no_folder_and_on_no_performance_setting(tmp_path: Path) -> None:
    plans = []
    for name, more in (("a", ""), ("b", "threads = 1"), ("c", "threads = 5")):
        (tmp_path / name).mkdir()
        plans.append(load(tmp_path / name, "shards = 4", f"shards = 4\n{more}").plan)
    assert len({plan.hash for plan in plans}) == 1


def test_relative_and_absolute_job_paths_are_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = load(tmp_path)
    monkeypatch.chdir(tmp_path)
    assert load_job("dpstream.toml") == job == load_job()


def test_defaults(tmp_path: Path) -> None:
    short = re.sub(r"(?m)^(account|store|shards) = .*\n", "", JOB)
    job = load_job(write(tmp_path, short))
    assert job.ledger is None
    assert job.state.path == tmp_path / "weekly.store.db"
    assert job.state.shards == limits.DEFAULT_SHARDS


@pytest.mark.parametrize(("contributions", "covers", "mechanism", "strategy"), [
    (1, "lifetime", "", "geometric"),
    (8, "lifetime", "", "blt"),
    (1, "lifetime", 'strategy = "blt"', "blt"),
    (1, "lifetime", 'optimise = "lifetime"', "blt"),
    # Each period is a charge, and charges of geometric noise add up in epsilon.
    (1, "window", "", "blt"),
    (1, "7d", 'strategy = "auto"', "blt"),
    (1, "7d", 'optimise = "period"', "geometric"),
    (1, "371d", "", "geometric"),
])  # fmt: skip
def test_a_job_takes_the_family_with_the_smaller_error(
    tmp_path: Path, contributions: int, covers: str, mechanism: str, strategy: str
) -> None:
    text = JOB.replace('mechanism.strategy = "tree"', "MECHANISM")
    text = text.replace("contributions = 8", f"contributions = {contributions}")
    text = text.replace('covers = "7d"', f'covers = "{covers}"')
    text = text.replace('release_every = "12h"', 'release_every = "7d"')
    plan = load_job(
        write(tmp_path, text.replace("MECHANISM", f"mechanism = {{ {mechanism} }}"))
    ).plan
    named = text.replace("MECHANISM", f'mechanism = {{ strategy = "{strategy}" }}')
    assert plan.privacy.strategy == strategy
    assert plan.hash == load_job(write(tmp_path, named)).plan.hash


@pytest.mark.parametrize(("kind", "mechanism", "weighted"), [
    ("count", "", True),
    ("count", 'weights = "uniform"', False),
    # The published count of units is the selection, unless pairs on published keys are skipped.
    ("units", "", False),
    ("units", "skip = true", True),
])  # fmt: skip
def test_usual_weights_suit_the_selection(
    tmp_path: Path, kind: str, mechanism: str, weighted: bool
) -> None:
    text = JOB.replace('mechanism.strategy = "tree"', f"mechanism = {{ {mechanism} }}")
    text = text.replace('kind = "count"', f'kind = "{kind}"')
    assert (load_job(write(tmp_path, text)).plan.privacy.weights is not None) is weighted


#: A field, and the section or table that it stands in, by a line or a part of one before it.
PLACES = {
    "data_set.flights": "[data_set.flights]\n",
    "data_set.flights.unit": 'unit = { name = "tailnum",',
    "data_set.flights.account": 'account = { path = "ledger.db",',
    "table.flights": "[table.flights]\n",
    "job.weekly": "[job.weekly]\n",
    "job.weekly.aggregate.mean_delay": 'column = "dep_delay",',
    "job.weekly.budget": "budget = { epsilon = 6.0,",
    "job.weekly.sink": 'sink = { kind = "parquet",',
}


@pytest.mark.parametrize("where", sorted(PLACES))
def test_unknown_fields_are_refused_at_every_level(
    tmp_path: Path, where: str, refused: Refused
) -> None:
    anchor = PLACES[where]
    extra = anchor + ("colour = 1\n" if anchor.endswith("\n") else " colour = 1, ")
    refused(load, tmp_path, anchor, extra)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("epsilon = 6.0", "epsilonn = 6.0"),
        ("sink =", "sinks ="),
        (" delta = 1e-9,", ""),
        ('end = "2014-01-07T05:00:00Z"', ""),
        ('kind = "count"', 'kind = "median"'),
        ("*.parquet", "*.xlsx"),
        ("contributions = 8", "contributions = 8.5"),
        ("contributions = 8", "contributions = 0"),
        ("contributions = 8", 'contributions = "8"'),
        ("epsilon = 6.0", "epsilon = nan"),
        ("epsilon = 6.0", "epsilon = inf"),
        ("epsilon = 6.0", "epsilon = -1"),
        ("epsilon = 6.0", "epsilon = 1" + "0" * 400),
        ("epsilon = 6.0", "epsilon = 1" + "0" * 5000),
        ("delta = 1e-9", "delta = 1.0"),
        ("bounds = [-60, 60]", "bounds = [60, -60]"),
        ("bounds = [-60, 60]", "bounds = [-60]"),
        ("bounds = [-60, 60]", "bounds = [-inf, 60]"),
        ("bounds = [-60, 60]", "bounds = [-1e61, 60]"),
        ("grid = 1", "grid = 1e-12"),
        ('start = "2013-01-01T05:00:00Z"', "start = 2013-01-01T05:00:00Z"),
        ('start = "2013-01-01T05:00:00Z"', 'start = "2013-01-01T05:00:00"'),
        ('window = "7d"', 'window = "7 dd"'),
        ('window = "7d"', 'window = "1.0000001s"'),
        ('window = "7d"', 'window = "5h"'),
        ('window = "7d"', 'window = "7d"\nslide = "14d"'),
        ("shards = 4", "shards = 0"),
        ("shards = 4", "threads = 0"),
        ("shards = 4", 'publication = { title = "T", labels = { page = "Page" } }'),
        ("shards = 4", "threads = 65"),
        ('"flights.db"', '"redis://x"'),
        ('path = "releases/"', 'path = ""'),
        ("[table.flights]", "[table.flights"),
        ('key = ["origin"', 'key = ["flights"'),
        ('time_column = "time_hour"', 'time_column = { column = "origin", unit = "s" }'),
        ('id = "0acc', 'limit = { epsilon = 6.0, delta = 1e-9 }, id = "0acc'),
        ('id = "0acc', 'id = "acc'),
        ('secret = "file:noise.secret"', 'insecure_test_secret = "ab"'),
    ],
)  # fmt: skip
def test_unusable_jobs_exit_2(tmp_path: Path, old: str, new: str, refused: Refused) -> None:
    refused(load, tmp_path, old, new)


@pytest.mark.parametrize(
    ("anchor", "line"),
    [
        ("[job.weekly]\n", 'session_gap = "10m"\n'),
        ("[job.weekly]\n", "trigger_count = 100\n"),
        ("[job.weekly]\n", 'watermark_delay = "10m"\n'),
    ],
)
def test_data_dependent_settings_exit_3(
    tmp_path: Path, anchor: str, line: str, refused: Refused
) -> None:
    caught = refused(load, tmp_path, anchor, anchor + line)
    assert line.split(" ", maxsplit=1)[0] in caught.field


def test_there_is_no_unsound_mode(tmp_path: Path, refused: Refused) -> None:
    for new in ('mechanism.mode = "rounds"', "mechanism.allow_unsound = true"):
        refused(load, tmp_path, 'mechanism.strategy = "tree"', new)


def test_unreadable_files(tmp_path: Path, refused: Refused) -> None:
    for path in (tmp_path / "none.toml", tmp_path):
        refused(load_job, path)
    big = tmp_path / "big.toml"
    big.write_bytes(b"#" * ((1 << 20) + 1))
    refused(load_job, big)
    for text in (b"\xff\xfe", b"a = " + b"[" * 5000):
        refused(decode_project, text, PATH)


@given(st.binary(max_size=200), st.integers(0, len(JOB)), st.integers(0, 40))
def test_a_damaged_job_is_refused_or_loaded_never_a_crash(
    junk: bytes, at: int, removed: int
) -> None:
    text = JOB.encode()
    try:
        decode_project(text[:at] + junk + text[at + removed :], PATH).job("weekly")
    except DpstreamError as error:
        assert error.exit_code in (2, 3)


@pytest.mark.parametrize(
    ("text", "micros"),
    [
        ("7d", 7 * 86_400_000_000),
        ("12h", 43_200_000_000),
        ("15m", 900_000_000),
        ("86.4s", 86_400_000),
        ("100ms", 100_000),
        ("3us", 3),
        ("0.1s", 100_000),
        ("2w", 1_209_600_000_000),
        ("0s", 0),
    ],
)
def test_durations(text: str, micros: int) -> None:
    assert duration_micros("window", text) == micros


@given(st.integers(0, 10**15), st.sampled_from(["s", "ms", "m", "d"]))
def test_durations_are_exact(number: int, unit: str) -> None:
    scale = {"s": 10**6, "ms": 1000, "m": 60 * 10**6, "d": 86400 * 10**6}[unit]
    expected = Fraction(number, 1000) * scale
    text = f"{number // 1000}.{number % 1000:03d}{unit}"
    if expected.denominator == 1 and expected < 1 << 62:
        assert duration_micros("f", text) == expected
    else:
        with pytest.raises(UsageError):
            duration_micros("f", text)


@pytest.mark.parametrize(
    ("text", "micros"),
    [
        ("1970-01-01T00:00:00Z", 0),
        ("1970-01-01t00:00:00.000001z", 1),
        ("1969-12-31T23:59:59.999999Z", -1),
        ("1970-01-01T02:00:00+02:00", 0),
        ("1969-12-31T19:30:00-04:30", 0),
        ("2013-01-01T05:00:00Z", 1_357_016_400_000_000),
        ("2013-01-01 05:00:00.500000000Z", 1_357_016_400_500_000),
        ("9999-12-31T23:59:59Z", 253_402_300_799_000_000),
    ],
)
def test_instants(text: str, micros: int) -> None:
    assert instant_micros("start", text) == micros


@pytest.mark.parametrize(
    "text",
    ["", "2013-13-01T00:00:00Z", "2013-02-29T00:00:00Z", "2013-01-01T24:00:00Z",
     "2013-01-01T00:00:00.0000001Z", "2013-01-01T00:00:00+24:00", "٢٠١٣-01-01T00:00:00Z"],
)  # fmt: skip
def test_no_instants(text: str, refused: Refused) -> None:
    refused(instant_micros, "start", text)


def with_keys(folder: Path, csv_text: str) -> Job:
    (folder / "keys.csv").write_text(csv_text)
    return load(folder, "shards = 4", 'shards = 4\npublic_keys = "keys.csv"')


def test_public_keys_name_a_set(tmp_path: Path, refused: Refused) -> None:
    first = with_keys(tmp_path, "origin,carrier\nJFK,AA\nEWR,UA\n")
    other_order = with_keys(tmp_path, "carrier,note,origin\nUA,x,EWR\nAA,y,JFK\nAA,z,JFK\n")
    another = with_keys(tmp_path, "origin,carrier\nJFK,AA\nEWR,UB\n")
    shifted = with_keys(tmp_path, "origin,carrier\nJFKA,A\nEWR,UA\n")
    assert first.plan.public_keys == other_order.plan.public_keys
    digests = {j.plan.public_keys for j in (first, another, shifted)}
    assert len(digests) == 3
    assert not first.plan.design.selects
    table = read_public_keys(shifted)
    assert table.to_pylist() == [
        {"origin": "EWR", "carrier": "UA"},
        {"origin": "JFKA", "carrier": "A"},
    ]
    refused(read_public_keys, first)


@pytest.mark.parametrize("strategy", ["", "auto", "geometric"])
def test_public_keys_need_no_delta(strategy: str, tmp_path: Path, refused: Refused) -> None:
    given = f'mechanism.strategy = "{strategy}"' if strategy else ""
    text = JOB.replace('mechanism.strategy = "tree"', given)
    text = text.replace("delta = 1e-9", "delta = 0")
    refused(lambda: load_job(write(tmp_path, text)))
    (tmp_path / "keys.csv").write_text("origin,carrier\nJFK,AA\n")
    text = text.replace("shards = 4", 'shards = 4\npublic_keys = "keys.csv"')
    budget = allocate(load_job(write(tmp_path, text)).plan)
    assert budget.plain and (budget.epsilon, budget.delta) == (6.0, 0.0)


@pytest.mark.parametrize(
    "text",
    ["", "origin\nJFK\n", "origin,carrier\n", "origin,carrier\nCANARY\n",
     "origin,origin,carrier\nCANARY,a,b\n", 'origin,carrier\n"CANARY,b\n',
     "origin,carrier\nCANARY" + "x" * 1024 + ",b\n"],
)  # fmt: skip
def test_bad_public_keys_are_refused_without_their_content(
    tmp_path: Path, text: str, refused: Refused
) -> None:
    caught = refused(with_keys, tmp_path, text)
    assert "CANARY" not in str(caught)


def test_typed_public_keys(tmp_path: Path, refused: Refused) -> None:
    (tmp_path / "keys.csv").write_text("origin,carrier\n-1,true\n10,false\n")
    columns = {"origin": "int", "carrier": "bool"}
    typed = ", ".join(f'{{ column = "{c}", type = "{t}" }}' for c, t in columns.items())
    text = JOB.replace('key = ["origin", "carrier"]', f"key = [{typed}]")
    text = text.replace("shards = 4", 'shards = 4\npublic_keys = "keys.csv"')
    job = load_job(write(tmp_path, text))
    assert read_public_keys(job).to_pydict() == {"origin": [-1, 10], "carrier": [True, False]}
    for bad in ("01,true", "1.0,true", "1,True", f"{1 << 63},true", "--1,true", "٣,true"):
        (tmp_path / "keys.csv").write_text(f"origin,carrier\n{bad}\n")
        refused(load_job, tmp_path)


def fingerprint(path: Path) -> str:
    with SecretSource(f"file:{path}").ring() as ring:
        return ring.fingerprint


def test_secrets(tmp_path: Path, refused: Refused) -> None:
    path = tmp_path / "noise.secret"
    new_secret(path)
    assert os.stat(path).st_mode & 0o777 == 0o600
    first = fingerprint(path)
    refused(new_secret, path)
    assert fingerprint(path) == first
    new_secret(tmp_path / "other.secret")
    assert fingerprint(tmp_path / "other.secret") != first
    refused(new_secret, tmp_path / "none" / "noise.secret")


def test_insecure_settings_show(tmp_path: Path, refused: Refused) -> None:
    fixed = f'insecure_test_secret = "{"0f" * 32}"'
    assert load(tmp_path, 'secret = "file:noise.secret"', fixed).insecure
    refused(load, tmp_path, "secret =", f"{fixed}\nsecret =")


@pytest.mark.parametrize(
    ("text", "remember"),
    [("run", "run"), ("never", "never"), ("30d", 30 * 86_400_000_000), ("12h", 43_200_000_000)],
)
def test_how_long_keys_are_remembered(text: str, remember: object, tmp_path: Path) -> None:
    job = load(tmp_path, "shards = 4", f'remember_keys = "{text}"')
    assert job.plan.remember == remember
    assert job.plan.design.remembers == (remember != "never")
    assert load(tmp_path).plan.remember is None


@pytest.mark.parametrize("text", ["forever", "0d", "5h", ""])
def test_other_words_are_no_time_to_remember(text: str, tmp_path: Path, refused: Refused) -> None:
    refused(load, tmp_path, "shards = 4", f'remember_keys = "{text}"')

"""The interface of sinks, and the registry of kinds."""

import os
import sys
from argparse import Namespace
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import apache_beam as beam
import msgspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from apache_beam.testing.util import assert_that, equal_to
from msgspec.structs import replace
from typing_extensions import override

from dpstream.accounting.errors import PolicyError, RunError
from dpstream.accounting.strategies.cells.mixing import mixed
from dpstream.accounting.strategies.cells.strategy import identity
from dpstream.dp_transforms import release as release_stage
from dpstream.dp_transforms.batches import DEAD_LETTER_SCHEMA, PART
from dpstream.pipelines.connectors.dead_letters import check_dead_letters
from dpstream.pipelines.connectors.files.sink import FileSink
from dpstream.pipelines.connectors.files.source import FilesInput, batches, recorded
from dpstream.pipelines.connectors.query import (
    QueryRows,
    add_cells,
    apply_query,
    query_of,
    with_cells,
    with_query,
)
from dpstream.pipelines.connectors.registry import input_of, sink_of
from dpstream.pipelines.connectors.sink import (
    ReadableSink,
    RunManifest,
    SealMessage,
    WriteOnlySink,
    digest_of,
    is_row,
    manifest_key,
    messages_of,
)
from dpstream.pipelines.connectors.write import (
    WriteDeadLetters,
    dead_letter_folder,
    write_dead_letters,
)
from dpstream.pipelines.formats.encodings import read_releases
from dpstream.pipelines.jobs.job import Job, load_job
from dpstream.pipelines.project.job_section import SinkSection
from dpstream.pipelines.project.source import Source
from dpstream.pipelines.report.data import inventory
from dpstream.pipelines.stream.run import run_job
from dpstream.pipelines.workload.registered import cells_job
from dpstream.state import open as stores
from tests.faults.damage import flip
from tests.golden.refusals import Refused
from tests.pipelines.connectors.files.test_sink import release
from tests.pipelines.sql.shop import all_rows, rows, with_text
from tests.pipelines.workload.survey import survey, workload
from tests.published import Published
from tests.written import read_dead_letters, write_release

KAFKA = 'kind = "kafka"\ntopic = "t"\nservers = "b:9092"'
PUBSUB = 'kind = "pubsub"\ntopic = "projects/p/topics/t"'
BIGQUERY = 'kind = "bigquery"\ntable = "p.d.t"'
FILES = 'kind = "csv"\npath = "out"'


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Published:
    return Published(tmp_path_factory.mktemp("tables"))


@pytest.mark.parametrize(
    "sink",
    [
        f'{FILES}\ntopic = "t"',
        f'{KAFKA}\npath = "out"',
        f'{PUBSUB}\nservers = "b"',
        f'{BIGQUERY}\noptions = {{ a = "b" }}',
        'kind = "csv"',
        'kind = "kafka"\ntopic = "t"',
        'kind = "pubsub"\ntopic = "t"',
        'kind = "bigquery"\ntable = "d.t"',
        'kind = "bigquery"\ntable = "p.d.t`x"',
    ],
)
def test_fields_of_other_kinds_are_refused(place: Published, sink: str, refused: Refused) -> None:
    refused(place.job, sink)


@pytest.mark.parametrize(
    ("sink", "words"),
    [
        (KAFKA, "Kafka's topic t"),
        (PUBSUB, "Pub/Sub's topic projects/p/topics/t"),
        (BIGQUERY, "BigQuery's table p.d.t"),
    ],
)
def test_every_kind_says_where_it_is(
    place: Published, sink: str, words: str, refused: Refused
) -> None:
    job = place.job(sink)
    assert sink_of(job).description == words and job.sink.folder is None
    assert job.sink.file_kind == "parquet"
    assert dead_letter_folder(job) == job.path.parent / "dead_letter" / "pages"
    refused(inventory, job)


def test_files_are_as_before(place: Published) -> None:
    job = place.job(FILES)
    assert sink_of(job).description == f"csv files below {job.path.parent / 'out'}"
    assert dead_letter_folder(job) == job.path.parent / "dead_letter" / "pages"
    assert job.sink.folder == Path(job.sink.path) and job.sink.file_kind == "csv"


@pytest.mark.parametrize("sink", [PUBSUB, BIGQUERY])
def test_what_cannot_be_read_back_says_so(place: Published, sink: str, refused: Refused) -> None:
    target = sink_of(place.job(sink))
    assert not isinstance(target, ReadableSink)
    assert target.used() is None and target.manifests() == []
    assert [*target.published(), *target.unsealed()] == []
    refused(lambda: target.holds(pa.record_batch({})))
    refused(target.prepare, restoring=True)


class Noted(WriteOnlySink):
    """Keeps what it is given, in order."""

    kind = "pubsub"
    field = "sink.topic"
    called, place = "topic", "t"

    def __init__(self, run_id: str | None = None) -> None:
        super().__init__(run_id)
        self.put: list[Any] = []

    @override
    def _put_rows(self, run_id: str, releases: Sequence[Any]) -> None:
        self.put += [(run_id, key) for release in releases for key in release.keys]

    @override
    def _put_control_messages(self, messages: Sequence[Any]) -> None:
        self.put += [m.name for m in messages]

    @override
    def close(self) -> None:
        pass


def test_each_row_has_its_release_id_for_a_name() -> None:
    batch = release(12, 5, ["a"])
    messages = messages_of(batch)
    assert messages.name == (12, 5) and messages.keys == [bytes(range(7, 23)).hex()]
    assert is_row(messages.keys[0]) and not is_row(messages.seal.key)
    assert msgspec.json.decode(messages.values[0])["key"] == "a"
    assert messages.seal == SealMessage(
        "seal", 12, 5, 1, digest_of([(messages.keys[0], messages.values[0])])
    )
    assert messages_of(release(12, 6, [])).seal.rows == 0


def test_the_digest_is_of_the_set_of_rows() -> None:
    rows = [("b", b"1"), ("a", b"2")]
    assert digest_of(rows) == digest_of(rows[::-1])
    assert len({digest_of(rows), digest_of(rows[:1]), digest_of([("b", b"1"), ("c", b"3")])}) == 3
    assert digest_of([("a", b"12")]) != digest_of([("a", b"1"), ("b", b"2")])


def test_names_of_seals_and_manifests() -> None:
    assert SealMessage("seal", 12, 5, 1, "d").key == "seal-000012-000005"
    assert SealMessage("seal", 12, 5, 1, "d", 3, 7).key == "seal-000012-000005-000003"
    assert (manifest_key(0), manifest_key(1)) == ("run", "run-epoch-1")


def test_a_seal_is_written_when_all_rows_are_there(refused: Refused) -> None:
    sink = Noted()
    refused(lambda: sink.write([release(0, 1, ["a"])]))
    sink.put_manifest(RunManifest(1, "r1", 2, "hash", "pubsub"))
    row = bytes(range(7, 23)).hex()
    assert sink.write([release(0, 1, ["a"]), release(0, 2, [])]) == [(0, 1), (0, 2)]
    assert sink.put == [
        "r1/run-epoch-2", ("r1", row), "r1/seal-000000-000001", "r1/seal-000000-000002",
    ]  # fmt: skip


def test_a_seal_for_each_part() -> None:
    """The release is published with the last of them."""
    sink, batch = Noted("r1"), release(12, 5, ["a"])
    parts = [
        batch.replace_schema_metadata(batch.schema.metadata | {PART: f"{number}/2".encode()})
        for number in range(2)
    ]
    assert [sink.write([part]) for part in parts] == [[], [(12, 5)]]
    assert sink.put[1::2] == ["r1/seal-000012-000005-000000", "r1/seal-000012-000005-000001"]


def test_what_cannot_be_read_back_cannot_be_compared() -> None:
    sink = Noted("r1")
    sink.prepare()
    for refused in (lambda: sink.prepare(restoring=True), lambda: sink.write([], True)):
        with pytest.raises(PolicyError) as error:
            refused()
        assert error.value.field == "sink.kind"
    assert sink.put == []


def test_a_batch_says_its_release_or_is_none() -> None:
    with pytest.raises((KeyError, TypeError, RunError)):
        messages_of(pa.RecordBatch.from_pydict({"x": [1]}))


@pytest.mark.parametrize("kind", ["parquet", "csv", "jsonl"])
def test_files_are_one_class_for_all_kinds(kind: str, make_job: Callable[..., Job]) -> None:
    job = make_job(kind, sink=kind)
    assert type(input_of(job)) is FilesInput and input_of(job).bounded
    sink = sink_of(job)
    assert type(sink) is FileSink and sink.kind == kind


@pytest.mark.parametrize(
    ("table", "name"),
    [(SinkSection("kafka", topic="t", servers="h:1"), "KafkaSink"),
     (SinkSection("pubsub", topic="projects/p/topics/t"), "PubsubSink"),
     (SinkSection("bigquery", table="p.d.t"), "BigQuerySink")],
)  # fmt: skip
def test_services_have_a_class_each(
    table: SinkSection, name: str, make_job: Callable[..., Job]
) -> None:
    sink = sink_of(msgspec.structs.replace(make_job(), sink=table))
    assert type(sink).__name__ == name and sink.kind == table.kind


def test_kafka_without_its_client(
    make_job: Callable[..., Job], monkeypatch: pytest.MonkeyPatch, refused: Refused
) -> None:
    source = Source("kafka", topic="t", servers="h:1")
    job = msgspec.structs.replace(make_job(), source=source)
    monkeypatch.setitem(sys.modules, "confluent_kafka", None)
    for name in [n for n in sys.modules if n.startswith("dpstream.pipelines.connectors.kafka.")]:
        monkeypatch.delitem(sys.modules, name)
    refused(input_of, job)


# Writing of releases and dead letters, and the check of dead letters.


def test_dead_letters_are_their_owners_from_the_first_byte(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the umask; releases can be read by others and written by their owner alone."""
    modes, link = [], os.link

    def look(draft: Path, path: Path) -> None:
        modes.append(draft.stat().st_mode & 0o777)
        link(draft, path)

    monkeypatch.setattr(os, "link", look)
    folder, letters = (
        tmp_path / "new" / "dead_letter" / "out",
        pa.RecordBatch.from_pylist(
            [{"partition": 0, "offset": 1, "reason": "malformed"}], schema=DEAD_LETTER_SCHEMA
        ),
    )
    old = os.umask(0)
    try:
        path = write_dead_letters(folder, [letters])
        write_release(tmp_path / "out", "csv", release(0, 1, ["a"]))
        (tmp_path / "mine").mkdir(mode=0o750)
        write_dead_letters(tmp_path / "mine", [letters])
    finally:
        os.umask(old)
    assert path is not None and path.stat().st_mode & 0o777 == 0o600
    assert modes == [0o600, 0o644, 0o600]
    assert folder.stat().st_mode & 0o777 == 0o700
    assert (tmp_path / "mine").stat().st_mode & 0o777 == 0o750
    assert read_dead_letters(folder).num_rows == 1


@pytest.mark.parametrize("kind", ["parquet", "csv", "kafka", "pubsub", "bigquery"])
def test_dead_letters_of_every_kind_of_sink_are_written_so(tmp_path: Path, kind: str) -> None:
    """There is one writer, whatever the sink: it knows a folder only."""
    job = Namespace(dead_letter=str(tmp_path / "dead"), sink=Namespace(kind=kind))
    writer = WriteDeadLetters(job)._dofn  # type: ignore[arg-type]
    writer.start_bundle()
    row = {"partition": 0, "offset": 1, "reason": "malformed"}
    list(writer.process(pa.RecordBatch.from_pylist([row], schema=DEAD_LETTER_SCHEMA)))
    writer.finish_bundle()
    paths = [p for p in dead_letter_folder(job).iterdir()]  # type: ignore[arg-type]
    assert [p.stat().st_mode & 0o777 for p in paths] == [0o600]


def test_a_damaged_file_is_refused_and_written_again(tmp_path: Path, refused: Refused) -> None:
    """Whoever has the same dead letters again puts the file right."""
    rows = [{"partition": 0, "offset": 1, "reason": "malformed"}]
    letters = pa.RecordBatch.from_pylist(rows, schema=DEAD_LETTER_SCHEMA)
    folder = tmp_path / "dead"
    check_dead_letters(folder)
    path = write_dead_letters(folder, [letters])
    assert path is not None
    before = path.read_bytes()
    check_dead_letters(folder)
    flip(path, 8 * (len(before) // 2))
    refused(check_dead_letters, folder)
    assert write_dead_letters(folder, [letters]) == path
    check_dead_letters(folder)
    assert path.read_bytes() == before and path.stat().st_mode & 0o777 == 0o600


# A job's query between its source and the flow: rows, dead letters, releases, stores.


_TEXT = (
    "SELECT s.section AS page, v.n AS x FROM visits AS v LEFT JOIN sections AS s "
    "ON v.page = s.page WHERE v.flag"
)


@pytest.fixture
def job(tmp_path: Path) -> Job:
    return with_text(tmp_path, _TEXT)


def _dead(folder: Path) -> list[tuple[int, int, str]]:
    files = sorted(folder.rglob("*.parquet"))
    letters = [one for file in files for one in pq.read_table(file).to_pylist()]
    return sorted((one["partition"], one["offset"], one["reason"]) for one in letters)


def test_the_same_rows_with_and_without_beam(job: Job) -> None:
    wanted = [batch.to_pylist() for batch in apply_query(job, batches(job))]
    assert wanted and all(wanted)

    def same(outputs: list[pa.RecordBatch]) -> None:
        key = lambda rows: str(rows[0])  # noqa: E731
        assert sorted((b.to_pylist() for b in outputs), key=key) == sorted(wanted, key=key)

    with beam.Pipeline() as pipeline:
        read = pipeline | beam.Create(list(batches(job)))
        assert_that(with_query(read, job), same)


def test_a_batch_of_which_nothing_stays_is_none(job: Job) -> None:
    dofn = QueryRows(query_of(job))
    dofn.setup()
    assert len(list(dofn.process(all_rows(job)))) == 1
    assert list(dofn.process(all_rows(job).slice(0, 0))) == []
    dofn.teardown()
    dofn.teardown()


def test_a_job_without_query_is_left_alone(job: Job) -> None:
    bare = replace(job, source=replace(job.source, query=None))
    inputs = [all_rows(job)]
    assert with_query(inputs, bare) is inputs and list(apply_query(bare, inputs)) == inputs


def test_bad_rows_are_dead_letters_at_their_own_positions(job: Job, tmp_path: Path) -> None:
    run_job(job)
    table, wanted = rows(), list[tuple[int, int, str]]()
    sections = {"p0": "shop", "p1": "help", "p2": "shop"}
    for i, row in enumerate(table.to_pylist()):
        if row["flag"] != "true":
            continue  # left out by the query: no dead letter
        reason = None
        if row["user"] is None:
            reason = "unit"
        elif row["page"] not in sections:
            reason = "key"
        elif row["at"] == "noon":
            reason = "time"
        elif row["n"] == "many":
            reason = "value"
        if reason is not None:
            wanted.append((i // 300, i % 300, reason))
    letters = _dead(dead_letter_folder(job))
    assert letters == sorted(wanted) and len(letters) > 30
    stores.close_all()


def test_another_text_is_refused_by_the_store(job: Job, tmp_path: Path, refused: Refused) -> None:
    run_job(job)
    path = tmp_path / "live.sql"
    text = path.read_text()
    path.write_text(text.replace("WHERE v.flag", "WHERE NOT v.flag"))
    other = load_job(tmp_path)
    assert other.plan.hash != job.plan.hash
    refused(run_job, other)
    path.write_text(text)
    (tmp_path / "sections.csv").write_text("page,section,weight\np0,other,1\n")
    refused(lambda: run_job(load_job(tmp_path)))
    stores.close_all()


def test_recorded_files_go_through_the_query_too(job: Job, tmp_path: Path) -> None:
    other = recorded(job, str(tmp_path / "in" / "0.csv"), "--proxy")
    [batch] = apply_query(other, batches(other))
    assert batch.schema.names == ["user", "at", "page", "x"]


@pytest.mark.parametrize("kind", ["parquet", "csv", "jsonl"])
def test_releases_in_parts_have_the_same_rows(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For whoever reads them; a finished run finds them complete, or completes them."""
    made, sink = Published(tmp_path), f'kind = "{kind}"\npath = "{{}}"'
    _, expected = made.files()
    undivided = inventory(made.run(sink.format("whole"), "of-whole"))
    monkeypatch.setattr(release_stage, "RELEASE_ROWS", 1)
    monkeypatch.setattr(release_stage, "MERGED_ROWS", 1)
    job = made.run(sink.format("parts"), "of-parts")
    there = sorted(Path(job.sink.path).rglob("part-*"))
    assert read_releases(job.sink.path, expected.schema).equals(expected) and len(there) > 1
    assert [r._replace(path=Path()) for r in inventory(job).releases] == [
        r._replace(path=Path()) for r in undivided.releases
    ]
    there[1].unlink()
    made.run(sink.format("parts"), "of-parts")
    assert read_releases(job.sink.path, expected.schema).equals(expected)


@pytest.mark.parametrize("batch_rows", [7, 100])
def test_releases_do_not_depend_on_batches(batch_rows: int, tmp_path: Path) -> None:
    releases = []
    for folder in ("one", "other"):
        (tmp_path / folder).mkdir()
        job = with_text(tmp_path / folder, _TEXT)
        if folder == "other":
            job = msgspec.structs.replace(job, batch_rows=batch_rows)
        run_job(job)
        stores.close_all()
        releases.append(read_releases(job.sink.path))
    assert releases[0].num_rows > 0 and releases[0].equals(releases[1])


def test_with_and_without_beam(tmp_path: Path) -> None:
    plain = survey(tmp_path, 50)
    job = cells_job(plain, workload(), mixed(identity(workload()), workload().sizes), False)
    read = list(batches(job))
    assert list(add_cells(plain, read)) == read
    numbers = [cell for b in add_cells(job, read) for cell in b.column("cell").to_pylist()]
    assert len(numbers) == 50 and None in numbers and max(c for c in numbers if c is not None) < 10
    with beam.Pipeline() as pipeline:
        given = pipeline | beam.Create(read)
        cells = with_cells(given, job) | beam.FlatMap(lambda b: b.column("cell").to_pylist())
        assert_that(cells, equal_to(numbers))
    assert with_cells(given, plain) is given
    assert isinstance(read[0], pa.RecordBatch)

"""The sink of Kafka on a real broker: one value per release id, whatever is repeated or killed."""

import secrets
import threading
import time
from collections.abc import Iterator
from contextlib import closing, nullcontext, suppress
from pathlib import Path
from unittest import mock

import confluent_kafka
import msgspec
import pyarrow as pa
import pytest
from typing_extensions import override

from dpstream.accounting.errors import PolicyError, RunError, instance
from dpstream.dp_transforms import release
from dpstream.dp_transforms.batches import PART
from dpstream.pipelines.connectors.kafka import sink as sink_kafka
from dpstream.pipelines.connectors.kafka.client import KafkaTopic
from dpstream.pipelines.connectors.kafka.sink import (
    KafkaSink,
    PublishedTopic,
    decoded,
    manifest_name,
    read_kafka_releases,
)
from dpstream.pipelines.connectors.registry import sink_of
from dpstream.pipelines.connectors.run_manifest import write_manifest
from dpstream.pipelines.connectors.sink import (
    ReleaseMessages,
    RunManifest,
    SealMessage,
    is_row,
    messages_of,
)
from dpstream.pipelines.jobs.job import Job, load_job
from dpstream.pipelines.operate import state_admin
from dpstream.pipelines.operate.state_admin import export, publish
from dpstream.pipelines.stream.begin import begin, prepare
from dpstream.state import open as stores
from dpstream.state.retention_store import RetentionStore
from tests.golden.refusals import Refused
from tests.kafka_broker import Broker, running
from tests.pipelines.cli.test_unbounded_cli import job_file, lived
from tests.pipelines.kafka_jobs import (
    broker,
    contents,
    fresh,
    gone,
    made,
    meanwhile,
    one_value_per_name,
    run_name,
    table,
    topic_of,
)
from tests.published import RUNS, Published

__all__ = ["broker", "fresh", "made"]

OLDER = "older than its sink"
#: ``send`` is called for: the manifest, then rows and seals of the releases of a bundle.
SEND = "dpstream.pipelines.connectors.kafka.client:KafkaTopic.send"


def kafka_sink(job: Job) -> KafkaSink:
    return instance(sink_of(job), KafkaSink)


@pytest.mark.parametrize("partitions", [1, 4])
def test_the_topic_holds_what_the_files_hold(
    broker: Broker, fresh: Published, made: tuple[Published, pa.Table], partitions: int
) -> None:
    topic = topic_of(broker, partitions)
    job = fresh.run(table(broker, topic))
    assert made[1].num_rows > 10
    assert read_kafka_releases(job).equals(made[1])
    by_key = contents(job)
    assert all(len(values) == 1 for values in by_key.values())
    seals = [msgspec.json.decode(v[0]) for k, v in by_key.items() if k.startswith("seal-")]
    assert len(seals) == RUNS and sum(seal["rows"] for seal in seals) == made[1].num_rows
    manifest = msgspec.json.decode(by_key[run_name(job)][0])
    assert manifest["kind"] == "kafka" and run_name(job) == f"run-{manifest['run_id']}"
    # A compacted topic keeps nothing but these names.
    assert sum(is_row(key) for key in by_key) == made[1].num_rows == len(by_key) - RUNS - 1


def test_messages_bear_the_facts(broker: Broker, fresh: Published) -> None:
    """Rows the shortest of them, the manifest those of its run, a seal those of its release."""
    job = fresh.run(table(broker, topic_of(broker)))
    settings = {
        "bootstrap.servers": broker.servers,
        "group.id": "facts",
        "enable.partition.eof": True,
    }
    consumer, headers, ends = confluent_kafka.Consumer(settings), {}, 0
    with closing(consumer):
        places = [confluent_kafka.TopicPartition(job.sink.topic, n, 0) for n in range(3)]
        consumer.assign(places)
        while ends < 3:
            for message in consumer.consume(100, 1.0):
                ends += message.error() is not None
                if message.error() is None:
                    headers[message.key().decode()] = dict(message.headers() or [])
    rows = [given for name, given in headers.items() if is_row(name)]
    assert len(rows) > 10 and all(given == rows[0] for given in rows)
    assert rows[0] == {
        "epsilon": b"20.0", "delta": b"0.01", "covers": b"lifetime", "unit": b"user",
        "contributions": b"9", "stamps": b"INSECURE",
    }  # fmt: skip
    seal = msgspec.json.decode(headers["seal-000001-000003"]["dpstream"])
    assert (seal.pop("window")["number"], seal.pop("trigger")["number"]) == (1, 3)
    assert seal == msgspec.json.decode(headers[run_name(job)]["dpstream"])
    assert seal["guarantee"]["epsilon"] == 20.0 and seal["contributions"] == 9


def test_parts_are_read_as_one_release(
    broker: Broker,
    fresh: Published,
    made: tuple[Published, pa.Table],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Without the seal of one of its parts a release is not published."""
    monkeypatch.setattr(release, "RELEASE_ROWS", 1)
    monkeypatch.setattr(release, "MERGED_ROWS", 1)
    job = fresh.run(table(broker, topic_of(broker)))
    assert read_kafka_releases(job).equals(made[1])
    seals = [(key, v[0], 0) for key, v in contents(job).items() if not is_row(key)]
    rows = [(key, v[0], 0) for key, v in contents(job).items() if is_row(key)]
    [*_, lost] = sorted(key for key, _, _ in seals if key.count("-") == 3)
    other = fresh.job(table(broker, topic_of(broker)))
    topic = KafkaTopic(broker.servers, other.sink.topic or "", {})
    topic.send([*rows, *(seal for seal in seals if seal[0] != lost)])
    published = {one[:2] for one in kafka_sink(other).published()}
    assert len(published) == RUNS - 1 and read_kafka_releases(other).num_rows < made[1].num_rows
    assert (
        set(kafka_sink(other).unsealed())
        == {one[:2] for one in kafka_sink(job).published()} - published
    )
    fresh.run(table(broker, other.sink.topic or ""))
    assert read_kafka_releases(other).equals(made[1])


def test_a_second_run_writes_nothing(broker: Broker, fresh: Published) -> None:
    sink = table(broker, topic_of(broker))
    before = contents(fresh.run(sink))
    assert contents(fresh.run(sink)) == before


def test_lines_are_those_of_the_files(fresh: Published, made: tuple[Published, pa.Table]) -> None:
    job = fresh.run('kind = "jsonl"\npath = "lines"')
    for batch in fresh.batches():
        messages = messages_of(batch)
        window, trigger = messages.name
        file = Path(job.sink.path) / f"window-{window:06d}" / f"trigger-{trigger:06d}.jsonl"
        assert b"".join(v + b"\n" for v in messages.values) == file.read_bytes()
        assert messages.keys == [v.hex() for v in batch["release_id"].to_pylist()]
        assert messages.seal.rows == batch.num_rows


@pytest.mark.parametrize("nth", [2, 3])
def test_killed_before_rows_and_before_the_seal(
    broker: Broker, fresh: Published, made: tuple[Published, pa.Table], nth: int
) -> None:
    sink = table(broker, topic_of(broker))
    fresh.killed(sink, SEND, nth)
    job = fresh.job(sink)
    rows = [key for key in contents(job) if is_row(key)]
    assert bool(rows) == (nth == 3) and not list(kafka_sink(job).published())
    assert read_kafka_releases(job).num_rows == 0  # nothing is sealed
    again = contents(fresh.run(sink))
    assert {len(values) for key, values in again.items() if key in rows} == ({2} if rows else set())
    one_value_per_name(job)
    assert read_kafka_releases(job).equals(made[1])


def test_one_with_new_names_at_each_attempt_is_caught(
    broker: Broker, fresh: Published, made: tuple[Published, pa.Table]
) -> None:
    real = messages_of

    def random_names(batch: pa.RecordBatch) -> ReleaseMessages:
        messages = real(batch)
        return messages._replace(keys=[secrets.token_hex(16) for _ in messages.keys])

    sink = table(broker, topic_of(broker))
    fresh.killed(sink, SEND, 3)
    with mock.patch.object(sink_kafka, "messages_of", random_names):
        job = fresh.run(sink)
    one_value_per_name(job)  # each name has one value, but there are too many names
    with pytest.raises(PolicyError, match="holds not what the seal"):
        read_kafka_releases(job)


def test_one_with_other_values_at_each_attempt_is_caught(broker: Broker, fresh: Published) -> None:
    real = messages_of

    def stamped(batch: pa.RecordBatch) -> ReleaseMessages:
        messages = real(batch)
        values = [v.replace(b'"trigger":', b'"trigger": ') for v in messages.values]
        return messages._replace(values=values)

    sink = table(broker, topic_of(broker))
    fresh.killed(sink, SEND, 3)
    with mock.patch.object(sink_kafka, "messages_of", stamped):
        job = fresh.run(sink)
    with pytest.raises(AssertionError):
        one_value_per_name(job)
    with pytest.raises(PolicyError, match="two values of one release id"):
        read_kafka_releases(job)


def test_a_lost_store_is_refused(broker: Broker, fresh: Published, refused: Refused) -> None:
    sink = table(broker, topic_of(broker))
    fresh.run(sink)
    refused(lambda: begin(fresh.job(sink, "another")))
    # Also when all of it has been deleted since: offsets do not go back.
    sink = table(broker, topic_of(broker, policy="compact,delete"))
    fresh.run(sink, "third")
    for partition in range(3):
        gone(broker, fresh.job(sink), partition, -1)
    assert not contents(fresh.job(sink))
    refused(lambda: begin(fresh.job(sink, "another")))


def test_a_foreign_store_is_refused(broker: Broker, fresh: Published, refused: Refused) -> None:
    one, two = (table(broker, topic_of(broker)) for _ in range(2))
    fresh.run(one)
    other = fresh.job(two, "other")
    begin(msgspec.structs.replace(other, test_run_id="33" * 16))
    stores.close_all()
    refused(lambda: begin(msgspec.structs.replace(fresh.job(one, "other"), test_run_id="33" * 16)))


def test_an_older_store_is_refused_and_restored(
    broker: Broker, fresh: Published, made: tuple[Published, pa.Table]
) -> None:
    sink = table(broker, topic_of(broker))
    backup = half_way(fresh, sink)
    job = fresh.run(sink)
    state_admin.restore(job, backup, replace=True)
    with (
        mock.patch.object(RetentionStore, "restoring", False),
        pytest.raises(PolicyError, match=OLDER),
    ):
        begin(job)
    stores.close_all()
    before = contents(job)
    fresh.run(sink)  # compares with the seals, and has nothing to publish
    assert contents(job) == before
    assert read_kafka_releases(job).equals(made[1])


@pytest.mark.parametrize("first", [b"0/2", b"0/1"])
def test_a_fork_with_another_number_of_parts_is_noticed(
    broker: Broker, fresh: Published, first: bytes
) -> None:
    """Its seals have other names."""
    fresh.run(table(broker, topic_of(broker)))
    [batch, *_], job = fresh.batches(), fresh.job(table(broker, topic_of(broker)))
    one, two = (
        batch.replace_schema_metadata(batch.schema.metadata | {PART: part})
        for part in sorted([b"0/2", b"0/1"], key=lambda part: part != first)
    )
    sink = kafka_sink(job)
    sink.write([one])
    before = contents(job)
    with pytest.raises(PolicyError, match="holds another release of window 0"):
        sink.write([two])
    assert contents(job) == before
    fork = kafka_sink(job)
    twice = pytest.raises(PolicyError, match="holds two releases of window 0")
    with mock.patch.object(fork, "_refuse_changed"), twice:
        fork.write([two])


def half_way(fresh: Published, sink: str) -> Path:
    """A backup of a store that has committed some shards' steps, and published nothing."""
    fresh.killed(sink, "dpstream.state.sqlite.store:SqliteStore._write_steps", 2)
    backup = fresh.place.folder / "half"
    state_admin.backup(fresh.job(sink), backup)
    return backup


def test_a_forked_store_is_refused(broker: Broker, fresh: Published, refused: Refused) -> None:
    job = fresh.run(table(broker, topic_of(broker)))
    key = "seal-000001-000004"
    seal = msgspec.json.decode(contents(job)[key][0])
    seal["digest"] = "0" * 32
    changed = (key, msgspec.json.encode(seal), 0)
    # What compaction left of two forks.
    other = fresh.job(table(broker, topic_of(broker)))
    rest = [(name, v[0], 0) for name, v in contents(job).items() if name != key]
    KafkaTopic(broker.servers, other.sink.topic or "", {}).send([*rest, changed])
    refused(begin, other)
    stores.close_all()
    # A release in the middle is found when it is written again.
    refused(lambda: sink_of(other).write(fresh.batches()))
    # Before compaction both are there.
    KafkaTopic(broker.servers, job.sink.topic or "", {}).send([changed])
    refused(begin, job)


def changed(batch: pa.RecordBatch) -> pa.RecordBatch:
    """The release as a fork would have it."""
    at = batch.schema.get_field_index("n")
    values = pa.array([v + 1 for v in batch["n"].to_pylist()], batch.schema.field(at).type)
    return batch.set_column(at, batch.schema.field(at), values)


def test_a_fork_that_runs_at_the_same_time_is_noticed(
    broker: Broker, fresh: Published, refused: Refused
) -> None:
    fresh.run(table(broker, topic_of(broker)))
    batches, job = fresh.batches(), fresh.job(table(broker, topic_of(broker)))
    one, two = kafka_sink(job), kafka_sink(job)
    assert not list(one.published()) and not list(two.published())
    one.write(batches[:4])
    before = contents(job)
    refused(lambda: two.write([changed(batch) for batch in batches[:4]]))
    assert contents(job) == before  # nothing was overwritten
    # Both between their look and their seals: the second to seal sees the first.
    fork = [changed(batch) for batch in batches[4:]]
    twice = pytest.raises(PolicyError, match=r"holds two releases of window 1, trigger [1-3]")
    with meanwhile(2, lambda: two.write(fork)), twice:
        one.write(batches[4:])
    with twice:
        two.write(fork)  # and the first sees the second as soon as it looks again


def test_a_topic_made_again_under_a_stream_is_refused_and_filled(
    broker: Broker, tmp_path: Path, refused: Refused
) -> None:
    path, topic = job_file(tmp_path), topic_of(broker)
    head, anchor, _ = path.read_text().partition("sink =")
    assert anchor
    path.write_text(f"{head}[job.hourly.sink]\n{table(broker, topic)}\n")
    job = load_job(path)
    lived(job, 7)
    before = contents(job)
    assert sum(key.startswith("seal-") for key in before) == 7
    writer = kafka_sink(job)
    assert len(list(writer.published())) == 7
    broker.recreate(topic, 3, {"cleanup.policy": "compact"})
    # one that still runs
    refused(lambda: list(writer.published()))
    refused(begin, job)
    stores.close_all()
    assert publish(job) == 7
    assert contents(job) == before
    begin(job)
    stores.close_all()


@pytest.mark.parametrize("nth", [0, 1])
def test_two_runs_that_begin_at_once_on_a_topic(broker: Broker, fresh: Published, nth: int) -> None:
    """The other begins after this one's look at the topic, or even before its manifest."""
    sink = table(broker, topic_of(broker))
    job, other = fresh.job(sink), fresh.job(sink, "other")
    other = msgspec.structs.replace(other, test_run_id="33" * 16)
    run, _, _ = prepare(job)
    late = kafka_sink(job)
    if nth == 0:
        begin(other)
    else:
        assert not late.manifests()
    with (
        meanwhile(nth, lambda: begin(other)),
        pytest.raises(PolicyError, match="was taken by another run meanwhile"),
    ):
        write_manifest(run, late)
    stores.close_all()
    assert len([key for key in contents(job) if key.startswith("run")]) == 1 + nth
    begin(other)  # the topic is the first one's, whatever the other has left there
    stores.close_all()
    with pytest.raises(PolicyError, match="another run than the store's"):
        begin(job)


def test_a_restored_store_is_held_against_rows_without_a_seal(
    broker: Broker, fresh: Published, made: tuple[Published, pa.Table]
) -> None:
    """Killed between rows and seal, then restored: the rows are out, so they must come again."""
    sink = table(broker, topic_of(broker))
    backup = half_way(fresh, sink)
    fresh.killed(sink, SEND, 2)
    job = fresh.job(sink)
    rows = [key for key in contents(job) if is_row(key)]
    state_admin.restore(job, backup, replace=True)
    fresh.run(sink)
    assert read_kafka_releases(job).equals(made[1])
    assert {len(contents(job)[key]) for key in rows} == {2}

    other = table(broker, topic_of(broker))
    changed = contents(job)[rows[0]][0].replace(b'"n":', b'"n":9')
    job = fresh.job(other)
    KafkaTopic(broker.servers, job.sink.topic or "", {}).send([(rows[0], changed, 0)])
    state_admin.restore(job, backup, replace=True)
    with pytest.raises(PolicyError, match="does not lead to what is published"):
        fresh.run(other)
    assert list(contents(job)) == [rows[0], run_name(job)]  # nothing was published


def test_releases_can_be_dropped_and_exported(
    broker: Broker, fresh: Published, made: tuple[Published, pa.Table]
) -> None:
    sink = table(broker, topic_of(broker))
    job = fresh.run(sink)
    assert export(job, fresh.place.folder / "again", job.sink.file_kind) == RUNS
    dropped = state_admin.expire(job, "2024-01-02T00:00:00Z")
    assert dropped["windows_dropped"] == 1
    assert read_kafka_releases(fresh.run(sink)).equals(made[1])


def test_a_broker_that_goes_away_for_good_is_a_coded_error(
    tmp_path: Path, fresh: Published, made: tuple[Published, pa.Table]
) -> None:
    with running(tmp_path / "own") as own:
        sink = table(own, topic_of(own), **{"message.timeout.ms": "2000"})
        fresh.run(sink)
        given = fresh.batches()
        away = table(own, topic_of(own), **{"message.timeout.ms": "2000"})
        writer = sink_of(fresh.job(away))
        assert len(writer.write(given[:4])) == 4
        with (
            meanwhile(1, own.kill),
            pytest.raises(RunError, match=r"did not take a release: _MSG_TIMED_OUT"),
        ):
            writer.write(given[4:])
        with pytest.raises(RunError, match=r"cannot be read: _TIMED_OUT"):
            writer.write(given[4:])
        own.start()
        end = time.monotonic() + 120  # two seconds are not much on a busy machine
        while True:  # it opens its client again
            with suppress(RunError) if time.monotonic() < end else nullcontext():
                assert len(writer.write(given)) == RUNS
                break
        one_value_per_name(fresh.job(away))
        assert read_kafka_releases(fresh.job(away)).equals(made[1])


def gone_for(seconds: float, tmp_path: Path, fresh: Published, made: pa.Table) -> None:
    """Releases that are written while the broker is down arrive once it is back."""
    with running(tmp_path / "own") as own:
        fresh.run(table(own, topic_of(own)))
        given = fresh.batches()
        other = fresh.job(table(own, topic_of(own)))
        writer = sink_of(other)
        assert isinstance(writer, KafkaSink)
        writer.write(given[:4])
        own.kill()
        back = threading.Timer(seconds, own.start)
        back.start()
        began = time.monotonic()
        writer.write(given[4:])
        assert time.monotonic() - began > seconds
        back.join()
        one_value_per_name(other)
        assert read_kafka_releases(other).equals(made)


def test_a_broker_that_is_down_for_a_while(
    tmp_path: Path, fresh: Published, made: tuple[Published, pa.Table]
) -> None:
    gone_for(3, tmp_path, fresh, made[1])


@pytest.mark.slow
def test_a_broker_that_is_down_for_a_minute(
    tmp_path: Path, fresh: Published, made: tuple[Published, pa.Table]
) -> None:
    gone_for(60, tmp_path, fresh, made[1])


Message = tuple[int, str, bytes]


class Log(KafkaTopic):
    """Partition 0 of a topic, as a list."""

    def __init__(self) -> None:
        super().__init__("", "t", {})
        self.messages: list[Message] = []
        self.begins: list[int] = []

    def put(self, key: str, value: object) -> None:
        data = value if isinstance(value, bytes) else msgspec.json.encode(value)
        self.messages.append((2 * len(self.messages), key, data))  # offsets have holes

    @override
    def follow(self, partition: int, begin: int, seconds: float) -> Iterator[Message]:
        assert partition == 0
        self.begins.append(begin)
        yield from (message for message in self.messages if message[0] >= begin)


def manifest(run: str, epoch: int = 0) -> RunManifest:
    return RunManifest(1, run, epoch, "hash", "kafka")


def test_the_first_run_owns_the_topic() -> None:
    log, mine = Log(), [manifest("r1"), manifest("r1", 1)]
    register = PublishedTopic(log)
    assert register.owner is None and register.manifests == []
    for one in (mine[0], manifest("late"), mine[1]):
        log.put(manifest_name(one), one)
    log.put("run-broken", b"no manifest")
    register.follow(1.0)
    assert register.owner == "r1" and register.manifests == [*mine, None]
    assert manifest_name(mine[1]) == "run-epoch-1-r1"


def test_seals_are_followed_from_where_it_stood() -> None:
    log = Log()
    register = PublishedTopic(log)
    one, two = SealMessage("seal", 0, 1, 2, "d"), SealMessage("seal", 0, 2, 0, "e")
    log.put(one.key, one)
    register.follow(1.0)
    log.put(one.key, one)  # again, the same
    log.put(two.key, two)
    register.follow(1.0)
    assert list(register.seals.values()) == [one, two] and log.begins == [0, 1]


@pytest.mark.parametrize(
    ("key", "value"),
    [((0, 1), SealMessage("seal", 0, 1, 2, "other")), ((0, 2), SealMessage("seal", 0, 1, 2, "d")),
     ((0, 3), b"SECRET")],
)  # fmt: skip
def test_seals_that_cannot_be(key: tuple[int, int], value: object, refused: Refused) -> None:
    log = Log()
    log.put("seal-000000-000001", SealMessage("seal", 0, 1, 2, "d"))
    log.put(SealMessage("seal", *key, 0, "").key, value)
    error = refused(lambda: PublishedTopic(log).follow(1.0))
    assert error.field == "sink.topic" and "SECRET" not in str(error)


def test_what_is_not_of_the_kind_is_nothing() -> None:
    assert decoded(b"\xff", SealMessage) is None and decoded(b"{}", SealMessage) is None

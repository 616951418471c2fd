"""The sink of Kafka on a real broker: one value per release id, whatever is repeated or killed."""

import pickle
import secrets
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import msgspec
import pyarrow as pa
import pytest

from accounting.errors import PolicyError, RunError, UsageError
from pipelines.jobs.job import Job
from pipelines.operating import state_admin
from pipelines.operating.state_view import export
from pipelines.sinks import kafka as sink_kafka
from pipelines.sinks.kafka import KafkaSink
from pipelines.sinks.kafka_read import read_kafka_releases
from pipelines.sinks.kafka_topic import KafkaTopic
from pipelines.sinks.messages import Messages, is_row, messages_of, seal_key
from pipelines.sinks.sink import sink_of
from pipelines.stream import begin
from state import open as stores
from state.life_store import LifeStore
from tests.kafka_broker import Broker, running
from tests.published import RUNS, Published

OLDER = "older than its sink"
#: ``send`` is called for: the manifest, then rows and seals of the releases of a bundle.
SEND = "pipelines.sinks.kafka_topic:KafkaTopic.send"


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Broker]:
    with running(tmp_path_factory.mktemp("kafka")) as started:
        yield started


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Published, pa.Table]:
    published = Published(tmp_path_factory.mktemp("made"))
    return published, published.files()[1]


@pytest.fixture
def fresh(tmp_path: Path) -> Iterator[Published]:
    yield Published(tmp_path / "place")
    stores.close_all()


def table(broker: Broker, topic: str, **options: str) -> str:
    """A ``[sink]`` of a topic."""
    given = ", ".join(f'"{name}" = "{value}"' for name, value in options.items())
    where = f'kind = "kafka"\ntopic = "{topic}"\nservers = "{broker.servers}"'
    return f"{where}\noptions = {{ {given} }}"


def topic_of(broker: Broker, partitions: int = 3, policy: str = "compact") -> str:
    return broker.topic(partitions, cleanup_policy=policy)


def contents(job: Job) -> dict[str, list[bytes]]:
    """Every message of a job's topic as it stands there: name -> its values."""
    found = defaultdict(list)
    topic = KafkaTopic(job.sink.servers or "", job.sink.topic or "", {})
    for key, value in topic.read(range(topic.describe()[0])):
        found[key].append(value)
    return found


def one_value_per_name(job: Job) -> None:
    for key, values in contents(job).items():
        assert len(set(values)) == 1, key


@pytest.mark.parametrize("partitions", [1, 4])
def test_the_topic_holds_what_the_files_hold(
    broker: Broker, fresh: Published, made: tuple[Published, pa.Table], partitions: int
) -> None:
    topic = topic_of(broker, partitions)
    job = fresh.run(table(broker, topic))
    assert made[1].num_rows > 10
    assert read_kafka_releases(job).equals(made[1])
    found = contents(job)
    assert all(len(values) == 1 for values in found.values())
    seals = [msgspec.json.decode(v[0]) for k, v in found.items() if k.startswith("seal-")]
    assert len(seals) == RUNS and sum(seal["rows"] for seal in seals) == made[1].num_rows
    assert msgspec.json.decode(found["run"][0])["kind"] == "kafka"
    # A compacted topic keeps nothing but these names.
    assert sum(is_row(key) for key in found) == made[1].num_rows == len(found) - RUNS - 1


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
    assert bool(rows) == (nth == 3) and not list(sink_of(job).published())
    assert read_kafka_releases(job).num_rows == 0  # nothing is sealed
    again = contents(fresh.run(sink))
    assert {len(values) for key, values in again.items() if key in rows} == ({2} if rows else set())
    one_value_per_name(job)
    assert read_kafka_releases(job).equals(made[1])


def test_a_twin_with_new_names_at_each_attempt_is_caught(
    broker: Broker, fresh: Published, made: tuple[Published, pa.Table]
) -> None:
    real = messages_of

    def random_names(batch: pa.RecordBatch) -> Messages:
        messages = real(batch)
        return messages._replace(keys=[secrets.token_hex(16) for _ in messages.keys])

    sink = table(broker, topic_of(broker))
    fresh.killed(sink, SEND, 3)
    with mock.patch.object(sink_kafka, "messages_of", random_names):
        job = fresh.run(sink)
    one_value_per_name(job)  # each name has one value, but there are too many names
    with pytest.raises(PolicyError, match="holds not what the seal"):
        read_kafka_releases(job)


def test_a_twin_with_other_values_at_each_attempt_is_caught(
    broker: Broker, fresh: Published
) -> None:
    real = messages_of

    def stamped(batch: pa.RecordBatch) -> Messages:
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


def test_a_lost_store_is_refused(broker: Broker, fresh: Published) -> None:
    sink = table(broker, topic_of(broker))
    fresh.run(sink)
    with pytest.raises(PolicyError, match=r"sink\.topic: holds a run's releases, but the store"):
        begin(fresh.job(sink, "another"))
    # Also when all of it has been deleted since: offsets do not go back.
    sink = table(broker, topic_of(broker, policy="compact,delete"))
    fresh.run(sink, "third")
    admin = KafkaTopic(broker.servers, fresh.job(sink).sink.topic or "", {})._client("admin")
    from confluent_kafka import OFFSET_END, TopicPartition

    where = [TopicPartition(fresh.job(sink).sink.topic, n, OFFSET_END) for n in range(3)]
    for done in admin.delete_records(where).values():
        done.result(30)
    assert not contents(fresh.job(sink))
    with pytest.raises(PolicyError, match="holds a run's releases, but the store"):
        begin(fresh.job(sink, "another"))


def test_a_foreign_store_is_refused(broker: Broker, fresh: Published) -> None:
    one, two = (table(broker, topic_of(broker)) for _ in range(2))
    fresh.run(one)
    other = fresh.job(two, "other")
    privacy = msgspec.structs.replace(other.privacy, insecure_test_run_id="33" * 16)
    begin(msgspec.structs.replace(other, privacy=privacy))
    stores.close_all()
    with pytest.raises(PolicyError, match="another run than the store's"):
        begin(
            msgspec.structs.replace(
                fresh.job(one, "other"),
                privacy=privacy,
            )
        )


def test_an_older_store_is_refused_and_restored(
    broker: Broker, fresh: Published, made: tuple[Published, pa.Table]
) -> None:
    sink = table(broker, topic_of(broker))
    backup = half_way(fresh, sink)
    job = fresh.run(sink)
    state_admin.restore(job, backup, replace=True)
    with mock.patch.object(LifeStore, "restoring", False), pytest.raises(PolicyError, match=OLDER):
        begin(job)
    stores.close_all()
    before = contents(job)
    fresh.run(sink)  # compares with the seals, and has nothing to publish
    assert contents(job) == before
    assert read_kafka_releases(job).equals(made[1])


def half_way(fresh: Published, sink: str) -> Path:
    """A backup of a store that has committed some shards' steps, and published nothing."""
    fresh.killed(sink, "state.sqlite:SqliteStore._write_steps", 2)
    backup = fresh.place.folder / "half"
    state_admin.backup(fresh.job(sink), backup)
    return backup


def test_a_forked_store_is_refused(broker: Broker, fresh: Published) -> None:
    sink = table(broker, topic_of(broker))
    job = fresh.run(sink)
    key = seal_key((1, 4))
    seal = msgspec.json.decode(contents(job)[key][0])
    seal["digest"] = "0" * 32
    KafkaTopic(broker.servers, job.sink.topic or "", {}).send([(key, msgspec.json.encode(seal), 0)])
    with pytest.raises(PolicyError, match="is a fork: release of window 1, trigger 4"):
        begin(fresh.job(sink))
    # A release in the middle is found when it is written again.
    again = sink_of(job)
    with pytest.raises(PolicyError, match="another release of window 1, trigger 4"):
        again.write(fresh.batches())


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
    assert list(contents(job)) == [rows[0], "run"]  # nothing was published


def test_a_topic_must_be_there_and_compacted(broker: Broker, fresh: Published) -> None:
    with pytest.raises(RunError, match=r"sink\.topic: is not there.*kafka-topics --create"):
        begin(fresh.job(table(broker, "none")))
    with pytest.raises(PolicyError, match="is not compacted"):
        begin(fresh.job(table(broker, topic_of(broker, policy="delete"))))
    both = table(broker, topic_of(broker, policy="compact,delete"))
    sink = fresh.run(both)
    with pytest.raises(PolicyError, match="lets releases go"):
        sink_of(sink).prepare(restoring=True)


def test_options_and_pickles(broker: Broker, fresh: Published, monkeypatch: Any) -> None:
    for name in ("acks", "enable.idempotence", "debug", "log_level"):
        with pytest.raises(UsageError, match=f"sink.options.{name}: is set by dpstream"):
            sink_of(fresh.job(table(broker, "t", **{name: "0"})))
    for name in ("sasl.password", "ssl.key.pem", "sasl.oauthbearer.client.secret"):
        with pytest.raises(UsageError, match=f"sink.options.{name}: is a secret") as told:
            sink_of(fresh.job(table(broker, "t", **{name: "hunter2"})))
        assert "hunter2" not in str(told.value)
    wrong = fresh.job(table(broker, topic_of(broker), nonsense="1"))
    with pytest.raises(UsageError, match="are refused by Kafka's client"):
        sink_of(wrong).used()
    job = fresh.job(table(broker, topic_of(broker), **{"client.id": "env:SINK_CLIENT"}))
    with pytest.raises(UsageError, match=r"sink.options.client.id: names an environment variable"):
        sink_of(job).used()
    monkeypatch.setenv("SINK_CLIENT", "secret-name")
    sink = sink_of(fresh.run(table(broker, topic_of(broker), **{"client.id": "env:SINK_CLIENT"})))
    assert len(list(sink.published())) == RUNS
    assert b"secret-name" not in pickle.dumps(sink)
    assert len(list(pickle.loads(pickle.dumps(sink)).published())) == RUNS  # noqa: S301


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
        own.kill()
        with pytest.raises(RunError, match=r"did not take a release: _MSG_TIMED_OUT"):
            writer.write(given[4:])
        own.start()
        assert len(writer.write(given)) == RUNS  # it opens its client again
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

"""Whole jobs on Prism over a folder that grows and Pub/Sub: stopped, gone on, all counted."""

import json
import time
from collections import Counter
from collections.abc import Callable, Iterable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from dpstream.pipelines.connectors import write as sinks
from dpstream.pipelines.connectors.folder.watch import Markers, close_files
from dpstream.pipelines.connectors.pubsub import client as pubsub_client
from dpstream.pipelines.connectors.pubsub import client as pubsub_puller
from dpstream.pipelines.connectors.pubsub import source as source_pubsub
from dpstream.pipelines.connectors.write import dead_letter_folder
from dpstream.pipelines.jobs.job import Job, load_job
from dpstream.pipelines.stream.run import run_job
from tests.pubsub_emulator import running
from tests.runners.prism import binary, run_while, wait_for
from tests.runners.test_kafka_job import JOB, WINDOW, closed, lost, text_of
from tests.written import read_dead_letters

KAFKA = 'servers = "{servers}"\ntopic = "{topic}"'


class Sender:
    """Sends records of unlike users, a few with a broken one, and counts them."""

    def __init__(self, put: Callable[[list[bytes]], None]) -> None:
        self._put, self.number, self.last = put, 0, 0.0
        self.sent: Counter[tuple[datetime, str]] = Counter()

    def send(self, seconds: float) -> None:
        end = time.time() + seconds
        while (now := time.time()) < end:
            texts = [b"{"]
            for key in ("a", "b", "a"):
                row = {"user": f"u{self.number}", "key": key, "time": text_of(now)}
                texts.append(json.dumps(row).encode())
                self.sent[datetime.fromtimestamp(now // WINDOW * WINDOW, UTC), key] += 1
                self.number += 1
            self._put(texts)
            self.last = now
            time.sleep(0.05)


def write_job(folder: Path, source: str, start: float, more: str = "") -> Job:
    """A job whose windows begin at ``start`` (seconds since the epoch), and its public keys."""
    (folder / "keys.csv").write_text("key\na\nb\n")
    assert KAFKA in JOB and '"{start}"' in JOB
    text = JOB.replace(KAFKA, source).replace("{{", "{").replace("}}", "}")
    text = text.replace('"{start}"', f'"{text_of(start)}"{more}').replace("{secret}", "0f" * 32)
    (folder / "dpstream.toml").write_text(text)
    return load_job(folder / "dpstream.toml")


def over_a_restart(folder: Path, source: str, sender: Sender, between: Callable[[], None]) -> bool:
    """Whether every record was counted by two runs, one after the other."""
    first = run_while(
        write_job(folder, source, time.time() // WINDOW * WINDOW), lambda: sender.send(5)
    )
    between()
    sender.send(2)  # while nobody reads

    def until_published() -> None:
        sender.send(3)
        wait_for(lambda: closed(folder / "releases", sender.last))

    job = load_job(folder / "dpstream.toml")
    second = run_while(job, until_published)
    assert second.resumed and first.run_id == second.run_id and sender.number > 100
    return lost(job, sender.sent) == 0


@pytest.mark.parametrize("sabotaged", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sabotaged: bool) -> None:
    """The sabotaged restart begins at the clock."""
    if sabotaged:
        init = Markers.__init__

        def at_the_clock(self: Markers, folder: Any, begin: int = 0, behind: int = 0) -> None:
            init(self, folder, begin and time.time_ns() // 1000, behind)

        monkeypatch.setattr(Markers, "__init__", at_the_clock)
    folder = tmp_path / "in"
    folder.mkdir()

    def put(texts: list[bytes]) -> None:
        name = f"{time.time_ns()}.jsonl"
        (folder / name).write_bytes(b"\n".join(texts))
        close_files(folder, [name])

    sender = Sender(put)
    sent = sender.send

    def send(seconds: float) -> None:
        sent(seconds)
        # Time goes on for the folder only by markers.
        for _ in range(40 if seconds == 3 else 0):
            time.sleep(0.2)
            close_files(folder)

    monkeypatch.setattr(sender, "send", send)
    source = 'folder = "in"\nformat = "jsonl"'
    assert over_a_restart(tmp_path, source, sender, lambda: None) != sabotaged


@pytest.mark.parametrize("sabotaged", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_pubsub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sabotaged: bool) -> None:
    """The sabotaged restart does not seek."""
    monkeypatch.setattr(pubsub_client, "LEAST_ACK_DEADLINE", 10)
    monkeypatch.setattr(pubsub_puller, "PULL_SECONDS", 3.0)
    if sabotaged:
        monkeypatch.setattr(pubsub_client, "seek", lambda *_: None)
    with running() as emulator:
        topic, subscription = emulator.subscription(ack_deadline_seconds=10)

        def put(texts: list[bytes]) -> None:
            emulator.publish(topic, texts)

        sender = Sender(put)
        source = f'subscription = "{subscription}"'
        exact = over_a_restart(tmp_path, source, sender, source_pubsub.PULLERS.close)
    assert exact != sabotaged


def test_the_end_waits_for_dead_letters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A job that is done is cancelled: what was refused must be written by then."""
    write = sinks.write_dead_letters

    def slowly(folder: Path, batches: Iterable[pa.RecordBatch]) -> Path | None:
        held = list(batches)
        time.sleep(5 if held else 0)
        return write(folder, held)

    monkeypatch.setattr(sinks, "write_dead_letters", slowly)
    source, start = 'folder = "in"\nformat = "jsonl"', time.time() // 1 - 60
    folder = tmp_path / "in"
    folder.mkdir()
    (folder / "a.jsonl").write_bytes(b"{\n{\n")
    close_files(folder, ["a.jsonl"])
    job = write_job(tmp_path, source, start, f'\nend = "{text_of(start + WINDOW)}"')
    result = run_job(job, "PrismRunner", [f"--prism_location={binary()}"])
    assert not result.stopped and result.steps == 6 * 2
    assert read_dead_letters(dead_letter_folder(job)).num_rows == 2

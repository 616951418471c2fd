"""Damage of stores and files: refused, or the result is complete and the bytes are the same."""

import itertools
import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest

from dpstream.accounting.errors import PolicyError
from dpstream.state import open as stores
from dpstream.state import seals
from dpstream.state.ledger.open import read_ledger
from dpstream.state.sqlite import file as sqlite_rows
from dpstream.state.sqlite.database import sqlite3
from tests.faults import damage
from tests.faults.damage import BACKUP, LEDGER, STORE, WAL, Images, Outcome, after_flip, flip
from tests.faults.filecalls.server import Server
from tests.faults.processes import files
from tests.faults.rot import IMAGES, Rot, expected, rots, wrong
from tests.faults.runs import calm, job, released
from tests.faults.systems import SYSTEMS, call, charged, done
from tests.faults.test_kill_restart import go_on
from tests.faults.test_store_faults import redelivered

#: What may be said of a damaged file of a kind.
MESSAGES = {
    # The second: a header that forbids to write.
    STORE: (
        "store: is damaged",
        "store: the store cannot be used: it is read-only (SQLITE_READONLY)",
    ),
    # The log is valid up to the flip: what it loses is an older store.
    WAL: ("store: is an older or forked copy",),
    BACKUP: ("backup: is damaged",),
    LEDGER: (
        "account.path: is damaged",
        "account.path: its hash chain",
        "account.path: its schema",
    ),
    "run.json": ("sink.path: holds", "sink.kind: ", "store: is older than its sink"),
}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Images:
    return damage.images(tmp_path_factory.mktemp("damage") / "images")


@pytest.fixture(autouse=True)
def closed() -> Iterator[None]:
    yield
    stores.close_all()


def flips(made: Images, number: int, seed: int, scratch: Path) -> Counter[tuple[str, str]]:
    """Outcomes of some flips by file; fails at the first that publishes something else."""
    counts: Counter[tuple[str, str]] = Counter()
    for image, name, bit in itertools.islice(damage.places(made, seed), number):
        outcome = after_flip(made, image, name, bit, scratch)
        kind = "run.json" if name == "out/run.json" else name
        assert outcome.what != "wrong", (image, name, bit, outcome)
        if outcome.what == "noticed" and kind in MESSAGES:
            assert outcome.message.startswith(MESSAGES[kind]), (image, name, bit, outcome)
        counts["release" if kind.startswith("out/") else f"{kind} ({image})", outcome.what] += 1
    for (kind, what), times in sorted(counts.items()):
        print(f"{kind:<24}{what:<10}{times:5,}")
    return counts


def test_a_sample_of_flips(made: Images, tmp_path: Path) -> None:
    counts = flips(made, 48, 1, tmp_path)
    # A flip in a page that nothing reads is harmless, and which pages those are differs by run;
    # only a backup is read whole.
    assert sum(counts.values()) == 48 and counts["b (done)", "noticed"] >= 6
    assert counts["release", "mended"] >= 4


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["parquet", "csv", "jsonl"])
def test_five_hundred_flips(tmp_path: Path, kind: str) -> None:
    made = damage.images(tmp_path / "images", kind)
    counts = flips(made, 500, 2, tmp_path)
    assert (
        sum(counts.values()) == 500 and sum(counts[n] for n in counts if n[1] == "noticed") >= 100
    )


def bits_of(path: Path, text: bytes) -> list[int]:
    """A bit in each place where a file holds a text: another letter, and still a text."""
    data = path.read_bytes()
    return [8 * match.end() - 8 for match in re.finditer(re.escape(text), data)]


def in_the_store(made: Images, scratch: Path) -> set[str]:
    """What comes of keys in the store that are other keys, some of them in releases."""
    bits = bits_of(made.folder / "resting" / STORE, b"page 0")
    return {
        after_flip(made, "resting", STORE, bit, scratch).what for bit in bits[:: len(bits) // 8]
    }


def test_a_key_in_the_store_is_never_another_key(made: Images, tmp_path: Path) -> None:
    assert in_the_store(made, tmp_path) <= {"noticed", "harmless"}


def test_without_the_digests_another_key_is_published(made: Images, tmp_path: Path) -> None:
    """What the harness is for: it must see it."""
    blind = mock.patch.object(
        sqlite_rows, "unsealed", lambda _, blob: memoryview(blob)[seals.SIZE :]
    )
    with blind:
        assert "wrong" in in_the_store(made, tmp_path)


def test_the_identity_in_the_store(made: Images, tmp_path: Path) -> None:
    for text in (b'"plan_hash":"', b'"epoch":0', b"note.token", b"note.ledger"):
        for bit in bits_of(made.folder / "done" / STORE, text):
            outcome = after_flip(made, "done", STORE, bit, tmp_path)
            assert outcome == Outcome("noticed", "store: is damaged"), text


@pytest.mark.parametrize(
    ("name", "byte"),
    [(STORE, 0), (STORE, 17), (STORE, 45), (STORE, 57), (STORE, 101), (STORE, 8192 + 3)],
)
def test_the_structure_of_the_file(made: Images, tmp_path: Path, name: str, byte: int) -> None:
    """Magic, page size, format, encoding, a page of the schema, number of cells of another."""
    for bit in (0, 2, 5):
        outcome = after_flip(made, "done", name, 8 * byte + bit, tmp_path)
        assert outcome.what != "wrong", (bit, outcome)
        if outcome.what == "noticed":
            assert outcome.message.startswith("store: is damaged"), (bit, outcome)


def dpstream(*args: object, folder: Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    command = [sys.executable, "-m", "dpstream", *map(str, args)]
    return subprocess.run(
        command, cwd=folder, env=environment, check=False, capture_output=True, text=True
    )


def test_what_a_person_sees(made: Images, tmp_path: Path) -> None:
    """The command's exit codes and words; the release of the last window is mended."""
    case = tmp_path / "case"
    shutil.copytree(made.folder / "done", case)
    release = case / "out" / "window-000002" / "trigger-000004.parquet"
    damage.flip(release, 8 * 60)
    ran = dpstream("run", folder=case)
    assert ran.returncode == 0, ran.stderr
    assert "release of window 2, trigger 4 was damaged in the sink; it is written" in ran.stderr
    assert damage.files(case) == made.released
    damage.flip(case / STORE, bits_of(case / STORE, b'"plan_hash":"')[0])
    for command in (("run",), ("state", "releases", "--out", "again")):
        ran = dpstream(*command, folder=case)
        assert ran.returncode == 3
        assert "store: is damaged. Fix: restore it from a backup" in ran.stderr
        assert "dpstream state restore JOB BACKUP --replace" in ran.stderr
    ran = dpstream("state", "backup", "--out", "c", folder=case)
    assert ran.returncode == 3 and "is damaged" in ran.stderr and not (case / "c").exists()
    ran = dpstream("state", "restore", "daily", "b", "--replace", folder=case)
    assert ran.returncode == 0, ran.stderr
    ran = dpstream("run", folder=case)
    assert ran.returncode == 0, ran.stderr
    assert damage.files(case) == made.released


#: Rots of the fast lane by image.
FAST = {"session": 3}
MANY = 200


def of_image(server: Server, name: str, number: int, folder: Path) -> list[str]:
    """What is wrong after some rots of an image."""
    image, case, before = IMAGES[name], folder / "case", folder / "before"
    image.make(server, case)  # a question is known by where its files lie
    case.rename(before)
    right = expected(server, image, before, case)
    drawn = itertools.islice(rots(image, before, seed=1), number)
    return [text for rot in drawn for text in wrong(server, image, before, case, right, rot)]


@pytest.mark.parametrize("name", FAST)
def test_a_sample_of_rots(name: str, server: Server, tmp_path: Path) -> None:
    assert of_image(server, name, FAST[name], tmp_path) == []


@pytest.mark.slow
@pytest.mark.parametrize("name", IMAGES)
def test_every_file(name: str, server: Server, tmp_path: Path) -> None:
    assert of_image(server, name, MANY, tmp_path) == []


def test_a_rot_is_one_bit_or_one_sector(tmp_path: Path) -> None:
    content = bytes(range(1, 256)) * 8
    for rot, size in ((Rot("it", 700, 3), 1), (Rot("it", 700, None), 512)):
        (tmp_path / "it").write_bytes(content)
        assert rot.spoil(tmp_path)
        now = (tmp_path / "it").read_bytes()
        assert sum(a != b for a, b in zip(now, content, strict=True)) == size


def test_fewer_entries_are_seen(server: Server, tmp_path: Path) -> None:
    """The check fails where a command gives less than without rot."""
    image, case, before = IMAGES["session"], tmp_path / "case", tmp_path / "before"
    image.make(server, case)
    case.rename(before)
    right = expected(server, image, before, case)
    show = image.commands[0]
    (code, text, files), message = right.of[show]
    right.of[show] = (code, text.replace('"charges": 2', '"charges": 3'), files), message
    rot = Rot("small.csv", 0, 0)
    assert any("other results" in each for each in wrong(server, image, before, case, right, rot))


WITH_FILES = [name for name, system in SYSTEMS.items() if system.out]
#: Of folders of thousands of files.
MOST = 6


@pytest.mark.parametrize("name", WITH_FILES)
def test_no_damage_is_called_done(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One bit of each published file and of each file of dead letters; then one is missing."""
    system, folder = SYSTEMS[name], tmp_path / "work"
    system.make(folder)
    monkeypatch.chdir(folder)
    charged(system)
    entries = read_ledger(system.ledger)
    for place in filter(None, (system.out, system.letters)):
        before = files(Path(place))
        assert before
        for path in sorted(before)[:MOST]:
            flip(Path(place, path), 8 * (len(before[path]) // 2))
            again = call(*system.charge)
            if again.exit_code == 0:
                assert files(Path(place)) == before, path
                continue
            assert again.exit_code in (2, 3, 4) and "Fix: " in again.output, again.output
            shutil.move(place, tmp_path / "away")  # what the fix says
            done(*system.charge)
            if place == system.out:
                assert files(Path(place)) == before
            else:  # of a run that is finished, they are not written again
                shutil.rmtree(place, ignore_errors=True)
                shutil.copytree(tmp_path / "away", place)
                Path(place, path).write_bytes(before[path])
            shutil.rmtree(tmp_path / "away")
        assert read_ledger(system.ledger) == entries


#: The last test that a shard has committed in the midst of the first window.
LOST = "SELECT max(trigger) FROM steps WHERE shard = ? AND window = 0 AND trigger IN (1, 2, 4)"


def test_a_lost_test_has_one_value(tmp_path: Path) -> None:
    outcomes = []
    for commits, shard in itertools.product((6, 10), (0, 1)):
        path = tmp_path / f"s{commits}{shard}.db"
        run = job("skip", path)
        go_on(run, commits, 1)
        with sqlite3.connect(path) as db:
            where = "shard = ? AND window = 0 AND trigger"
            lost = db.execute(f"DELETE FROM steps WHERE {where} = ({LOST})", (shard, shard))
            assert lost.rowcount == 1
        db.close()
        try:
            assert released(run, redelivered(run.plan, 4)) == calm("skip")
            outcomes.append("taken again")
        except PolicyError as error:
            assert "damaged" in error.rule
            outcomes.append("refused")
    assert set(outcomes) == {"taken again", "refused"}

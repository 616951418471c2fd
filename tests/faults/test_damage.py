"""F11: single bits flipped in stores, write-ahead logs, backups, ledgers and releases.

Each flip is noticed with a coded error, mended (a release is written again), or harmless: every
released byte is what it should be.  A sample runs always; 500 flips, and as many of every kind of
release, in the longer run: ``pytest -m slow tests/faults/test_damage.py -s`` prints the counts.
"""

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

from dpstream.state import open as stores
from dpstream.state import seals
from dpstream.state.sqlite import rows as sqlite_rows
from tests.faults import damage
from tests.faults.damage import BACKUP, LEDGER, STORE, WAL, Images, Outcome, after_flip

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

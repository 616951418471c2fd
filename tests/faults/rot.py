"""Files that lose a bit or a sector, and what each command that may recover makes of them.

A format that is redundant (slots, logs, journals, receipts, manifests, copies) can hide what it has
lost: the older of two slots looks like the newest after a write that was torn.  So after each rot
every command is refused, or gives all that it gave before.
"""

import random
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from tests import accounts
from tests.faults.filecalls.commands import (
    ALLOT,
    ANSWER,
    ASK,
    BUDGET,
    EXECUTE,
    INFO,
    MADE,
    RUN,
    STATEMENT,
    STREAM,
    census,
    session,
    visits,
)
from tests.faults.filecalls.server import Ended, Server

_SECTOR = 512
SHOW, RECOVER = ("account", "show", "d", "--json"), ("account", "recover", "d")
SQL = ("sql", STATEMENT, "--json")
REPORT = ("report", "--out", "r.html")
RELEASES = ("state", "releases", "--out", "rel")
RESTORE = ("state", "restore", "daily", "b", "--replace")


def project(folder: Path) -> None:
    """A job and a table of one data set in a project file."""
    visits(folder)
    columns = 'columns = { user = "INT64", page = "STRING", time = "STRING" }\n[job.daily]'
    accounts.write(folder / "dpstream.toml", STREAM.replace("[job.daily]", columns))


def keep(folder: Path) -> None:
    """A copy of the account, to which more is charged."""
    shutil.copyfile(folder / "account" / "ledger.db", folder / "kept.db")


def put_back(folder: Path) -> None:
    """The account is restored from that copy."""
    shutil.copyfile(folder / "kept.db", folder / "account" / "ledger.db")


@dataclass(frozen=True)
class Image:
    """Files at rest.

    Attributes:
        before: what makes them: functions, and commands.
        files: patterns of the files that rot.
        commands: what is typed then, each on files of its own.
        killed: the call at which the last of `before` is killed; 0: it is not.
    """

    before: tuple[tuple[str, ...] | Callable[[Path], None], ...]
    files: tuple[str, ...]
    commands: tuple[tuple[str, ...], ...]
    killed: int = 0

    def make(self, server: Server, folder: Path) -> None:
        """Write the files."""
        folder.mkdir()
        for step in self.before:
            if callable(step):
                step(folder)
            elif self.killed and step is self.before[-1]:
                ended = server.run(step, folder, at=self.killed, action="kill")
                assert ended.code < 0, ended.stderr
            else:
                ended = server.run(step, folder)
                assert ended.code == 0, ended.stderr

    def rotting(self, folder: Path) -> list[Path]:
        """The files that rot."""
        paths = [path for pattern in self.files for path in sorted(folder.glob(pattern))]
        return [path for path in paths if path.is_file() and path.stat().st_size]


ANSWERED = (*ANSWER, "answers")
STREAMED = (project, RUN, keep, SQL, ANSWERED, ("state", "backup", "--out", "b"))
IMAGES = {
    "stream": Image(
        STREAMED,
        (
            "account/*.db",
            "account/*.head",
            "*.head",
            "account/*.db.answers/**/*",
            "state/*.db",
            "b",
            "out/*.json",
            "answers/*.json",
            "answers/*.npz",
        ),
        (SHOW, RECOVER, ("plan", "--json"), RUN, SQL, ANSWERED, REPORT, INFO, RELEASES, RESTORE),
    ),
    "killed stream": Image(
        (project, RUN),
        ("state/*", "account/*", "*.head", "out/*.json"),
        (SHOW, RECOVER, RUN, INFO, RELEASES, REPORT),
        killed=700,
    ),
    "restored account": Image(
        (*STREAMED, put_back),
        ("account/*.head", "*.head", "account/*.db"),
        (SHOW, RECOVER, RUN, SQL, ("plan", "--json")),
    ),
    "session": Image(
        (session, MADE, ASK, ALLOT),
        ("account/*.db", "*.head", "small.table/*"),
        (SHOW, RECOVER, BUDGET, (*ASK, "--json")),
    ),
    "census": Image(
        (census, (*EXECUTE, "out")),
        ("account/*.db", "*.head", "account/*.db.answers/**/*", "out/*.json"),
        (SHOW, RECOVER, (*EXECUTE, "out"), ("census", "plan", "paid")),
    ),
}


class Rot(NamedTuple):
    """A file, the byte where it rots, and the bit that flips; ``None``: its sector is zeros."""

    name: str
    byte: int
    bit: int | None

    def spoil(self, folder: Path) -> bool:
        """Change the file; whether that changes anything."""
        path = folder / self.name
        data = bytearray(path.read_bytes())
        if self.bit is None:
            start = self.byte // _SECTOR * _SECTOR
            data[start : start + _SECTOR] = bytes(len(data[start : start + _SECTOR]))
        else:
            data[self.byte] ^= 1 << self.bit
        differs = data != path.read_bytes()
        path.write_bytes(data)
        return differs


def rots(image: Image, folder: Path, seed: int) -> Iterator[Rot]:
    """Rots of an image, for ever: a bit and a sector of each file in turn."""
    rng = random.Random(seed)
    paths = image.rotting(folder)
    while True:
        for path in paths:
            size = path.stat().st_size
            for bit in (rng.randrange(8), None):
                yield Rot(path.relative_to(folder).as_posix(), rng.randrange(size), bit)


def outcome(folder: Path, ended: Ended) -> Any:
    """What a command printed and left: files that it publishes, and what the account says."""
    remains = {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for place in ("out", "answers", "rel")
        for path in sorted((folder / place).rglob("*"))
        if path.is_file() and not path.name.startswith(".")
    }
    text = re.sub(r'"(?:at|as_of|taken)": (?:[0-9.]+|"[^"]*")', "", ended.stdout)
    return ended.code, text, remains


class Expected(NamedTuple):
    """What each command gives on files without rot: it, and the account afterwards."""

    of: dict[tuple[str, ...], tuple[Any, str]]


def expected(server: Server, image: Image, before: Path, scratch: Path) -> Expected:
    """Type each command once."""
    return Expected({words: typed(server, before, scratch, words) for words in image.commands})


def typed(
    server: Server, before: Path, scratch: Path, words: tuple[str, ...], rot: Rot | None = None
) -> tuple[Any, str]:
    """A command on a copy of the files; what it gave, and its message."""
    shutil.rmtree(scratch, ignore_errors=True)
    shutil.copytree(before, scratch, symlinks=True)
    if rot is not None:
        rot.spoil(scratch)
    ended = server.run(words, scratch)
    return outcome(scratch, ended), ended.stderr


def wrong(
    server: Server, image: Image, before: Path, scratch: Path, recorded: Expected, rot: Rot
) -> Iterator[str]:
    """What commands make of a rot, where it is neither refused nor all that was there."""
    for words in image.commands:
        (code, text, remains), message = typed(server, before, scratch, words, rot)
        (right, right_text, right_remains), _ = recorded.of[words]
        if code != 0 and right == 0:
            if code not in (2, 3, 4) or "Traceback" in message:
                yield f"{rot}: {words[:3]}: exit {code}: {message[-300:]}"
        elif code == 0 and right != 0:
            yield f"{rot}: {words[:3]}: accepted what is refused without rot"
        elif (text, remains) != (right_text, right_remains) and code == 0:
            names = [
                n for n in {*remains, *right_remains} if remains.get(n) != right_remains.get(n)
            ]
            if names != [rot.name] or text != right_text:
                yield f"{rot}: {words[:3]}: other results {names} {text[:200]!r}: {message[-200:]}"

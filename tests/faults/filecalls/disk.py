"""A folder as the disk holds it after a loss of power, rebuilt from the recorded file calls.

A file holds the bytes of its last sync.  An entry of a directory (a creation, a rename, a removal)
is certain once a directory that it changes was synced.  Two models of what else is there:

* ``"data"``: every entry is there, in order; bytes that were not synced are lost.
* ``"entries"``: of the entries that are not certain the first few are there, chosen by a seed; of
  the writes that were not synced some sectors are there.

The calls come from `filecalls.c`; the folder as it was before them is read from a copy.
"""

import os
import random
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

(NOTHING, OPEN, WRITE, SYNC, TRUNCATE, RENAME, LINK, UNLINK, MKDIR, RMDIR, SYMLINK,
 LOOK, READ, LOCK) = range(14)  # fmt: skip
NAMES = ("refused", "open", "write", "sync", "truncate", "rename", "link", "unlink", "mkdir",
         "rmdir", "symlink", "open to read", "read", "lock")  # fmt: skip
#: Calls after which the folder is as it was.
HARMLESS = (NOTHING, LOOK, READ, LOCK)
_HEAD = struct.Struct("<IIqIIQ")
_SECTOR = 512
_EXCHANGE = 2


class Call(NamedTuple):
    """One recorded call."""

    kind: int
    flags: int
    offset: int
    path: str
    other: str
    data: bytes


def calls(journal: Path) -> Iterator[Call]:
    """The calls of a journal, in order; one that was cut by a kill is left out."""
    data, at = journal.read_bytes() if journal.exists() else b"", 0
    while at + _HEAD.size <= len(data):
        kind, flags, offset, path, other, size = _HEAD.unpack_from(data, at)
        at += _HEAD.size
        if at + path + other + size > len(data):
            return
        names = data[at : at + path].decode(), data[at + path : at + path + other].decode()
        at += path + other
        yield Call(kind, flags, offset, *names, data[at : at + size])
        at += size


@dataclass(eq=False)
class File:
    """Bytes now, bytes at the last sync, and the changes since then."""

    now: bytearray = field(default_factory=bytearray)
    synced: bytes = b""
    changes: list[tuple[int, bytes | None]] = field(default_factory=list)

    def write(self, at: int, data: bytes) -> None:
        _put(self.now, at, data)
        self.changes.append((at, data))

    def truncate(self, size: int) -> None:
        _cut(self.now, size)
        self.changes.append((size, None))

    def sync(self) -> None:
        self.synced = bytes(self.now)
        self.changes.clear()

    def torn(self, rng: random.Random) -> bytes:
        """The synced bytes and some sectors of what came after them."""
        out = bytearray(self.synced)
        for at, data in self.changes:
            if data is None:
                if rng.random() < 0.5:
                    _cut(out, at)
                continue
            for start in range(0, len(data), _SECTOR):
                if rng.random() < 0.5:
                    _put(out, at + start, data[start : start + _SECTOR])
        return bytes(out)


@dataclass(eq=False)
class Link:
    """A symbolic link."""

    target: str


@dataclass(eq=False)
class Directory:
    """Entries now, and those that were there before the first call."""

    now: dict[str, "Node"] = field(default_factory=dict)
    before: dict[str, "Node"] = field(default_factory=dict)


Node = File | Directory | Link


@dataclass(eq=False)
class Change:
    """Entries that one call changed, together: ``None`` removes."""

    entries: list[tuple[Directory, str, Node | None]]
    certain: bool = False


class Disk:
    """The folder while its calls are replayed."""

    def __init__(self, before: Path) -> None:
        self.root = _read(before)
        self.changes: list[Change] = []
        self._gone: dict[str, File] = {}

    def replay(self, call: Call) -> None:
        """Take one call."""
        if call.kind in HARMLESS:
            return
        if call.kind == SYNC:
            self._sync(call)
        elif call.kind in (WRITE, TRUNCATE):
            node = self._file(call.path)
            if node is not None and call.kind == WRITE:
                node.write(call.offset, call.data)
            elif node is not None:
                node.truncate(call.offset)
        elif call.kind == OPEN:
            if call.flags & 1:
                self._change((call.path, File()))
            elif call.flags & 2 and (node := self._file(call.path)) is not None:
                node.truncate(0)
        elif call.kind == MKDIR:
            self._change((call.path, Directory()))
        elif call.kind == SYMLINK:
            self._change((call.path, Link(call.data.decode())))
        elif call.kind == LINK:
            self._change((call.other, self._node(call.path)))
        elif call.kind == RENAME and call.flags & _EXCHANGE:
            self._change((call.path, self._node(call.other)), (call.other, self._node(call.path)))
        elif call.kind == RENAME:
            self._change((call.path, None), (call.other, self._node(call.path)))
        else:
            self._change((call.path, None))

    def write(self, folder: Path, model: str, seed: int = 0) -> None:
        """Write what is left after a loss of power into an empty folder."""
        rng = random.Random(seed)
        unsure = [change for change in self.changes if not change.certain]
        there = len(unsure) if model == "data" else rng.randint(0, len(unsure))
        lost = set(map(id, unsure[there:]))
        entries: dict[int, dict[str, Node]] = {}
        for change in self.changes:
            if id(change) in lost:
                continue
            for directory, name, node in change.entries:
                here = entries.setdefault(id(directory), dict(directory.before))
                if node is None:
                    here.pop(name, None)
                else:
                    here[name] = node

        def put(directory: Directory, path: Path) -> None:
            path.mkdir(exist_ok=True)
            for name, node in entries.get(id(directory), directory.before).items():
                if isinstance(node, Directory):
                    put(node, path / name)
                elif isinstance(node, Link):
                    (path / name).symlink_to(node.target)
                else:
                    data = node.synced if model == "data" else node.torn(rng)
                    (path / name).write_bytes(data)
                    (path / name).chmod(0o600)

        put(self.root, folder)

    def _sync(self, call: Call) -> None:
        node = self._node(call.path)
        if isinstance(node, Directory):
            for change in self.changes:
                change.certain |= any(directory is node for directory, _, _ in change.entries)
        elif isinstance(node, File):
            node.sync()

    def _change(self, *entries: tuple[str, Node | None]) -> None:
        change = Change([])
        for path, node in entries:
            parent, _, name = path.rpartition("/")
            directory = self._node(parent)
            assert isinstance(directory, Directory), path
            old = directory.now.get(name)
            if node is None:
                directory.now.pop(name, None)
                if isinstance(old, File):
                    self._gone[f"{path} (deleted)"] = old
            else:
                directory.now[name] = node
            change.entries.append((directory, name, node))
        self.changes.append(change)

    def _node(self, path: str) -> Node | None:
        node: Node | None = self.root
        for name in path.split("/") if path else ():
            node = node.now.get(name) if isinstance(node, Directory) else None
        return node

    def _file(self, path: str) -> File | None:
        node = self._node(path)
        return node if isinstance(node, File) else self._gone.get(path)


def _read(folder: Path) -> Directory:
    directory = Directory()
    for entry in os.scandir(folder):
        path = Path(entry.path)
        if entry.is_symlink():
            node: Node = Link(os.readlink(path))
        elif entry.is_dir():
            node = _read(path)
        else:
            data = path.read_bytes()
            node = File(bytearray(data), data)
        directory.now[entry.name] = directory.before[entry.name] = node
    return directory


def _put(data: bytearray, at: int, new: bytes) -> None:
    if len(data) < at:
        data.extend(bytes(at - len(data)))
    data[at : at + len(new)] = new


def _cut(data: bytearray, size: int) -> None:
    del data[size:]
    data.extend(bytes(size - len(data)))

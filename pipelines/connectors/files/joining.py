"""Files that join a bounded run: which are new, what partition each has, how far a pass goes.

A run that is begun with ``dpstream run --through`` reads its input in *passes*.  A pass is a set
of files and the last trigger time that it releases; both are committed in the store before a row
is read (`pipelines.stream.passes`).  Files of the first pass have their index by name as partition,
those that join later have the next numbers, by name: a partition, once given, stays.

Sensitivity: a record's place (pass, partition, offset) is a function of which file it is in and of
public facts, never of another record.  Its trigger is its own, or the first of its pass if its own
was decided before (`dp_transforms.bounding`); it is late, a dead letter, if its windows were closed
when its file joined (`dp_transforms.ingest.records`).  Both are functions of the record's times and
its pass (mechanism.md rules 0 and 1).  C holds over all passes, because the counts of units stay in
the store.
"""

import itertools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import msgspec

from dpstream.accounting.errors import PolicyError
from dpstream.pipelines.connectors.files.input_manifest import (
    SourceFile,
    fingerprint_of,
    identity_part,
)

#: Of one file's identity: a keyed digest, in hex.
Digest = Callable[[bytes], str]


class Pass(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Files that joined together, and the last trigger time that was released with them.

    Attributes:
        files: keyed digests of name, size and content, in order of their partitions.
        through: global trigger time.
    """

    files: tuple[str, ...]
    through: int


class Passes(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a store knows of its growing input; private, like the store.

    Attributes:
        passes: in their order; of all but the last everything is released.
        done: trigger time through which all is released and in the sink.
        left: partitions that the next trigger times need: all of the last pass while it is not
            done, else those with rows beyond ``done``.
    """

    passes: tuple[Pass, ...]
    done: int = 0
    left: tuple[int, ...] = ()

    @property
    def files(self) -> tuple[str, ...]:
        """Digests of all files, by partition."""
        return tuple(digest for one in self.passes for digest in one.files)

    @property
    def joined(self) -> tuple[tuple[int, int], ...]:
        """Of every pass but the first: its first partition, and what was released before it."""
        passes, partition = list[tuple[int, int]](), 0
        for before, _ in itertools.pairwise(self.passes):
            partition += len(before.files)
            passes.append((partition, before.through))
        return tuple(passes)

    @property
    def pending(self) -> bool:
        """Whether the last pass has something left to do."""
        return self.done < self.passes[-1].through

    def next(self, files: Sequence[str], through: int) -> "Passes":
        """The same and one more pass."""
        new = range(len(self.files), len(self.files) + len(files))
        passes = (*self.passes, Pass(tuple(files), through))
        return Passes(passes, self.done, (*self.left, *new))

    def ended(self, left: Sequence[int]) -> "Passes":
        """The same once the last pass is done."""
        return Passes(self.passes, self.passes[-1].through, tuple(left))


class Arranged(NamedTuple):
    """Files as a run knows them.

    Attributes:
        earlier: those of the passes so far, by partition, and ``new``: those that are to join, with
            the partitions that they will have.
        first: identity of the first pass's files (all, where there is none yet).
        digests: of ``new``.
    """

    earlier: tuple[SourceFile, ...]
    new: tuple[SourceFile, ...]
    first: list[bytes]
    digests: tuple[str, ...]


def arrange(files: Sequence[SourceFile], noted: Passes | None, digest: Digest) -> Arranged:
    """Tell files that a run has read from those that are new.

    Args:
        files: all that the source names now, in order of their names.
        noted: the store's note, ``None`` for a run that begins.

    Raises:
        PolicyError: a file that the run has read is gone or was changed.
        RunError: a file cannot be read.
    """
    parts = [identity_part(*fingerprint_of(file)) for file in files]
    by_digest = {digest(part): at for at, part in enumerate(parts)}
    order = () if noted is None else noted.files
    gone = [partition for partition, name in enumerate(order) if name not in by_digest]
    if gone:
        raise PolicyError(
            "table.path",
            f"{len(gone)} of the {len(order)} files that this run has read are gone, renamed or"
            f" changed (the first: file {gone[0]} in the order in which they joined)",
            "bring them back as they were, corrections in a new file; or begin a new run on a new"
            " store",
        )
    partitions = [by_digest.pop(name) for name in order]
    new = sorted(by_digest.values())
    placed = [files[at]._replace(partition=n) for n, at in enumerate([*partitions, *new])]
    begun = new if noted is None else partitions[: len(noted.passes[0].files)]
    names = {at: name for name, at in by_digest.items()}
    return Arranged(
        tuple(placed[: len(partitions)]),
        tuple(placed[len(partitions) :]),
        [parts[at] for at in begun],
        tuple(names[at] for at in new),
    )

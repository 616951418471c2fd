"""The note of passes in a store: which files joined a run, how far it has come, what was missing.

`pipelines.stream.passes` writes it before a row of the pass is read, so that a pass that is
repeated reads the same files and gives the same bytes.  Names of files are keyed digests.  The
expected names that were missing are public, and so is what a release says of them.
"""

import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple, Protocol

import msgspec

from dpstream.accounting.plan.timeline import Timeline

#: The note's name in a store.
NOTE = "passes"


class Period(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An hour, a day or a month, and the name that its data has; public.

    Attributes:
        name: a name or glob, relative to the project file's folder.
        begin, end: instants in microseconds since 1970.
    """

    name: str
    begin: int
    end: int


class JoinedFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A file of a pass, as keyed digests.

    Attributes:
        name: digest of its name, by which it is recognised.
        content: digest of name, size and content, which must not change until it is read to its
            end.
    """

    name: str
    content: str


class Pass(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Files that joined together, and the last trigger time that was released with them.

    Attributes:
        files: in order of their partitions.
        through: global trigger time.
        missing: expected names (`pipelines.project.expected`) that were not there when the pass was
            committed, of all windows that it releases; public.
    """

    files: tuple[JoinedFile, ...]
    through: int
    missing: tuple[Period, ...] = ()


class Passes(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The state of a store's growing input; private, like the store.

    Attributes:
        passes: the passes in order; every pass but the last is completely released.
        done: trigger time through which all is released and in the sink.
        left: partitions that the next trigger times need: all of the last pass while it is not
            done, else those with rows beyond ``done``.
    """

    passes: tuple[Pass, ...]
    done: int = 0
    left: tuple[int, ...] = ()

    @property
    def files(self) -> tuple[JoinedFile, ...]:
        """All files, by partition."""
        return tuple(file for one in self.passes for file in one.files)

    @property
    def joined(self) -> tuple[tuple[int, int], ...]:
        """(first partition, trigger time released before) of every pass but the first."""
        passes, partition = list[tuple[int, int]](), 0
        for before, _ in itertools.pairwise(self.passes):
            partition += len(before.files)
            passes.append((partition, before.through))
        return tuple(passes)

    @property
    def pending(self) -> bool:
        """Return whether the last pass has something left to do."""
        return self.done < self.passes[-1].through

    def next(
        self, files: Sequence[JoinedFile], through: int, missing: Sequence[Period] = ()
    ) -> "Passes":
        """Return the same and one more pass."""
        new = range(len(self.files), len(self.files) + len(files))
        passes = (*self.passes, Pass(tuple(files), through, tuple(missing)))
        return Passes(passes, self.done, (*self.left, *new))

    def ended(self, left: Sequence[int]) -> "Passes":
        """Return the same once the last pass is done."""
        return Passes(self.passes, self.passes[-1].through, tuple(left))


class HasNotes(Protocol):
    """A store, as far as its notes go."""

    def metadata(self, name: str) -> str | None:
        """Return a note."""


def noted_passes(store: HasNotes) -> Passes | None:
    """Return the passes of a store's run; ``None``: it reads its input as a whole."""
    return decoded(store.metadata(NOTE))


def encoded(passes: Passes | None) -> str | None:
    """Return passes as the text of a note."""
    return None if passes is None else msgspec.json.encode(passes).decode()


def decoded(text: str | None) -> Passes | None:
    """Return the passes of a note's text."""
    return None if text is None else msgspec.json.decode(text, type=Passes)


def missing_names(
    passes: Passes | None, timeline: Timeline, window: int, trigger: int
) -> tuple[str, ...]:
    """Return the expected names that a release was published without; public.

    It is a function of what the pass of this release has committed, so that it is the same whenever
    the release is written.

    Args:
        passes: of the release's run; ``None``: it reads its input as a whole.
        timeline: of its plan.
        window, trigger: of the release.
    """
    at = timeline.base(window) + trigger
    for one in () if passes is None else passes.passes:
        if at <= one.through:
            begin, end = timeline.window_bounds(window)
            last = min(end, timeline.instant_of(at))
            return tuple(p.name for p in one.missing if p.begin < last and p.end > begin)
    return ()


class ClosedWindow(NamedTuple):
    """A window that was closed without an expected name: its bounds in micros, and the period."""

    bounds: tuple[int, int]
    missing: Period


def closed_without(passes: Passes, timeline: Timeline) -> Iterator[ClosedWindow]:
    """Yield the windows whose last release was published without an expected name."""
    closed = 0
    for one in passes.passes:
        first, closed = closed, max(0, (one.through - timeline.triggers) // timeline.stride + 1)
        for window in range(first, closed) if one.missing else ():
            begin, end = timeline.window_bounds(window)
            for period in one.missing:
                if period.begin < end and period.end > begin:
                    yield ClosedWindow((begin, end), period)

"""The head file of an account, which proves that an account is not older than what was shown.

An account that is restored from a backup has lost charges, and answers that people have seen.  So
whoever asks keeps, in the folder of the file that names the account, a private file that knows the
end of the account's chain, and a copy of the chain itself.

**Form.**  Two slots, then a log.  A line of the log is an event of the account as the account
stores it, the tokens of a run (`state.ledger.lineage`), or a cut, behind which another chain goes
on.  A slot says how long the log is, and the number and digest of the account's last entry then.
The slot of the longer log counts.  Slots and lines have digests of their own.

**An advance** adds the lines that the log lacks, then writes the slot that does not count, then
flushes the file once.  After a loss of power within it the file holds the old slot (then the log
ends where it ended), or the new one.  A new slot without its lines is a true statement about the
account, whose own commit was durable before; the next advance goes on from the old slot, and writes
the lines again.  A lock of the kernel keeps the order: a slot that counts is never older than one
that was flushed before.  Lines are a function of the chain, so where a file system has no locks two
processes write the same bytes.

**What holds.**  *No two shown answers have the same noise on different rows; and unless account and
head are restored together, no charge has two shown answers.*  The first part is that of the names
of noise (`dp_transforms.noise.inputs`).  For the second, let an answer have been shown, and the
account be restored.  The receipt was in the account when it was shown (`ask.sequence`), and the
head had the receipt's entry on disk (`contract.Ledger.keep_head`).  An account without that entry
is refused until `recovery` has added it; then the charge is closed, and nobody gets an answer for
it any more.

**One flush for each answer is enough.**  Nothing is shown between a question's charge and its
receipt, and an advance covers both.  A charge that was lost before its advance was paid for
nothing: no answer of it was seen, and who asks again is charged.  A stream shows releases without
receipts, so the head has its charge before the first draw; its later releases add no entry.

If a head is removed, the next command makes it again of the account as it is, and warns
(`state.ledger.open`).
"""

import contextlib
import errno
import functools
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from dpstream.accounting.errors import PolicyError
from dpstream.state.disk_errors import file_error
from dpstream.state.durable import PRIVATE, put_entry, sweep, sync
from dpstream.state.ledger.events import Event, Head, chained, text_of
from dpstream.state.ledger.history import History
from dpstream.state.ledger.log import TokensChanged
from dpstream.state.locks import held_on
from dpstream.state.seals import sealed_text, unsealed_text

#: Bytes of a slot: a page, so that no write tears both.
_SLOT = 4096
_LOG = 2 * _SLOT
_NAME = "account head"

#: Tokens of a run, each with the one it was to replace.
Tokens = Mapping[str, str | None]


class _Slot(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The end of the account's chain, and the log's first and last byte of the last advance."""

    head: Head
    start: int
    end: int
    version: int = 1


class _Cut(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="event", tag="cut"):
    """From here on entries follow entry ``seq``: the account continued from there."""

    seq: int


class Chain(NamedTuple):
    """The account's events that a head file proves.

    Attributes:
        events, digests: of the account's entries, in order.
        tokens: of each run, all sets that the account accepted, in order.
    """

    events: list[Event]
    digests: list[str]
    tokens: dict[str, list[Tokens]]


class HeadFile:
    """The head file of one account; see the module.

    Args:
        path: the file.
        id_: the account's id.
        named: the text that commands take for the account: the file that names it, or its path.
    """

    def __init__(self, path: Path, id_: str, named: str) -> None:
        self.path, self._id, self._named = path, id_, named
        self._descriptor: int | None = None
        self._opened: tuple[int, ...] | None = None  # by which process, and which file it was
        self._writes = False  # whether it was opened to be written
        self._flushed = 0  # the log's end that this object has seen on disk

    def close(self) -> None:
        """Close the file, which the next use opens again."""
        if self._descriptor is not None:
            os.close(self._descriptor)
        self._descriptor = self._opened = None

    def __del__(self) -> None:
        self.close()

    # --- what stands -----------------------------------------------------------------------------

    def head(self) -> Head | None:
        """Return the end of the chain in the file; ``None``: there is no file.

        Raises:
            PolicyError: the file is damaged.
            RunError: it cannot be read.
        """
        with self._reading() as descriptor:
            return None if descriptor is None else self._slots(descriptor)[0][1].head

    def check(self, account: History, head: Head | None) -> None:
        """Refuse an account that lacks entries of a head.

        Args:
            head: the head before the account was read: an account only grows.

        Raises:
            PolicyError: the account lacks an entry.
        """
        if head is not None and account.digest_at(head.seq) != head.digest:
            raise self.older_error()

    def check_tokens(self, run_id: str, tokens: Tokens) -> None:
        """Refuse an account whose tokens of a run are an earlier set.

        Raises:
            PolicyError: they are; or the file is damaged.
        """
        texts = [text for text in self._log()[1] if text.startswith('{"event":"tokens"')]
        lines = (msgspec.json.decode(text, type=TokensChanged) for text in texts)
        history = [line.tokens for line in lines if line.run_id == run_id]
        if is_older(tokens, history):
            raise self.older_error()

    def older_error(self) -> PolicyError:
        """Return the error for an account that is older than its head file."""
        return PolicyError(
            "account.path",
            "is an older or replaced account: entries that its head file has are gone",
            "bring back the newest account of the data set; or type "
            f"`dpstream account recover {self._named}`, which adds what was spent",
        )

    def damaged(self) -> PolicyError:
        """Return the error for a file that differs from what was written."""
        return PolicyError(
            "account.path",
            f"has a damaged head file ({self.path.name})",
            "restore that file; or, if this account is the newest one, remove the file: it is "
            "written anew",
        )

    def chain(self) -> Chain:
        """Return the chain that the file proves.

        Raises:
            PolicyError: it is damaged.
            RunError: it cannot be read.
        """
        head, texts = self._log()
        chain = Chain([], [], {})
        for text in texts:
            line = msgspec.json.decode(text, type=Event | TokensChanged | _Cut)
            if isinstance(line, TokensChanged):
                chain.tokens.setdefault(line.run_id, []).append(line.tokens)
            elif isinstance(line, _Cut):
                del chain.events[line.seq :], chain.digests[line.seq :]
            else:
                chain.events.append(line)
                chain.digests.append(chained(chain.digests[-1] if chain.digests else "", text))
        if head is not None and (len(chain.digests), chain.digests[-1]) != (head.seq, head.digest):
            raise self.damaged()
        return chain

    def _log(self) -> tuple[Head | None, list[str]]:
        """Return the newest head whose lines are complete, and all lines up to it."""
        with self._reading() as descriptor:
            if descriptor is None:
                return None, []
            for _, slot in self._slots(descriptor):
                if (texts := _texts(descriptor, _LOG, slot.end)) is not None:
                    return slot.head, texts
        raise self.damaged()

    # --- what comes ------------------------------------------------------------------------------

    def create(self, account: History) -> bool:
        """Write the file, unless it exists; return whether it is new.

        Raises:
            RunError: it cannot be written.
        """
        log = _lines(text_of(event) for event in account.events(0))
        slot = self._slot(_Slot(end_of(account), _LOG, _LOG + len(log)))
        try:
            sweep(self.path.parent)
            made = put_entry(self.path, slot.ljust(_LOG, b"\0") + log, PRIVATE)
            sync(self.path.parent)
        except OSError as error:
            raise self._failed(error) from None
        return made

    def advance(
        self, read: Callable[[], tuple[History, Mapping[str, Tokens]]], cut: int | None = None
    ) -> None:
        """Bring the file up to the account's end; it is on disk on return.

        Args:
            read: returns the present account, and the tokens of runs that have new ones; called
                while no other process advances.
            cut: the account continues after the entry of this number, with all that the head has.

        Raises:
            PolicyError: the account lacks what the head has; or the file is damaged.
            RunError: the file cannot be written.
        """
        for writes in (self._writes, True):  # a command that has nothing to add writes nothing
            with self._reading(writes) as descriptor:
                if descriptor is None:
                    break
                with held_on(descriptor):
                    if self._advance(descriptor, *read(), cut, writes):
                        return
        self.create(read()[0])

    def _advance(
        self,
        descriptor: int,
        account: History,
        tokens: Mapping[str, Tokens],
        cut: int | None,
        writes: bool,
    ) -> bool:
        """Do ``advance`` under the lock; return False if the file must be opened for writing."""
        (place, last), *older = self._slots(descriptor)
        if cut is None:
            self.check(account, last.head)
        if last.end != self._flushed and _texts(descriptor, last.start, last.end) is None:
            if not older or _texts(descriptor, older[0][1].start, older[0][1].end) is None:
                raise self.damaged()
            place, last = older[0]  # the newest was written by a machine that then lost its power
        events = account.events(last.head.seq if cut is None else cut)
        texts = [] if cut is None else [_text(_Cut(cut))]
        texts += [text_of(event) for event in events]
        texts += [
            _text(TokensChanged(run_id, dict(tokens_of_run)))
            for run_id, tokens_of_run in tokens.items()
        ]
        end = last.end
        if texts and not writes:
            return False
        if texts:
            log = _lines(texts)
            end += len(log)
            _write(descriptor, log, last.end)
            # Never over the one that the log goes on from.
            _write(descriptor, self._slot(_Slot(end_of(account), last.end, end)), _SLOT - place)
        if end != self._flushed:  # also of lines whose writer may have been killed before its flush
            os.fdatasync(descriptor)
            self._flushed = end
        return True

    # --- bytes -----------------------------------------------------------------------------------

    def _slot(self, slot: _Slot) -> bytes:
        return sealed_text(_NAME, msgspec.json.encode(slot).decode()).encode() + b"\n"

    def _slots(self, descriptor: int) -> list[tuple[int, _Slot]]:
        """Return place and content of the complete slots, the one that counts first.

        Raises:
            PolicyError: there is none.
        """
        data = os.pread(descriptor, _LOG, 0)
        read = [(at, _slot_of(data[at : at + _SLOT].partition(b"\n")[0])) for at in (0, _SLOT)]
        slots = [(at, slot) for at, slot in read if slot is not None and slot.head.id == self._id]
        if not slots:
            raise self.damaged()
        return sorted(slots, key=lambda each: -each[1].end)

    @contextlib.contextmanager
    def _reading(self, writes: bool = False) -> Iterator[int | None]:
        """Yield the open file; ``None``: there is none."""
        try:
            yield self._open(writes)
        except OSError as error:
            raise self._failed(error) from None

    def _open(self, writes: bool) -> int | None:
        """Return the file that has the path now, opened by this process; for writing if possible.

        A descriptor shares its lock with a forked process, and a file that was removed or replaced
        proves nothing any more.
        """
        try:
            at = os.stat(self.path, follow_symlinks=False)
            if self._opened != (os.getpid(), at.st_dev, at.st_ino) or writes > self._writes:
                self.close()
                how = os.O_NOFOLLOW | os.O_CLOEXEC
                with contextlib.suppress(OSError):  # an advance may have nothing to write
                    self._descriptor = os.open(self.path, os.O_RDWR | how) if writes else None
                if self._descriptor is None:
                    self._descriptor = os.open(self.path, os.O_RDONLY | how)
                at = os.fstat(self._descriptor)
                self._opened, self._writes = (os.getpid(), at.st_dev, at.st_ino), writes
                self._flushed = 0
        except FileNotFoundError:
            self.close()
        return self._descriptor

    def _failed(self, error: OSError) -> Exception:
        if error.errno == errno.EBADF:  # it was opened to be read
            error = PermissionError(errno.EACCES, "")
        return file_error("account.path", "its head file cannot be used", error)


def is_older(tokens: Tokens, history: Sequence[Tokens]) -> bool:
    """Return whether tokens are a set that others have followed; a token is never used twice."""
    return tokens in history[:-1] and tokens != history[-1]


def end_of(account: History) -> Head:
    """Return the end of an account's chain."""
    return Head(account.created.id, len(account.digests), account.digests[-1])


def _text(line: TokensChanged | _Cut) -> str:
    return msgspec.json.encode(line).decode()


def _lines(texts: Iterator[str] | Sequence[str]) -> bytes:
    return b"".join(sealed_text(_NAME, text).encode() + b"\n" for text in texts)


def _texts(descriptor: int, start: int, end: int) -> list[str] | None:
    """Return the lines of a part of the log; ``None``: one differs from what was written."""
    data = os.pread(descriptor, end - start, start)
    if len(data) != end - start or not data.endswith(b"\n"):
        return None
    with contextlib.suppress(PolicyError, UnicodeError):
        return [unsealed_text(_NAME, line.decode()) for line in data[:-1].split(b"\n")]
    return None


@functools.lru_cache(maxsize=8)
def _slot_of(line: bytes) -> _Slot | None:
    """Return a slot, unless it differs from what was written."""
    with contextlib.suppress(PolicyError, UnicodeError, msgspec.MsgspecError):
        return msgspec.json.decode(unsealed_text(_NAME, line.decode()), type=_Slot)
    return None


def _write(descriptor: int, data: bytes, at: int) -> None:
    view = memoryview(data)
    while view:
        written = os.pwrite(descriptor, view, at)
        view, at = view[written:], at + written

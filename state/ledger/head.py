"""The head file of an account, which proves that an account is not older than what was shown.

An account that is restored from a backup has lost charges, and answers that people have seen.  So
each command that asks keeps a private file in the folder of the file that names the account.  It
has the end of the account's chain, and a copy of the chain.

**Format.**  Two slots, then a log.  A line of the log is an event of the account as the account
stores it, the tokens of a run (`state.ledger.lineage`), or a cut, after which another chain
continues.  A slot has the length of the log, and the number and digest of the account's last entry
at that length.  The slot with the greater length is valid.  Slots and lines have digests of their
own.

**An advance** adds the lines that the log lacks, flushes them, then overwrites the other slot, and
flushes it.  So a slot proves that its lines were on disk.  A kernel lock orders advances.  Lines
are a function of the chain, so two processes write the same bytes where a file system has no locks.

**Torn writes and damage.**  After a loss of power within an advance, the log may have lines, and a
part of a line, beyond the length in the valid slot.  The same is true if the newest slot was
damaged.  So intact lines beyond that length are accepted too (the account's own commit was durable
before they were written), and the next advance continues after them.  A damaged slot is reported.
The file is refused if the log of the intact slot then has no intact end.  A line within the length
of the valid slot cannot be torn by an advance: its damage is reported each time the account is
opened, and what needs the lines (a recovery, the run of a stream) refuses the file.

**What holds.**  *No two shown answers have the same noise on different rows; and unless account and
head are restored together, no charge has two shown answers.*  The first part follows from the names
of noise (`dp_transforms.noise.inputs`).  For the second part, assume that an answer was shown and
the account was restored later.  The receipt was in the account when it was shown (`ask.sequence`),
and the head had the receipt's entry on disk (`contract.Ledger.keep_head`).  An account without that
entry is refused until `recovery` has added it; then the charge is closed, and no command returns an
answer for it.

**One advance for each answer is enough.**  Nothing is shown between a question's charge and its
receipt, and an advance covers both.  If a charge is lost before its advance, no answer of it was
shown, and a command that asks again makes a new charge.  A stream shows releases without receipts,
so the head has its charge before the first draw; its later releases add no entry.

If a head file is removed, the next command writes it again from the present account, and warns
(`state.ledger.open`).
"""

import contextlib
import errno
import functools
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Literal, NamedTuple

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
    """The end of the account's chain, and the end of the log in the file."""

    head: Head
    end: int
    version: int = 1


class _Cut(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="event", tag="cut"):
    """A cut: the entries after this line follow entry ``seq`` of the account."""

    seq: int


class Chain(NamedTuple):
    """The account's events that a head file proves.

    Attributes:
        events, digests: events and digests of the account's entries, in order.
        tokens: for each run, all sets of tokens that the account accepted, in order.
    """

    events: list[Event]
    digests: list[str]
    tokens: dict[str, list[Tokens]]


class _Proven(NamedTuple):
    """What slots and lines prove.

    Attributes:
        head: the end of the account's chain.
        end: position in the file after the last intact line; size: size of the file.
        position, slot: position of the valid slot in the file, and its content.
        damaged_slot: whether the other slot is damaged.
    """

    head: Head
    end: int
    size: int
    position: int
    slot: _Slot
    damaged_slot: bool


class HeadFile:
    """The head file of one account; see the module.

    Args:
        path: the file.
        id_: the account's id.
        named: the account as it is typed in a command: the file that names it, or its path.
    """

    def __init__(self, path: Path, id_: str, named: str) -> None:
        self.path, self._id, self._named = path, id_, named
        self._descriptor: int | None = None
        self._opened: tuple[int, ...] | None = None  # the process, and the file's device and number
        self._writes = False  # whether it was opened for writing
        self._unwritable: OSError | None = None  # the error if it could not be
        self._flushed = 0  # the end of the log that is known to be on disk

    def close(self) -> None:
        """Close the file, which the next use opens again."""
        if self._descriptor is not None:
            os.close(self._descriptor)
        self._descriptor = self._opened = None

    def __del__(self) -> None:
        self.close()

    # --- reading ---------------------------------------------------------------------------------

    def head(self) -> Head | None:
        """Return the end of the chain in the file; ``None``: there is no file.

        Raises:
            PolicyError: the file is damaged.
            RunError: it cannot be read.
        """
        with self._reading() as descriptor:
            return None if descriptor is None else self._proven(descriptor).head

    def damaged_part(self) -> Literal["slot", "log"] | None:
        """Return which part is damaged while the rest of the file proves the account's end.

        It reads the log to its end, because a command that charges needs no line of it, and damage
        would appear when a recovery needs them.

        Raises:
            As ``head``.
        """
        with self._reading() as descriptor:
            if descriptor is None:
                return None
            proven = self._proven(descriptor)
            if self._intact_texts(descriptor, proven.end) is None:
                return "log"
            return "slot" if proven.damaged_slot else None

    def check(self, account: History, head: Head | None) -> None:
        """Refuse an account that lacks entries of a head.

        Args:
            head: the head as it was before the account was read, because an account only grows.

        Raises:
            PolicyError: the account lacks an entry.
        """
        if head is not None and account.digest_at(head.seq) != head.digest:
            raise self.older_error()

    def check_tokens(self, run_id: str, tokens: Tokens) -> None:
        """Refuse an account whose tokens of a run are an earlier set.

        Raises:
            PolicyError: the tokens are an earlier set; or the file is damaged.
        """
        texts = [text for text in self._log()[1] if text.startswith('{"event":"tokens"')]
        lines = (msgspec.json.decode(text, type=TokensChanged) for text in texts)
        history = [line.tokens for line in lines if line.run_id == run_id]
        if is_older(tokens, history):
            raise self.older_error()

    def older_error(self) -> PolicyError:
        """Return the error for an account that is older than its head file.

        Raises:
            As ``head``.
        """
        fix = "bring back the newest account of the data set; or "
        if self.damaged_part() == "log":
            fix += f"restore the head file ({self.path.name}), which is damaged too, and "
        return PolicyError(
            "account.path",
            "is an older or replaced account: it lacks entries that its head file has",
            f"{fix}type `dpstream account recover {self._named}`, which adds what was spent",
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
            PolicyError: the file is damaged.
            RunError: it cannot be read.
        """
        head, texts = self._log()
        chain = _chain_of(texts)
        if head is not None and (len(chain.digests), chain.digests[-1]) != (head.seq, head.digest):
            raise self.damaged()
        return chain

    def _log(self) -> tuple[Head | None, list[str]]:
        """Return the end of the chain, and all lines up to it."""
        with self._reading() as descriptor:
            if descriptor is None:
                return None, []
            proven = self._proven(descriptor)
            return proven.head, self._texts(descriptor, proven.end)

    # --- writing ---------------------------------------------------------------------------------

    def create(self, account: History) -> bool:
        """Write the file, unless it exists; return whether it is new.

        Raises:
            RunError: it cannot be written.
        """
        log = _lines(text_of(event) for event in account.events(0))
        slot = self._slot(_Slot(end_of(account), _LOG + len(log)))
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
        """Add to the file what the account has beyond it; it is on disk on return.

        Args:
            read: returns the present account, and the tokens of runs that have new ones; called
                while no other process advances.
            cut: number of the entry after which the account's chain differs from that of the head,
                as after a recovery, which has added all that the head has.

        Raises:
            PolicyError: the account lacks what the head has; or the file is damaged.
            RunError: the file cannot be written.
        """
        for writes in (self._writes, True):  # opens for writing only if there is a line to add
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
        proven = self._proven(descriptor)
        if cut is None:
            self.check(account, proven.head)
        events = account.events(proven.head.seq if cut is None else cut)
        texts = [] if cut is None else [_text(_Cut(cut))]
        texts += [text_of(event) for event in events]
        texts += [
            _text(TokensChanged(run_id, dict(tokens_of_run)))
            for run_id, tokens_of_run in tokens.items()
        ]
        end = proven.end
        if texts or end != proven.slot.end:
            if not writes:
                return False
            if proven.size > end:  # a line that was torn
                os.ftruncate(descriptor, end)
            log = _lines(texts)
            _write(descriptor, log, end)
            os.fdatasync(descriptor)
            end += len(log)
            # The valid slot is never overwritten.
            _write(descriptor, self._slot(_Slot(end_of(account), end)), _SLOT - proven.position)
        if end != self._flushed:  # also if another process, perhaps killed, wrote the slot
            os.fdatasync(descriptor)
            self._flushed = end
        return True

    # --- bytes -----------------------------------------------------------------------------------

    def _slot(self, slot: _Slot) -> bytes:
        return sealed_text(_NAME, msgspec.json.encode(slot).decode()).encode() + b"\n"

    def _proven(self, descriptor: int) -> _Proven:
        """Return what the file proves.

        Raises:
            PolicyError: it is damaged.
        """
        data, size = os.pread(descriptor, _LOG, 0), os.fstat(descriptor).st_size
        pages = {start: data[start : start + _SLOT] for start in (0, _SLOT)}
        slots = {start: slot for start, page in pages.items() if (slot := self._slot_in(page))}
        if not slots:
            raise self.damaged()
        position = max(slots, key=lambda start: slots[start].end)
        slot, damaged_slot = slots[position], len(slots) == 1 and any(pages[_SLOT - position])
        beyond = _intact(os.pread(descriptor, max(size - slot.end, 0), slot.end))
        end = slot.end + len(_lines(beyond))
        if damaged_slot and end != size:
            raise self.damaged()
        head = slot.head
        if beyond:
            digests = _chain_of([*self._texts(descriptor, slot.end), *beyond]).digests
            head = Head(self._id, len(digests), digests[-1])
        return _Proven(head, end, size, position, slot, damaged_slot)

    def _slot_in(self, page: bytes) -> _Slot | None:
        """Return the slot of a page; ``None`` if it has none, or that of another account."""
        slot = _slot_of(page.partition(b"\n")[0])
        return slot if slot is not None and slot.head.id == self._id else None

    def _texts(self, descriptor: int, end: int) -> list[str]:
        """Return the lines of the log up to a position in the file.

        Raises:
            PolicyError: one is damaged.
        """
        texts = self._intact_texts(descriptor, end)
        if texts is None:
            raise self.damaged()
        return texts

    @staticmethod
    def _intact_texts(descriptor: int, end: int) -> list[str] | None:
        """Return the lines of the log up to a position; ``None`` if one is damaged or lost."""
        texts = _intact(os.pread(descriptor, end - _LOG, _LOG))
        return texts if len(_lines(texts)) == end - _LOG else None

    @contextlib.contextmanager
    def _reading(self, writes: bool = False) -> Iterator[int | None]:
        """Yield the open file; ``None`` if there is none."""
        try:
            yield self._open(writes)
        except OSError as error:
            raise self._failed(error) from None

    def _open(self, writes: bool) -> int | None:
        """Return the file that is now at the path, opened by this process; for writing if possible.

        It is opened again in a forked process, which would share the lock of the descriptor, and if
        the file was removed or replaced, because the old file then proves nothing.
        """
        try:
            file = os.stat(self.path, follow_symlinks=False)
            if self._opened != (os.getpid(), file.st_dev, file.st_ino) or writes > self._writes:
                self.close()
                flags = os.O_NOFOLLOW | os.O_CLOEXEC
                try:
                    self._descriptor = os.open(self.path, os.O_RDWR | flags) if writes else None
                except OSError as error:  # an advance may have nothing to write
                    self._unwritable = error
                if self._descriptor is None:
                    self._descriptor = os.open(self.path, os.O_RDONLY | flags)
                file = os.fstat(self._descriptor)
                self._opened, self._writes = (os.getpid(), file.st_dev, file.st_ino), writes
                self._flushed = 0
        except FileNotFoundError:
            self.close()
        return self._descriptor

    def _failed(self, error: OSError) -> Exception:
        if error.errno == errno.EBADF and self._unwritable is not None:
            error = self._unwritable  # the file is open for reading only
        return file_error("account.path", "its head file cannot be used", error)


def is_older(tokens: Tokens, history: Sequence[Tokens]) -> bool:
    """Return whether tokens are an earlier set of a run; no token is ever used twice."""
    return tokens in history[:-1] and tokens != history[-1]


def end_of(account: History) -> Head:
    """Return the end of an account's chain."""
    return Head(account.created.id, len(account.digests), account.digests[-1])


def _text(line: TokensChanged | _Cut) -> str:
    return msgspec.json.encode(line).decode()


def _lines(texts: Iterator[str] | Sequence[str]) -> bytes:
    return b"".join(sealed_text(_NAME, text).encode() + b"\n" for text in texts)


def _intact(data: bytes) -> list[str]:
    """Return the lines of a part of the log, up to the first damaged one."""
    texts = list[str]()
    with contextlib.suppress(PolicyError, UnicodeError):
        for line in data.split(b"\n")[:-1]:
            texts.append(unsealed_text(_NAME, line.decode()))
    return texts


def _chain_of(texts: Sequence[str]) -> Chain:
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
    return chain


@functools.lru_cache(maxsize=8)
def _slot_of(line: bytes) -> _Slot | None:
    """Return the slot that a line has; ``None`` if it is damaged."""
    with contextlib.suppress(PolicyError, UnicodeError, msgspec.MsgspecError):
        return msgspec.json.decode(unsealed_text(_NAME, line.decode()), type=_Slot)
    return None


def _write(descriptor: int, data: bytes, position: int) -> None:
    view = memoryview(data)
    while view:
        written = os.pwrite(descriptor, view, position)
        view, position = view[written:], position + written

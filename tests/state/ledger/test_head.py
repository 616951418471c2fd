"""The head file: never older than what was shown, whatever is torn, lost or done at once."""

import contextlib
import errno
import json
import os
import random
import shutil
import stat
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from dpstream.accounting.errors import AccountWarning, PolicyError
from dpstream.state.ledger.events import Created
from dpstream.state.ledger.head import Chain, HeadFile, Tokens
from dpstream.state.ledger.history import History
from dpstream.state.ledger.open import (
    AccountPlace,
    head_file_of,
    open_ledger,
    read_history,
    refuse_damaged_head,
)
from dpstream.state.ledger.recovery import recover
from tests import accounts
from tests.faults.damage import flip
from tests.faults.filecalls.disk import WRITE, Disk, calls
from tests.faults.filecalls.server import ACTIONS, library
from tests.golden.refusals import Refused
from tests.state.ledger.conformance import charge

ROOT = Path(__file__).parents[3]
#: Where the second slot and the log begin.
SLOT, LOG = 4096, 8192


@pytest.fixture
def place(tmp_path: Path) -> AccountPlace:
    (tmp_path / "jobs").mkdir()
    made = accounts.create(tmp_path / "account" / "ledger.db", "d", (1e4, 1e-3))
    return AccountPlace(made.path, "d", made.id, file=str(tmp_path / "jobs" / "job.toml"))


def head_of(place: AccountPlace) -> HeadFile:
    head = head_file_of(place)
    assert head is not None
    return head


def charged(place: AccountPlace, *runs: int) -> None:
    with contextlib.closing(open_ledger(place)) as ledger:
        for run in runs:
            ledger.charge(charge(run))


def end(place: AccountPlace) -> tuple[int, str]:
    with contextlib.closing(open_ledger(place, looking=True)) as ledger:
        head = ledger.head()
    return head.seq, head.digest


def proven(head_file: HeadFile) -> tuple[int, str]:
    head, chain = head_file.head(), head_file.chain()
    assert head is not None and len(chain.digests) == head.seq == len(chain.events)
    assert chain.digests[-1] == head.digest
    return head.seq, head.digest


def test_every_change_of_the_account_advances_the_private_file(place: AccountPlace) -> None:
    head_file = head_of(place)
    assert head_file.head() is None and head_file.chain() == Chain([], [], {})
    for run in range(1, 6):
        charged(place, run)
        assert proven(head_file) == end(place)
    with contextlib.closing(open_ledger(place)) as ledger:
        ledger.set_limit((5e3, 1e-3))
    assert proven(head_file) == end(place)
    assert head_file.path.parent == Path(place.file or "").parent
    assert stat.S_IMODE(os.stat(head_file.path).st_mode) == 0o600
    assert accounts.events(place.path) == head_file.chain().events


def test_whole_numbers_have_one_text(place: AccountPlace) -> None:
    """A caller may write 3 for 3.0: the copy of the chain is the chain."""
    integer_charge = charge(1)
    with contextlib.closing(open_ledger(place)) as ledger:
        fields = {n: getattr(integer_charge, n) for n in integer_charge.__struct_fields__}
        ledger.charge(type(integer_charge)(**fields | {"epsilon": 3, "mu": None, "rho": None}))
        ledger.set_limit((7_000, 1e-3))
    assert proven(head_of(place)) == end(place)


def test_an_older_or_another_account_is_refused(
    place: AccountPlace, tmp_path: Path, refused: Refused
) -> None:
    backup = tmp_path / "backup.db"
    charged(place, 1)
    shutil.copy(place.path, backup)
    charged(place, 2)
    shutil.copy(backup, place.path)
    for looking in (False, True):
        refused(open_ledger, place, looking)
    without = AccountPlace(place.path, place.data_set, place.id)  # named by nothing with a head
    with pytest.warns(UserWarning, match="head file"):
        charged(without, 3)
    charged(without, 4)
    refused(lambda: open_ledger(place))


def test_an_account_that_gets_older_while_it_is_open(
    place: AccountPlace, tmp_path: Path, refused: Refused
) -> None:
    """Nothing is charged, and nothing is shown."""
    backup = tmp_path / "backup.db"
    charged(place, 1)
    shutil.copy(place.path, backup)
    charged(place, 2)
    with contextlib.closing(open_ledger(place)) as ledger:
        with open(place.path, "r+b") as file:
            file.write(backup.read_bytes())
        refused(lambda: ledger.charge(charge(3)))
        refused(ledger.keep_head)


def test_a_missing_file_is_made_again_with_a_warning(place: AccountPlace) -> None:
    charged(place, 1)  # a new account without a charge has none yet: no warning
    head_of(place).path.unlink()
    with pytest.warns(UserWarning, match="head file"):
        charged(place, 2)
    assert proven(head_of(place)) == end(place)


def test_a_folder_that_cannot_be_written_has_its_head_beside_the_account(
    place: AccountPlace, monkeypatch: pytest.MonkeyPatch
) -> None:
    access = os.access
    folder = Path(place.file or "").parent
    monkeypatch.setattr(os, "access", lambda p, mode: Path(p) != folder and access(p, mode))
    assert head_of(place).path.parent == Path(place.path).parent


def test_a_database_without_a_naming_file_has_its_head_in_the_users_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "home"))
    url = "spanner://p/i/d"
    for folder in (tmp_path, tmp_path.parent):
        monkeypatch.chdir(folder)
        head_file = head_of(AccountPlace(url, "d", accounts.ID))
        assert head_file.path.parent == tmp_path / "home" / "dpstream"
        assert url in head_file.older_error().fix


# --- torn, damaged, at once ----------------------------------------------------------------------


def torn(before: bytes, after: bytes, rng: random.Random) -> bytes:
    """Some sectors of bytes that were written over others."""
    parts = bytearray(after)
    for start in range(0, len(after), 512):
        if rng.random() < 0.5:
            part = before[start : start + 512]
            parts[start : start + 512] = part + bytes(len(after[start:][:512]) - len(part))
    return bytes(parts)


@pytest.mark.filterwarnings("ignore:one of the two slots")
def test_any_part_of_an_advance_leaves_a_head(place: AccountPlace) -> None:
    """The lines are on disk before the slot: the file proves what it did before, or more."""
    head_file, rng = head_of(place), random.Random(3)
    charged(place, 1)
    before, old = head_file.path.read_bytes(), end(place)
    for run in range(2, 7):
        charged(place, run)
        after, new = head_file.path.read_bytes(), end(place)
        for _ in range(5):
            lines = before[:LOG] + torn(before[LOG:], after[LOG:], rng)
            slots = torn(before[:LOG], after[:LOG], rng) + after[LOG:]
            byte = rng.randrange(300)
            at = 0 if before[:SLOT] != after[:SLOT] else SLOT
            slot = before[:at] + after[at : at + byte] + before[at + byte : LOG] + after[LOG:]
            for part in (lines, slots, slot):
                head_file.path.write_bytes(part)
                assert old[0] <= proven(head_file)[0] <= new[0]
                with contextlib.closing(open_ledger(place)) as ledger:
                    ledger.keep_head()
                assert proven(head_file) == new
        before, old = head_file.path.read_bytes(), new


def rotten(content: bytes, rng: random.Random) -> Iterator[bytes]:
    """One flipped bit, or one sector of zeros, at places of slots and log."""
    log = range(LOG, len(content))
    for at in [*range(0, 200, 19), *range(SLOT, SLOT + 200, 19), *rng.sample(log, 10)]:
        flipped = bytearray(content)
        flipped[at] ^= 1 << rng.randrange(8)
        yield bytes(flipped)
    for at in range(0, len(content), 512):
        zeros = bytes(len(content[at : at + 512]))
        if content[at : at + 512] != zeros:
            yield content[:at] + zeros + content[at + 512 :]


@pytest.mark.filterwarnings("ignore:(one of the two slots|the log) of")
def test_rot_never_proves_less(place: AccountPlace, tmp_path: Path, refused: Refused) -> None:
    """An older account is refused, and recovered to the last charge or not at all."""
    backup = tmp_path / "backup.db"
    charged(place, *range(1, 4))
    shutil.copy(place.path, backup)
    charged(place, *range(4, 8))
    head_file, newest, outcomes = head_of(place), end(place), Counter[str]()
    content, account = head_file.path.read_bytes(), Path(place.path).read_bytes()
    for part in rotten(content, random.Random(5)):
        head_file.path.write_bytes(part)
        shutil.copy(backup, place.path)
        refused(open_ledger, place)
        try:
            with contextlib.closing(open_ledger(place, recovering=True)) as ledger:
                recover(ledger)
        except PolicyError:
            outcomes["refused"] += 1
        else:
            outcomes["recovered"] += 1
            assert end(place)[0] >= newest[0] and proven(head_file) == end(place)
            assert len(accounts.charges(place.path)) == 7
        Path(place.path).write_bytes(account)  # the newest account is never refused for long
        head_file.path.write_bytes(part)
        with contextlib.suppress(PolicyError), contextlib.closing(open_ledger(place)) as ledger:
            ledger.keep_head()
            assert proven(head_file) == newest
    assert outcomes["refused"] > 10 and outcomes["recovered"] > 20, outcomes
    head_file.path.write_bytes(b"no head")
    refused(lambda: open_ledger(place))


def test_a_rotten_slot_is_named_and_written_again(place: AccountPlace) -> None:
    charged(place, 1, 2)
    head_file = head_of(place)
    content = head_file.path.read_bytes()
    for at in (0, SLOT):
        flip(head_file.path, 8 * (at + 50))
        with pytest.warns(UserWarning, match="one of the two slots"):
            charged(place, 10 + at)
        charged(place, 11 + at)
        assert proven(head_file) == end(place)
        assert head_file.path.read_bytes() != content


def rotten_log(content: bytes, how: str) -> bytes:
    """A head file whose slots are intact: a sector of its log is zeros, or its second half lost."""
    if how == "half":
        return content[: LOG + (len(content) - LOG) // 2]
    return content[: LOG + 1024] + bytes(512) + content[LOG + 1536 :]


@pytest.mark.parametrize("how", ["sector", "half"])
def test_a_rotten_log_is_named_while_the_account_is_the_newest(
    place: AccountPlace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str, refused: Refused
) -> None:
    """Every look and every charge warns, until the file is removed as the warning says."""
    backup = tmp_path / "backup.db"
    charged(place, 1)
    shutil.copy(place.path, backup)
    charged(place, *range(2, 8))
    monkeypatch.chdir(tmp_path / "jobs")
    head_file = head_of(place)
    content = head_file.path.read_bytes()
    head_file.path.write_bytes(rotten_log(content, how))
    for look in (lambda: read_history(place), lambda: end(place), lambda: charged(place, 1)):
        with pytest.warns(AccountWarning) as warned:
            look()
        [text] = [str(warning.message) for warning in warned]
        assert f"`rm {head_file.path.name}`" in text
    refused(lambda: refuse_damaged_head(place))
    newest = Path(place.path).read_bytes()
    shutil.copy(backup, place.path)  # what is older can only be recovered by an intact file
    refused(open_ledger, place)
    head_file.path.write_bytes(content)
    refusal = refused(open_ledger, place)
    assert "restore the head file" not in refusal.fix
    with contextlib.closing(open_ledger(place, recovering=True)) as ledger:
        assert recover(ledger).charges == 6
    Path(place.path).write_bytes(newest)
    head_file.path.unlink()  # which is what the warning says
    with pytest.warns(AccountWarning, match="written again"):
        charged(place, 8)
    charged(place, 9)
    refuse_damaged_head(place)
    assert proven(head_file) == end(place)


def test_a_link_in_the_place_of_the_file_is_named(place: AccountPlace, refused: Refused) -> None:
    charged(place, 1)
    path = head_of(place).path
    path.rename(path.with_name("elsewhere"))
    for target in ("elsewhere", "nowhere"):
        path.symlink_to(target)
        refusal = refused(open_ledger, place)
        assert "remove the link" in refusal.fix
        path.unlink()
    path.with_name("elsewhere").rename(path)
    charged(place, 2)


def test_several_processes_at_once(place: AccountPlace) -> None:
    charged(place, 0)
    children = []
    for child in range(3):
        pid = os.fork()
        if not pid:
            try:
                charged(place, *range(100 * child + 1, 100 * child + 9))
            finally:
                os._exit(0)
        children.append(pid)
    head_file, seen = head_of(place), list[int]()
    while children:
        head = head_file.head()
        assert head is not None
        seen.append(head.seq)
        pid, _ = os.waitpid(children[-1], os.WNOHANG)
        if pid:
            children.pop()
    assert seen == sorted(seen)
    assert proven(head_file) == end(place) == (26, end(place)[1])


def test_a_file_that_is_replaced_or_removed_while_it_is_open(
    place: AccountPlace, refused: Refused
) -> None:
    """The file that has the name is the head, whatever a process has opened before."""
    charged(place, 1)
    head_file = head_of(place)
    with contextlib.closing(open_ledger(place)) as ledger:
        ledger.charge(charge(2))
        copy = head_file.path.with_name("copy")
        shutil.copy(head_file.path, copy)
        copy.replace(head_file.path)
        ledger.charge(charge(3))
        assert proven(head_file) == end(place)
        head_file.path.unlink()
        ledger.charge(charge(4))
        assert proven(head_file) == end(place)
        with contextlib.closing(open_ledger(place)) as other:
            other.charge(charge(5))
        head_file.path.write_bytes(b"no head")
        refused(lambda: ledger.charge(charge(6)))


def test_a_forked_process_holds_a_lock_of_its_own(place: AccountPlace) -> None:
    """A descriptor that is open since before the fork would share its lock."""
    charged(place, 1)
    steps, write = os.pipe()
    with contextlib.closing(open_ledger(place)) as ledger:
        ledger.keep_head()
        account, head_file = ledger.history(), ledger.head_file
        assert head_file is not None

        def slow() -> tuple[History, dict[str, Tokens]]:
            os.write(write, b"1")
            time.sleep(0.3)
            os.write(write, b"2")
            return account, {}

        def quick() -> tuple[History, dict[str, Tokens]]:
            os.write(write, b"3")
            return account, {}

        pid = os.fork()
        if not pid:
            try:
                head_file.advance(slow)
            finally:
                os._exit(0)
        assert os.read(steps, 1) == b"1"  # the lock is held
        head_file.advance(quick)
        os.waitpid(pid, 0)
        assert os.read(steps, 9) == b"23"
    os.close(steps)
    os.close(write)


def test_an_open_account_opens_its_head_file_to_read_and_to_write_once(
    place: AccountPlace, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened, opening = list[str](), os.open

    def counted(path: str, *how: int, **more: int) -> int:
        opened.append(str(path))
        return opening(path, *how, **more)

    charged(place, 1)
    monkeypatch.setattr(os, "open", counted)
    with contextlib.closing(open_ledger(place)) as ledger:
        for run in range(2, 6):
            ledger.charge(charge(run))
    assert [Path(path).suffix for path in opened].count(".head") == 2
    assert proven(head_of(place)) == end(place)


def test_a_file_that_may_only_be_read(
    place: AccountPlace, monkeypatch: pytest.MonkeyPatch, refused: Refused
) -> None:
    """What it covers is shown; what it lacks is not, and the error says why."""
    opening = os.open

    def refusing(path: str, flags: int, *how: int, **more: int) -> int:
        if str(path).endswith(".head") and flags & (os.O_RDWR | os.O_WRONLY):
            raise PermissionError(errno.EACCES, "")
        return opening(path, flags, *how, **more)

    charged(place, 1)
    monkeypatch.setattr(os, "open", refusing)
    with contextlib.closing(open_ledger(place, looking=True)) as ledger:
        ledger.keep_head()
    with contextlib.closing(open_ledger(place)) as ledger:
        refused(lambda: ledger.charge(charge(2)))
        refused(ledger.keep_head)


SCRIPT = """
import contextlib, ctypes, os, sys
from pathlib import Path
from dpstream.state.ledger.open import AccountPlace, open_ledger
from tests.state.ledger.conformance import charge
folder = Path({folder!r})
ctypes.CDLL(os.environ["LD_PRELOAD"]).filecalls_arm(
    str(folder).encode(), ctypes.c_long(0), {action}, 0, 0, 0, {journal!r}.encode())
place = AccountPlace(str(folder / "account.db"), "d", {id!r}, file=str(folder / "job.toml"))
shown = os.open(folder / "shown", os.O_WRONLY | os.O_APPEND)
for run in range(1, 5):
    with contextlib.closing(open_ledger(place)) as ledger:
        ledger.charge(charge(run))
        os.write(shown, str(ledger.head().seq).encode())
"""


@pytest.fixture
def recorder() -> Iterator[None]:
    try:
        library()
    except FileNotFoundError as missing:
        if os.environ.get("CI"):
            raise
        pytest.skip(f"{missing}")
    yield


@pytest.mark.usefixtures("recorder")
def test_a_loss_of_power_leaves_what_was_shown(tmp_path: Path) -> None:
    """Before each write of what was shown, the disk holds a head that covers it."""
    folder, journal = tmp_path / "folder", tmp_path / "journal"
    folder.mkdir()
    place = accounts.create(folder / "account.db", "d")
    place = AccountPlace(place.path, "d", place.id, file=str(folder / "job.toml"))
    (folder / "shown").touch()
    shutil.copytree(folder, tmp_path / "before")
    script = SCRIPT.format(folder=str(folder), journal=str(journal), id=place.id,
                           action=ACTIONS["count"])  # fmt: skip
    env = os.environ | {"LD_PRELOAD": str(library())}
    subprocess.run([sys.executable, "-c", script], env=env, check=True, cwd=ROOT)
    name, disk, printed_seq = head_of(place).path.name, Disk(tmp_path / "before"), 0
    for number, call in enumerate(calls(journal)):
        disk.replay(call)
        if call.path == "shown" and call.kind == WRITE:
            printed_seq = json.loads(call.data)
        if call.path.endswith(("shown", "head")):
            for model in ("data", "entries"):
                left = tmp_path / f"{number} {model}"
                left.mkdir()
                disk.write(left, model, number)
                if printed_seq:
                    head_file = HeadFile(left / name, place.id, "job.toml")
                    head = head_file.head()
                    assert head is not None and head.seq >= printed_seq
                    assert len(head_file.chain().digests) >= printed_seq
    assert printed_seq == 5
    assert isinstance(head_of(place).chain().events[0], Created)

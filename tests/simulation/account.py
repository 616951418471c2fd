"""Worlds in which processes use one account, are killed, and lose what was not synced.

Each step of a world is a process of its own, forked below the preloaded library of
`tests.faults.filecalls`: it makes the account, charges a question, commits a receipt, raises the
limit, closes what was not answered, or reads.  It may be killed at any of its file calls, or one of
them fails.  Between steps the power may go: then the disk is what `filecalls.disk` makes of the
recorded calls.  Now and then an older copy of the account is put back, but not of its head file:
then it is refused until it was recovered.  The world goes by what the processes said before:

* a charge that was said is in the account for ever, so what is spent never decreases;
* what is spent is never above the limit;
* an answer that was shown is the answer for ever, or closed by a recovery: no charge has two;
* the account can be read after everything, and its chain holds.

``python -m tests.simulation.account --seeds 100`` runs worlds, ``--seed N`` one with its history.
"""

import argparse
import ctypes
import errno
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path
from typing import Any

from tests.faults.filecalls.disk import Disk, calls
from tests.faults.filecalls.server import ACTIONS, kinds_of, library

#: Epsilon of a question, of the limit at first, and by how much the limit is raised.
COST, LIMIT, RAISE = Fraction(1, 4), Fraction(3, 4), Fraction(1, 4)
STEPS = 20
#: Exit codes of a step: it said something, it was refused with a coded error.
ANSWERED, REFUSED = 0, 3
_LONGEST = 60


class BrokenError(AssertionError):
    """What must always hold does not."""


@dataclass
class World:
    """What the processes of a world have said.

    Attributes:
        made: that the account is there; restored: an older one was put back.
        closed: shown answers that an older account lacked, for which nobody gets another.
    """

    made: bool = False
    restored: bool = False
    closed: set[str] = field(default_factory=set)
    charged: set[str] = field(default_factory=set)
    answered: dict[str, bytes] = field(default_factory=dict)
    limit: Fraction = LIMIT
    history: list[str] = field(default_factory=list)

    def hear(self, step: str, report: dict[str, Any]) -> None:
        """What a step said before it ended."""
        self.made |= "made" in report
        if "charged" in report:
            self.charged.add(report["charged"])
        for run_id, receipt in report.get("shown", {}).items():
            before = self.answered.setdefault(run_id, bytes.fromhex(receipt))
            if before.hex() != receipt:
                raise BrokenError(f"{step}: a charge has two shown answers")
        if "limit" in report:
            self.limit = max(self.limit, Fraction(report["limit"]))

    def restore(self, then: dict[str, Any], closed: frozenset[str]) -> bool:
        """An older account is put back: what no answer was shown of may be lost with its charge.

        Args:
            then: what a reader saw in it; closed: which answers it had lost before.

        Returns: whether it lacks an answer that was shown.
        """
        self.restored = True
        lacks = self.answered.keys() - then["receipts"].keys() - closed
        self.closed |= lacks
        self.charged &= self.answered.keys() | set(then["charges"])
        self.limit = LIMIT
        self.history.append("an older account is put back")
        return bool(lacks)

    def check(self, step: str, seen: dict[str, Any]) -> None:
        """What a reader sees."""
        charges = seen["charges"]
        lost = self.charged - set(charges)
        if lost:
            raise BrokenError(f"{step}: {len(lost)} charges are gone")
        if len(set(charges)) < len(charges):
            raise BrokenError(f"{step}: a run id is charged twice")
        if Fraction(seen["limit"]) < self.limit:
            raise BrokenError(f"{step}: a limit is gone that was said to be set")
        if len(charges) * COST > Fraction(seen["limit"]):
            raise BrokenError(f"{step}: {len(charges)} charges are beyond the limit")
        for run_id, receipt in self.answered.items():
            if run_id in self.closed and run_id not in seen["receipts"]:
                continue
            if seen["receipts"].get(run_id) != receipt.hex():
                raise BrokenError(f"{step}: a shown answer is gone or another")


# --- what a process does -------------------------------------------------------------------------


def _charge(run_id: str) -> Any:
    from dpstream.state.ledger.events import Charge
    from tests import accounts

    return Charge(run_id, "0" * 32, accounts.USER, float(COST), 0.0, None, 0.0, "sql")


def _is_account(path: str) -> bool:
    """Whether a process that was killed has made it."""
    from dpstream.accounting.errors import DpstreamError
    from dpstream.state.ledger.open import ledger_exists, read_ledger

    try:
        return ledger_exists(path) and bool(read_ledger(path))
    except DpstreamError:
        return False


def act(path: str, step: str, number: int) -> dict[str, Any]:
    """One step; what it says."""
    from dpstream.state.ledger.contract import AnswerLog, Decision
    from dpstream.state.ledger.events import Closed
    from dpstream.state.ledger.open import AccountPlace, created_of, make, open_ledger
    from dpstream.state.ledger.recovery import recover
    from tests import accounts

    if step == "make" and not _is_account(path):
        limit = (float(LIMIT), 1e-6)
        make(path, created_of(accounts.ID, "d", accounts.CREATED.unit, limit))
    if step == "make":
        return {"made": True}
    place = AccountPlace(path, "d", accounts.ID)
    if step == "recover":
        with closing(open_ledger(place, recovering=True)) as ledger:
            recover(ledger)
        return {"recovered": True}
    with closing(open_ledger(place)) as ledger:
        register = AnswerLog(ledger, "sql")
        if step == "raise":
            more = Fraction(ledger.history().persons_limit()[0]) + RAISE
            ledger.set_limit((float(more), 1e-6))
            return {"limit": str(more)}
        if step == "close":
            charges = {charge.run_id for charge in ledger.history().charges}
            open_ = sorted(charges - ledger.history().receipts.keys() - ledger.history().closed)
            if open_:
                ledger.transact(lambda: ledger.append(Closed(tuple(open_))))
            return {}
        if step == "read":
            return _seen(ledger, register)
        request = f"{number % 5:032x}"
        begun = register.begin(request, lambda run_id, _: Decision(_charge(run_id)), step == "anew")
        report: dict[str, Any] = {"charged": begun.run_id}
        print(json.dumps(report), flush=True)
        if step == "charge" or begun.receipt is not None:
            return report
        drawn = f"{begun.run_id} {number}".encode()  # as if the rows had changed
        register.commit(begun.run_id, drawn)
        answer = register.read(begun.run_id)
        assert answer is not None
        return report | {"shown": {answer.run_id: answer.receipt.hex()}}


def _seen(ledger: Any, register: Any) -> dict[str, Any]:
    charges = [charge.run_id for charge in ledger.history().charges]
    answers = {run_id: register.read(run_id) for run_id in charges}
    receipts = {run_id: a.receipt.hex() for run_id, a in answers.items() if a is not None}
    limit = str(Fraction(ledger.history().persons_limit()[0]))
    return {"charges": charges, "limit": limit, "receipts": receipts}


def _child(order: dict[str, Any], library_: ctypes.CDLL) -> int:
    from dpstream.accounting.errors import DpstreamError

    out = os.open(order["out"], os.O_CREAT | os.O_TRUNC | os.O_WRONLY, 0o600)
    os.dup2(out, 1)
    sys.stdout = os.fdopen(1, "w", closefd=False)
    sabotage(order["sabotage"])
    if library_.filecalls_arm(
        order["folder"].encode(), ctypes.c_long(order["at"]), ACTIONS[order["action"]],
        getattr(errno, order["action"], 0), 0, kinds_of(order["action"]), order["journal"].encode(),
    ):  # fmt: skip
        return 70
    try:
        report = act(order["path"], order["step"], order["number"])
    except DpstreamError as error:
        print(json.dumps({"refused": str(error)}), flush=True)
        return REFUSED
    print(json.dumps(report), flush=True)
    return ANSWERED


def sabotage(name: str) -> None:
    """Break the account in a way that a world must see."""
    from unittest import mock

    from dpstream.state.ledger import contract as answers
    from dpstream.state.ledger import sqlite
    from dpstream.state.ledger.head import HeadFile
    from dpstream.state.ledger.history import History

    if name == "no sync":
        real = sqlite.AccountStorage.reading

        def unsynced(storage: Any, writes: bool) -> Any:
            storage.db.execute("PRAGMA synchronous = OFF")
            return real(storage, writes)

        mock.patch.object(sqlite.AccountStorage, "reading", unsynced).start()
    elif name == "no limit":
        mock.patch.object(History, "check", lambda _, more: list(more)).start()
    elif name == "no head":
        mock.patch.object(HeadFile, "check", lambda *_: None).start()
    elif name == "shows what it drew":
        read = answers.AnswerLog.read
        drawn = dict[str, bytes]()

        def commit(register: Any, run_id: str, receipt: bytes, view: Any = None) -> None:
            drawn[run_id] = receipt

        def answered(register: Any, run_id: str) -> Any:
            answer = read(register, run_id)
            if run_id in drawn:
                return answers.Answer(run_id, drawn[run_id], "", False)
            return answer

        mock.patch.object(answers.AnswerLog, "commit", commit).start()
        mock.patch.object(answers.AnswerLog, "read", answered).start()


# --- the world -----------------------------------------------------------------------------------


class Processes:
    """A server that forks a process for each step, below the library."""

    def __init__(self) -> None:
        env = os.environ | {"LD_PRELOAD": str(library())}
        self._server = subprocess.Popen(
            [sys.executable, "-m", "tests.simulation.account", "--serve"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=env, text=True,
        )  # fmt: skip

    def run(self, order: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        """Exit code (negative: the signal) and all that the step said."""
        assert self._server.stdin is not None and self._server.stdout is not None
        self._server.stdin.write(json.dumps(order) + "\n")
        self._server.stdin.flush()
        code, report = int(self._server.stdout.readline()), dict[str, Any]()
        for line in Path(order["out"]).read_text().splitlines():
            report |= json.loads(line)
        return code, report

    def close(self) -> None:
        """End the server."""
        assert self._server.stdin is not None and self._server.stdout is not None
        self._server.stdin.close()
        self._server.wait(_LONGEST)
        self._server.stdout.close()


@contextmanager
def processes() -> Iterator[Processes]:
    """A server for the block."""
    server = Processes()
    try:
        yield server
    finally:
        server.close()


def lose_power(disk: Disk, folder: Path, rng: random.Random) -> str:
    """Make the folder what is left of the disk; by which model."""
    shutil.rmtree(folder)
    folder.mkdir()
    model = rng.choice(("data", "entries", "entries"))
    disk.write(folder, model, rng.randrange(1 << 30))
    return model


#: Steps of a world, each as often as it is taken.
NAMES = ("charge", "charge", "answer", "answer", "anew", "anew", "raise", "close")


def live(server: Processes, seed: int, scratch: Path, sabotaged: str = "") -> World:
    """One world; raises `BrokenError` if what must hold does not."""
    rng, world = random.Random(seed), World()
    folder, journal = scratch / f"world-{seed}", scratch / f"journal-{seed}"
    folder.mkdir()
    disk, backups = Disk(folder), list[tuple[bytes, dict[str, Any], frozenset[str]]]()

    def step(name: str, number: int, action: str, at: int) -> tuple[int, dict[str, Any]]:
        journal.unlink(missing_ok=True)
        code, report = server.run({
            "path": str(folder / "account.db"), "folder": str(folder), "step": name,
            "number": number, "at": at, "action": action, "journal": str(journal),
            "out": str(scratch / f"said-{seed}"), "sabotage": sabotaged,
        })  # fmt: skip
        for call in calls(journal):
            disk.replay(call)
        world.history.append(f"{number} {name} {action} at {at}: {code} {report}")
        return code, report

    for number in range(STEPS):
        name = rng.choice(NAMES)
        if not world.made:
            name = "make"
        action = rng.choice(("count", "count", "count", "kill", "tear", "EIO", "ENOSPC"))
        code, step_report = step(
            name, number, action, 0 if action == "count" else rng.randint(1, 16)
        )
        if code not in (ANSWERED, REFUSED) and code >= 0:
            raise BrokenError(f"step {number}: exit {code}")
        if action == "count" and code == REFUSED and "limit" not in step_report["refused"]:
            raise BrokenError(f"step {number}: refused: {step_report['refused']}")
        world.hear(f"step {number}", step_report)
        if rng.random() < 0.3:
            world.history.append(f"power lost: {lose_power(disk, folder, rng)}")
            disk = Disk(folder)
        code, seen = step("read", number, "count", 0)
        if code == ANSWERED:
            world.check(f"after step {number}", seen)
        elif world.made:
            raise BrokenError(f"after step {number}: it cannot be read: {seen}")
        if world.made and rng.random() < 0.2:
            data = (folder / "account.db").read_bytes()
            backups.append((data, seen, frozenset(world.closed)))
        if backups and rng.random() < 0.15:
            data, then, closed = rng.choice(backups)
            (folder / "account.db").write_bytes(data)
            disk = Disk(folder)
            if world.restore(then, closed):
                code, step_report = step("charge", number, "count", 0)
                if code != REFUSED or "recover" not in step_report["refused"]:
                    raise BrokenError(
                        f"after step {number}: an older account is used: {step_report}"
                    )
            step("recover", number, action, rng.randint(1, 16))
            code, step_report = step("recover", number, "count", 0)
            if code != ANSWERED:
                raise BrokenError(f"after step {number}: it cannot be recovered: {step_report}")
            code, seen = step("read", number, "count", 0)
            world.check(f"after the recovery of step {number}", seen)
    shutil.rmtree(folder)
    return world


def serve() -> None:
    """Fork a process for each order."""
    import dpstream.state.ledger.contract
    import dpstream.state.ledger.open  # noqa: F401

    library_ = ctypes.CDLL(os.environ["LD_PRELOAD"])
    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            code = 70
            try:
                code = _child(json.loads(line), library_)
            except BaseException:
                import traceback

                traceback.print_exc()
            finally:
                os._exit(code)
        _, status = os.waitpid(child, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)


def main(arguments: Sequence[str]) -> int:
    """Run worlds; the number of those that break."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--seed", type=int)
    parser.add_argument("--sabotage", default="")
    options = parser.parse_args(arguments)
    if options.serve:
        serve()
        return 0
    broken, charges = 0, 0
    seeds = range(options.seeds) if options.seed is None else [options.seed]
    with processes() as server, tempfile.TemporaryDirectory() as scratch:
        for seed in seeds:
            try:
                world = live(server, seed, Path(scratch), options.sabotage)
                charges += len(world.charged)
            except BrokenError as error:
                broken += 1
                print(f"seed {seed}: {error}")
            else:
                if options.seed is not None:
                    print("\n".join(world.history))
    print(f"{len(seeds)} worlds, {charges} charges, {broken} broken")
    return broken


if __name__ == "__main__":
    sys.exit(bool(main(sys.argv[1:])))

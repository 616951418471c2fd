"""Commands of ``dpstream`` in children of one process, below the preloaded library.

The server imports the program once; each command is a forked child that arms the library and then
is the real command, to its exit.  Run ids depend on the attempt's ``seed`` and on the function that
draws them, so that a repeated command has those of an undisturbed one.
"""

import atexit
import contextlib
import ctypes
import errno
import functools
import hashlib
import importlib
import json
import os
import pkgutil
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from tests.faults.filecalls.disk import (
    LINK,
    LOCK,
    LOOK,
    MKDIR,
    OPEN,
    READ,
    RENAME,
    RMDIR,
    SYMLINK,
    SYNC,
    TRUNCATE,
    UNLINK,
    WRITE,
)

#: Calls that make, remove or rename an entry of a folder; and all calls that change something.
_ENTRIES = (OPEN, RENAME, LINK, UNLINK, MKDIR, RMDIR, SYMLINK)
_CHANGES = (*_ENTRIES, WRITE, SYNC, TRUNCATE)
#: Failures, each with the calls that a system fails so.  EACCES at a lock says who has it.
ERRORS = {
    "EIO": (*_CHANGES, LOOK, READ, LOCK),
    "ESTALE": (*_CHANGES, LOOK, READ, LOCK),
    "ENOMEM": (*_CHANGES, LOOK, READ, LOCK),
    "EACCES": (*_ENTRIES, LOOK),
    "ENOLCK": (LOCK,),
    "ENOSPC": _CHANGES,
    "EDQUOT": _CHANGES,
    "EROFS": _CHANGES,
    "EMFILE": (OPEN, LOOK),
    "EINTR": _CHANGES,
}
#: What can happen at a call.
ACTIONS = {"count": 0, "kill": 1, "tear": 2, **dict.fromkeys(ERRORS, 3)}
#: Modules that start something at import, or need what these tests do not.
OPTIONAL = ("beam_yaml", "prism_build", "__main__")
#: No command of these tests needs as long.
LONGEST = 120
#: Where run ids and nonces are drawn, for their callers; other random names stay random.
DRAWERS = ("dpstream.state.ledger.events", "dpstream.pipelines.session.ask")
#: Functions of the Python interface, which `tests.pipelines.ask.kinds` asks.
FUNCTIONS = ("frame", "keys")
_SOURCE = Path(__file__).with_name("filecalls.c")


@functools.cache
def library() -> Path:
    """The preloaded library, built by the machine's compiler."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        raise FileNotFoundError("a C compiler (cc or gcc) is missing")
    digest = hashlib.sha256(_SOURCE.read_bytes()).hexdigest()[:16]
    built = Path(os.environ.get("TMPDIR", "/tmp")) / f"dpstream-filecalls-{os.getuid()}-{digest}.so"
    if not built.exists():
        draft = built.with_suffix(f".{os.getpid()}")
        subprocess.run([compiler, "-O2", "-shared", "-fPIC", "-o", str(draft), str(_SOURCE)],
                       check=True)  # fmt: skip
        draft.rename(built)
    return built


def kinds_of(action: str) -> int:
    """The calls that an action meets, as the library takes them."""
    return sum(1 << kind for kind in ERRORS.get(action, ()))


@dataclass(frozen=True)
class Ended:
    """How a command ended: its exit code (negative: the signal) and what it printed."""

    code: int
    stdout: str
    stderr: str


class Server:
    """Runs commands one after the other."""

    def __init__(self) -> None:
        env = os.environ | {"LD_PRELOAD": str(library()), "OPENBLAS_NUM_THREADS": "1"}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.faults.filecalls.server"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=env, text=True,
        )  # fmt: skip

    def run(
        self,
        args: Sequence[str],
        folder: Path,
        *,
        at: int = 0,
        action: str = "count",
        sticky: bool = False,
        journal: Path | None = None,
        noise: Path | None = None,
        held: bool = False,
        fixed: bool = True,
        kind: str | None = None,
    ) -> Ended:
        """Run ``dpstream ARGS`` in a folder; at the call number ``at`` the action happens.

        Args:
            at: 1 is the first call below the folder; 0 counts only.
            action: a key of `ACTIONS`.
            sticky: each later call fails too.
            journal: where calls are recorded; outside the folder.
            noise: where the blocks of noise that it draws are written, one after the other.
            fixed: run ids are those of an undisturbed run; else they are drawn.
            held: sabotage: its noise does not know the exact numbers that it is added to, nor a
                stream's the input.
            kind: instead of a command, ask the question of this name (`one_noise.QUESTIONS`), which
                may be a function of a program.
        """
        out = folder.parent / f"{folder.name}.printed"
        order = {
            "args": list(args), "folder": str(folder), "at": at, "action": ACTIONS[action],
            "code": getattr(errno, action, 0), "sticky": sticky, "kinds": kinds_of(action),
            "journal": None if journal is None else str(journal), "out": str(out),
            "noise": None if noise is None else str(noise), "held": held,
            "fixed": fixed, "kind": kind,
        }  # fmt: skip
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()
        code = int(self._process.stdout.readline())
        return Ended(code, Path(f"{out}.1").read_text(), Path(f"{out}.2").read_text())

    def close(self) -> None:
        """End the server."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(LONGEST)
        self._process.stdout.close()


@contextmanager
def serving() -> Iterator[Server]:
    """A server that ends with the block."""
    server = Server()
    try:
        yield server
    finally:
        server.close()


def _run_ids(charges: int) -> None:
    """Run ids by the function that draws them, how often it did, and the charges before."""
    import secrets

    drawn: dict[str, int] = {}
    real = secrets.token_hex

    def token_hex(nbytes: int | None = None) -> str:
        frame = sys._getframe(1)
        if frame.f_globals.get("__name__") not in DRAWERS or frame.f_back is None:
            return real(nbytes)
        frame = frame.f_back
        name = f"{frame.f_globals.get('__name__')}.{frame.f_code.co_name}"
        drawn[name] = drawn.get(name, 0) + 1
        account = frame.f_locals.get("account")
        number = f"{drawn[name]} of {charges}" if account is None else len(account.charges)
        # A second run of one job is another one.
        name = f"{name} {number}{' anew' * ('--fresh' in sys.argv)}"
        return hashlib.sha256(name.encode()).hexdigest()[:32]

    secrets.token_hex = token_hex


def _charges(account: Path) -> int:
    """How many charges an account has."""
    from dpstream.accounting.errors import DpstreamError
    from dpstream.state.ledger.events import Charge
    from dpstream.state.ledger.open import read_ledger

    with contextlib.suppress(DpstreamError):
        return sum(isinstance(entry.event, Charge) for entry in read_ledger(account))
    return 0


def _child(order: dict[str, Any], calls: ctypes.CDLL) -> None:
    from dpstream.pipelines.cli.main import main
    from tests.faults.one_noise import any_input, asked_of, recorded_noise
    from tests.fixed import fixed_date

    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for number in (1, 2):
        fd = os.open(f"{order['out']}.{number}", os.O_CREAT | os.O_TRUNC | os.O_WRONLY, 0o600)
        os.dup2(fd, number)
        os.close(fd)
    sys.stdout, sys.stderr = (os.fdopen(n, "w", closefd=False) for n in (1, 2))
    os.chdir(order["folder"])
    if order["fixed"]:
        _run_ids(_charges(Path("account/ledger.db")))
    sys.argv = ["dpstream", *order["args"]]
    journal = order["journal"]
    calls.filecalls_arm(
        order["folder"].encode(), ctypes.c_long(order["at"]), order["action"], order["code"],
        int(order["sticky"]), order["kinds"], journal.encode() if journal else None,
    )  # fmt: skip
    signal.alarm(LONGEST)
    with contextlib.ExitStack() as stack:
        stack.enter_context(fixed_date())
        if order["held"]:
            stack.enter_context(any_input())
        if order["noise"] is not None:
            drawn = stack.enter_context(recorded_noise())
            stack.callback(lambda: Path(order["noise"]).write_bytes(b"".join(sorted(drawn))))
        if order["kind"] is not None or order["args"][0] in FUNCTIONS:
            asked_of(order["kind"] or order["args"][0])
        main()


def _import_all() -> None:
    """Import what the commands need, once."""
    for root in ("accounting", "state", "dp_transforms", "pipelines"):
        package = importlib.import_module(f"dpstream.{root}")
        for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            if not module.name.endswith(OPTIONAL):
                importlib.import_module(module.name)
    importlib.import_module("tests.faults.one_noise")


def _serve(orders: IO[str], answers: IO[str]) -> None:
    _import_all()
    calls = ctypes.CDLL(os.environ["LD_PRELOAD"])
    for line in orders:
        child = os.fork()
        if child == 0:
            code = 70
            try:
                _child(json.loads(line), calls)
                code = 0
            except SystemExit as stop:
                code = stop.code if isinstance(stop.code, int) else 1
            except BaseException:
                import traceback

                traceback.print_exc()
            finally:
                threading._shutdown()  # type: ignore[attr-defined]
                atexit._run_exitfuncs()
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(code)
        _, status = os.waitpid(child, 0)
        answers.write(f"{os.waitstatus_to_exitcode(status)}\n")
        answers.flush()


if __name__ == "__main__":
    _serve(sys.stdin, sys.stdout)

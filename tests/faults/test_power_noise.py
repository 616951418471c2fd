"""One noise meets one input after a loss of power, wherever it comes in a command.

A command is run once and its file calls and noise are recorded.  Then, for some of the calls, the
disk is what a loss of power at that call leaves; one unit's rows are taken away, and the command is
typed again.  A question's run id is the same one where its charge was lost, which is the worst
that can be.  A stream's is drawn: its store has both the run id and the input, or is lost.
"""

import random
import shutil
from pathlib import Path

import pytest

from tests.faults.filecalls.disk import HARMLESS, Call, Disk, calls
from tests.faults.filecalls.server import Ended, Server
from tests.faults.filecalls.sweep import LOSSES, PLACE
from tests.faults.one_noise import QUESTIONS, STREAMS, Attempt, reused
from tests.pipelines.ask.kinds import within

FAST = {"sql": 3}
SLOW_CALLS = 12
_BLOCK = 16


def drawn(path: Path) -> frozenset[bytes]:
    """The blocks of noise that a command wrote down; none if it was refused."""
    data = path.read_bytes() if path.exists() else b""
    path.unlink(missing_ok=True)
    return frozenset(data[at : at + _BLOCK] for at in range(0, len(data), _BLOCK))


def attempts(server: Server, name: str, folder: Path, held: bool, number: int) -> list[Attempt]:
    """The undisturbed command, and the same on other rows after losses of power."""
    kind, case, before = (QUESTIONS | STREAMS)[name], folder / PLACE, folder / "before"
    journal, noise, fixed = folder / "journal", folder / "noise", name not in STREAMS

    def answer(into: Path | None = None) -> Ended:
        return server.run((), case, journal=into, noise=noise, held=held, fixed=fixed, kind=name)

    kind.command.prepare(server, case)
    shutil.copytree(case, before, symlinks=True)
    ended = answer(journal)
    assert ended.code == 0, ended.stderr
    out, recorded, rng = [Attempt("same", drawn(noise))], changes_in(journal), random.Random(name)
    for at in sorted(rng.sample(range(1, len(recorded) + 1), min(number, len(recorded)))):
        lose_power(before, recorded[:at], rng, case)
        with within(case):
            kind.change("neighbour")
        ended = answer()
        assert ended.code in (0, 3, 4), ended.stderr
        out.append(Attempt(f"after call {at}", drawn(noise)))
    return out


def changes_in(journal: Path) -> list[Call]:
    """The recorded calls that may have changed something."""
    return [call for call in calls(journal) if call.kind not in HARMLESS]


def lose_power(before: Path, recorded: list[Call], rng: random.Random, case: Path) -> None:
    """Make the folder what the disk holds after these calls and a loss of power."""
    disk = Disk(before)
    for call in recorded:
        disk.replay(call)
    shutil.rmtree(case)
    case.mkdir()
    disk.write(case, rng.choice(LOSSES), rng.randrange(1 << 30))


EACH = pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=[] if n in FAST else pytest.mark.slow) for n in QUESTIONS | STREAMS],
)


@EACH
def test_no_noise_meets_two_inputs_after_a_loss_of_power(
    name: str, server: Server, tmp_path: Path
) -> None:
    first, *others = attempts(server, name, tmp_path, False, FAST.get(name, SLOW_CALLS))
    assert first.drawn and any(other.drawn for other in others)
    assert [reused([first, other]) for other in others if reused([first, other])] == []


@EACH
def test_noise_that_does_not_know_its_input_is_seen(
    name: str, server: Server, tmp_path: Path
) -> None:
    first, *others = attempts(server, name, tmp_path, True, FAST.get(name, SLOW_CALLS))
    assert any(reused([first, other]) for other in others)

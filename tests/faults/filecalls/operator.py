"""An operator who does what a message says, and nothing else, until the command is done.

A message says what to type next: a command in backticks, the same command again, or another name
for what is there already.  Whatever it says about the machine (free space, rights, the disk) is
done by the time a command is typed again: faults happen once.  A process that was killed says
nothing, and a supervisor repeats it with its own words.
"""

import json
import re
import shlex
from collections.abc import Callable, Sequence

from dpstream.state.disk_errors import FORESEEN, cause_of
from tests.faults.filecalls.server import Ended

#: Commands that one message may lead to, one after the other.
_STEPS = 6
#: Commands that show what is there: after them nothing is left to do.
_SHOWS = {"plan", "show", "info", "SELECT * FROM dpstream.budget", "check"}
_COMMAND = re.compile(r"`dpstream ([^`]+)`")
_AGAIN = re.compile(r"\b(?:run|type|ask|try)\b[^;.]*\bagain\b|run the same command")
_ANOTHER = re.compile(r"another (?:name|path|folder)|a new (?:name|folder|one)")
_ADDED = re.compile(r"\badd (--\w+ \w+)")
_REPAIRS = {cause_of(OSError(number, "")).fix for number in FORESEEN}


class Stuck(Exception):
    """Signals that a message does not say what to type."""


def fix_of(ended: Ended) -> str:
    """What the message of a failed command says to do."""
    line = ended.stderr.strip().splitlines()[-1] if ended.stderr.strip() else ""
    if line.startswith("{"):
        return str(json.loads(line)["fix"])
    _, printed, fix = line.partition(" Fix: ")
    if not printed:
        raise Stuck(f"no fix: {ended.stderr[-300:]}")
    return fix


def obeyed(
    run: Callable[[Sequence[str]], Ended],
    words: Sequence[str],
    ended: Ended,
    renamed: tuple[str, str] | None = None,
) -> Ended:
    """Do what messages say; return how the last command ended, which is 0.

    Args:
        run: types a command.
        words: the command that failed, with its flags; ended: how it did.
        renamed: a word that names what it makes, and another name.

    Raises:
        Stuck: a message does not lead to the end.
    """
    typed = list[str]()
    for _ in range(_STEPS):
        if ended.code == 0:
            return ended
        fix = "type it again" if ended.code < 0 else fix_of(ended)
        commands = [shlex.split(command) for command in _COMMAND.findall(fix)]
        for command in commands[:1]:
            ended = run(command)
            typed.append(" ".join(command))
            if ended.code != 0:
                raise Stuck(f"the fix fails: `{typed[-1]}`: {ended.stderr[-300:]}")
            if _SHOWS & {*command}:
                return ended
        added = _ADDED.search(fix)
        if added is not None:
            words = [*words, *added[1].split()]
        elif not commands and _ANOTHER.search(fix) and renamed is not None:
            words = [renamed[1] if word == renamed[0] else word for word in words]
        elif not commands and not _AGAIN.search(fix) and fix.rstrip(".") not in _REPAIRS:
            raise Stuck(f"the fix says nothing to type: {fix}")
        ended = run(words)
        typed.append(" ".join(words))
    raise Stuck(f"no end: {typed}: {ended.stderr[-300:]}")

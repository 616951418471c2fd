"""Names of the command line, in a public file beside the project file: predicates of subspaces, and
run ids of allotments.
"""

import shlex
from pathlib import Path

import msgspec

from dpstream.accounting.errors import PolicyError, UsageError, closest
from dpstream.pipelines.session.config import Config
from dpstream.state.disk_errors import file_error, file_errors
from dpstream.state.durable import PRIVATE, replacing
from dpstream.state.locks import held

MAX_BYTES = 16 << 20


def file_of(config: Config) -> Path:
    """Return the file with the names of a table."""
    return config.base / f"{config.name}.names.json"


class Names(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The predicates and run ids that names stand for.

    Attributes:
        subspaces: predicates by name.
        allotments: run ids by name.
    """

    subspaces: dict[str, str] = {}
    allotments: dict[str, str] = {}


def read(config: Config) -> Names:
    """Return the names of a table; none if there is no file.

    Raises:
        PolicyError: the file has another format.
        RunError: the file cannot be read.
    """
    try:
        with open(file_of(config), "rb") as file:
            return msgspec.json.decode(file.read(MAX_BYTES), type=Names)
    except FileNotFoundError:
        return Names()
    except OSError as error:
        raise file_error("names", "cannot be read", error) from None
    except (msgspec.MsgspecError, UnicodeError):
        raise PolicyError("names", "are in a file of another form", "remove the file") from None


def predicate(config: Config, name: str, flags: str = "") -> str:
    """Return the predicate that a name stands for.

    Args:
        flags: the options that locate the project file, as they are typed.

    Raises:
        UsageError: there is no such name.
    """
    predicates = read(config).subspaces
    if name not in predicates:
        typed = shlex.join(["dpstream", "session", "select", config.name, name])
        fix = f"{closest(name, predicates)}; make it: `{typed} --where 'CONDITION'{flags}`"
        raise UsageError("--in", f"no points are named {name!r}", fix)
    return predicates[name]


def allotment(config: Config, text: str) -> str:
    """Return the run id that a name stands for; any other text is returned as it is."""
    return read(config).allotments.get(text, text)


def write(config: Config, name: str, predicate: str = "", run_id: str = "") -> None:
    """Give a predicate or an allotment a name; an earlier meaning of the name is replaced.

    Concurrent writers wait for each other, so that no name is lost.

    Raises:
        RunError: the file cannot be written.
    """
    file = file_of(config)
    with file_errors("names", "cannot be written"), held(file.with_name(f".{file.name}.lock")):
        names = read(config)
        if run_id:
            names = Names(names.subspaces, names.allotments | {name: run_id})
        else:
            names = Names(names.subspaces | {name: predicate}, names.allotments)
        with replacing(file, PRIVATE) as draft:
            draft.write_bytes(msgspec.json.encode(names, order="sorted"))


def check(name: str) -> None:
    """Refuse a text that cannot be a name.

    Raises:
        UsageError: the text cannot be a name.
    """
    if not name.isidentifier():
        raise UsageError("NAME", "must be letters, digits and _", "choose another name")

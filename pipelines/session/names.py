"""Named subspaces of the command line: predicates by name, in a public file beside TABLE.toml."""

import json
from pathlib import Path

from dpstream.accounting.errors import PolicyError, RunError, UsageError
from dpstream.state.durable import replacing

MAX_BYTES = 16 << 20


def file_of(table: Path) -> Path:
    """Where the names of a TABLE.toml are."""
    return table.with_name(f"{table.stem}.subspaces.json")


def read(table: Path) -> dict[str, str]:
    """Predicates by name; none without a file.

    Raises:
        PolicyError: the file is none of ours; RunError: it cannot be read.
    """
    try:
        with open(file_of(table), encoding="utf-8") as file:
            found = json.loads(file.read(MAX_BYTES))
    except FileNotFoundError:
        return {}
    except OSError:
        raise RunError("subspaces", "cannot be read", "check the file's permissions") from None
    except ValueError:
        found = None
    if not isinstance(found, dict) or not all(isinstance(text, str) for text in found.values()):
        raise PolicyError("subspaces", "are no names with predicates", "remove the file")
    return found


def predicate(table: Path, name: str) -> str:
    """The predicate of a name.

    Raises:
        UsageError: there is none.
    """
    found = read(table)
    if name not in found:
        raise UsageError("--in", "has no such name", "make it with `dpstream session select`")
    return found[name]


def write(table: Path, name: str, text: str) -> None:
    """Give a predicate a name, which may have had another.

    Raises:
        UsageError: the name is none; RunError: the file cannot be written.
    """
    if not name.isidentifier():
        raise UsageError("NAME", "must be letters, digits and _", "choose another name")
    found = read(table) | {name: text}
    try:
        with replacing(file_of(table)) as draft:
            draft.write_text(json.dumps(found, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    except OSError:
        raise RunError("subspaces", "cannot be written", "check the folder") from None

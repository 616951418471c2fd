"""The account of a session table: chosen or made once, named in the table's file, and migrated to
wider dimensions."""

import contextlib
import json
import re
import tomllib
from pathlib import Path

from dpstream.accounting.errors import UsageError
from dpstream.pipelines.drafting.account import Wanted, at, chosen_account, listed_at, seen_from
from dpstream.pipelines.drafting.ask import Person
from dpstream.pipelines.session.config import Config, load_config
from dpstream.pipelines.session.manifest import MANIFEST, read_manifest, refuse_table
from dpstream.state.disk_errors import file_errors
from dpstream.state.durable import replacing
from dpstream.state.ledger.events import RECORD, Created
from dpstream.state.ledger.open import (
    AccountPlace,
    create_account,
    ledger_exists,
    open_ledger,
)
from dpstream.state.ledger.widening import widen


def with_account(
    path: Path, person: Person, account: str | None, new_account: bool
) -> tuple[Config, bool]:
    """The table of a file whose account is there, and whether the file names it only now.

    A process that is stopped between account and file leaves an account without a charge, which
    the same command takes up.

    Args:
        person: who is asked where accounts are there; account, new_account: what the flags say.

    Raises:
        PolicyError: the folder holds a table, whose account is another one then.
        UsageError: the flags do not fit, nobody says which account, or the file cannot take it.
    """
    config = load_config(path, without_account=True)
    place = config.account
    if place.id:
        _check_flags(config, account, new_account)
        return config, False
    refuse_table(config.folder)
    wanted: Wanted = (place.data_set, RECORD, "string", None)
    there = listed_at(place.path) if ledger_exists(place.path) else None
    own = place.path if there is not None and there.made_for(wanted) else None
    chosen = chosen_account(path.absolute().parent, person, account, new_account, wanted, own)
    if chosen is not None:
        taken, created = at(chosen)
        _check_records(created)
    elif there is not None and own is None:
        raise UsageError(
            "account.path",
            f"is an account already, of the data set {there.created.data_set!r}",
            "--account PATH to charge it, or write another path for the new account",
        )
    else:
        taken = place.path
        created = there.created if there is not None else create_account(taken, *wanted)
    _write(path, seen_from(path.absolute().parent, taken), created)
    return load_config(path), True


def _check_flags(config: Config, account: str | None, new_account: bool) -> None:
    """Refuse flags that say another thing than a file that names its account already, unless the
    same command wrote it and was cut off behind that.

    Raises:
        UsageError: they do.
    """
    if account is None and not new_account:
        return
    with contextlib.closing(open_ledger(config.account)) as ledger:
        ledger_account = ledger.book()
    if (
        ledger_account.charges
        if new_account
        else at(account or "")[1].id != ledger_account.created.id
    ):
        raise UsageError(
            "--new-account" if new_account else "--account",
            f"does not fit: the table file names the account {ledger_account.created.id} already",
            "omit the flag, or write a table file without account.id",
        )


def _check_records(created: Created) -> None:
    """Refuse an account of persons.

    Raises:
        UsageError: it is one.
    """
    if created.unit != RECORD or created.limit is not None:
        raise UsageError(
            "--account",
            f"is of the unit {created.unit} ({created.type}) and has a limit: the records of a "
            "table have budgets of their own",
            "--new-account, or the account of another table of these records",
        )


def migrate(old_path: Path, new_path: Path) -> tuple[Config, int | None]:
    """Embed what a table's points have spent in the wider space of another table file.

    The new file may name no account yet; it names the old one's from then on.  The same call
    again does what is left of it.

    Returns:
        The table of the new file, and how many charges were embedded; ``None``: they were before.

    Raises:
        UsageError: the old space has no place in the new one, or the files do not fit.
        PolicyError: the account, or the new file's folder, is of another table.
    """
    old, new = load_config(old_path), load_config(new_path, without_account=True)
    own = old.account
    if new.account.id and _named(new.account) != _named(own):
        raise UsageError(
            "ledger",
            f"of {new_path.name} names another account",
            f"copy [ledger] of {old_path.name}, or omit its id",
        )
    columns = dict(zip((d.name for d in old.table.dimensions), _columns(old), strict=True))
    for dimension, column in zip(new.table.dimensions, _columns(new), strict=True):
        if columns.get(dimension.name, column) != column:
            raise UsageError(
                f"dimension {dimension.name}",
                "is of another column, or has another value: records would be at other points",
                "keep its column and value",
            )
    if (new.folder / MANIFEST).exists():
        read_manifest(new.folder, new.table)
    with contextlib.closing(open_ledger(own)) as ledger:
        embedded = widen(ledger, old.table, new.table)
    if not new.account.id:
        created = Created(own.id, own.data_set, RECORD, "string", None)
        _write(new_path, seen_from(new_path.absolute().parent, own.path), created)
    return load_config(new_path), embedded


def _named(account: AccountPlace) -> tuple[str, str, str]:
    """What a file says of its account."""
    return account.path, account.data_set, account.id


def _columns(config: Config) -> list[tuple[str | None, float | None]]:
    """Where the coordinates of each dimension come from."""
    return list(zip(config.columns, config.fixed, strict=True))


def _write(path: Path, account: str, created: Created) -> None:
    """Name an account in a table's file: its path, its data set, and its id behind them.

    Raises:
        UsageError: the file has a form that takes no line; RunError: it cannot be written.
    """
    text = path.read_text(encoding="utf-8")
    pairs = {"path": account, "data_set": created.data_set, "id": created.id}
    lines = {name: f"{name} = {_quoted(value)}" for name, value in pairs.items()}
    new, before = text, tomllib.loads(text)["ledger"]
    for name in ("path", "data_set"):
        if before.get(name) != pairs[name]:
            new = _in_ledger(new, name, lines[name])
    new = _in_ledger(new, "data_set", "{old}\n" + lines["id"])
    if tomllib.loads(new).get("ledger") != {**before, **pairs}:
        add = ", ".join(lines.values())
        raise UsageError("ledger", "cannot be written to", f"write {add} into [ledger]")
    with (
        file_errors("table file", "cannot be written"),
        replacing(path, path.stat().st_mode & 0o666) as draft,
    ):
        draft.write_text(new, encoding="utf-8")


def _in_ledger(text: str, name: str, line: str) -> str:
    """The text with another line for a name of ``[ledger]``, in which {old} is the line before."""
    section = re.search(r"(?m)^\[ledger\][^\n]*\n(?:(?!\[)[^\n]*\n?)*", text)
    if section is None:
        return text
    pattern = rf"(?m)^[ \t]*{name}[ \t]*=[^\n]*"
    new = re.sub(pattern, lambda old: line.replace("{old}", old[0]), section[0], count=1)
    return text[: section.start()] + new + text[section.end() :]


def _quoted(value: str) -> str:
    return json.dumps(value, ensure_ascii=False)

"""Check of dead letters, which `connectors.write` writes."""

import hashlib
from pathlib import Path

import pyarrow.compute as pc
import pyarrow.parquet as pq

from dpstream.accounting.errors import RunError
from dpstream.accounting.places import matching_in
from dpstream.pipelines.formats.rows import DAMAGE
from dpstream.state.disk_errors import file_errors
from dpstream.state.repository import refuse_tracked


def check_dead_letters(folder: Path, field: str = "dead_letter") -> None:
    """Check each file of dead letters: its name is the digest of its bytes.

    A run that is finished, and one without end, does not read again what was refused, so it could
    not write a damaged file again.

    Args:
        folder: there may be none; field: the public name of what names it.

    Raises:
        PolicyError: git tracks a file of them.
        RunError: a file is damaged, or cannot be read.
    """
    refuse_tracked(field, folder, "it holds records that were refused")
    with file_errors(field, "cannot be read"):
        damaged = sum(
            path.stem != f"part-{_digest_of(path)}"
            for path in matching_in(folder, "part-*.parquet")
        )
    if damaged:
        raise RunError(
            field,
            f"has {damaged} damaged file(s) of dead letters",
            f"restore them, or move the folder {folder.name} away, then run the same command "
            "again; a run that is not finished writes them again",
        )


def damage_in(folder: Path) -> dict[int, str]:
    """Return the reason for each partition that dead letters call damaged; see `rows.DAMAGE`.

    Raises:
        RunError: a file cannot be read.
    """
    reasons = dict[int, str]()
    with file_errors("dead_letter", "cannot be read"):
        for path in matching_in(folder, "part-*.parquet"):
            letters = pq.read_table(path, filters=pc.field("reason").isin(sorted(DAMAGE)))
            reasons |= zip(
                letters["partition"].to_pylist(), letters["reason"].to_pylist(), strict=True
            )
    return reasons


def _digest_of(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest()

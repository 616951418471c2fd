"""What every kind of question tells whoever asks again, and on neighbouring rows: nothing new."""

import re
from pathlib import Path

import pytest

from tests import accounts
from tests.fixed import fixed_run_ids
from tests.pipelines.ask.kinds import KINDS, ROWS, Kind, Said, account_of, left, typed, within

ACCOUNT = Path("account/ledger.db")


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> Kind:
    return KINDS[request.param]


def world(kind: Kind, folder: Path) -> None:
    """The files of a kind's world, in a new folder."""
    folder.mkdir()
    kind.command.world(folder)
    job = folder / "job.toml"
    if job.exists():  # so that several questions fit into the limit
        job.write_text(job.read_text().replace("epsilon = 15.0", "epsilon = 9.0"))
    with within(folder):
        for words in kind.command.before:
            if callable(words):
                words(Path())
                continue
            said = typed(*words)
            assert said.code == 0, said.stderr


def emptied(kind: Kind) -> None:
    """Remove the output, as somebody does who wants it again."""
    for name in kind.lost:
        for path in [Path(name), *Path(name).rglob("*")][::-1]:
            path.rmdir() if path.is_dir() else path.unlink(missing_ok=True)


def entries() -> int:
    """How many charges the account has."""
    return len(accounts.charges(ACCOUNT))


def test_asking_again_tells_nothing_of_the_rows(kind: Kind, tmp_path: Path) -> None:
    """After one answer the question is answered from the account: whether rows are the same,
    without one unit's, or gone."""
    seen = list[tuple[Said, object]]()
    world(kind, tmp_path / "world")
    with within(tmp_path / "world"):
        first = kind.ask()
        assert first.code == 0, first.stderr
        for rows in ROWS:
            kind.change(rows)
            emptied(kind)
            seen.append((kind.ask(), left(Path(), kind.private)))
        assert entries() == 1
    assert seen[0][0].code == 0, seen[0][0].stderr
    assert seen[1] == seen[0]
    assert seen[2] == seen[0]


def test_as_of_and_fresh_are_new_charges(kind: Kind, tmp_path: Path) -> None:
    world(kind, tmp_path / "world")
    with within(tmp_path / "world"):
        kind.ask()
        for number, options in enumerate((("--as-of", "May"), ("--fresh",)), 2):
            emptied(kind)
            said = kind.ask(*options)
            assert said.code == 0, said.stderr
            assert entries() == number
        emptied(kind)
        assert kind.ask("--as-of", "May").code == 0
        assert entries() == 3


def shape(text: str) -> str:
    """A text without its figures and digests."""
    text = re.sub(r"\b[0-9a-f]{16}([0-9a-f]{16})?\b", "digest", text)
    return re.sub(r"-?\d+(\.\d+)?(e[+-]?\d+)?", "#", text)


def test_first_answers_on_neighbours_differ_in_released_values_alone(
    kind: Kind, tmp_path: Path
) -> None:
    seen = []
    for rows in ("same", "neighbour"):
        world(kind, tmp_path / rows)
        with within(tmp_path / rows), fixed_run_ids():
            kind.change(rows)
            said = kind.ask()
            files = {
                name: None for name in left(Path(), (*kind.private, "account/ledger.db.answers"))
            }
            charges = [shape(line) for line in account_of(ACCOUNT) if '"entries"' in line]
        seen.append((said.code, shape(said.stdout), said.stderr, files, charges))
    assert seen[0] == seen[1]

"""An account is made by one function, and opened by the name that a file has for it.

Which copy of a store goes on: every order of two starters, every crash, sabotaged protocols.
"""

import itertools
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from dpstream.state.ledger import lineage as tokens
from dpstream.state.ledger.contract import Ledger
from dpstream.state.ledger.events import Head, is_id
from dpstream.state.ledger.open import (
    AccountPlace,
    check_names,
    file_of,
    ledger_exists,
    limit_of,
    open_ledger,
    open_path,
    place_below,
    read_history,
    read_ledger,
)
from dpstream.state.retention_store import REPLAY, RESTORE
from dpstream.state.sqlite.store import SqliteStore
from dpstream.state.store import Store
from tests import accounts
from tests.golden.refusals import Refused
from tests.state.conformance import KEY_SCHEMA, STREAMS
from tests.state.ledger.conformance import charge
from tests.state.ledger.starters import (
    CHARGE,
    GATES,
    LIMIT,
    Starter,
    World,
    copied,
    enter,
    every_order,
    new_world,
)


def test_made_and_opened_again(tmp_path: Path) -> None:
    path = tmp_path / "new" / "folder" / "ledger.db"
    assert not ledger_exists(path)
    path.parent.mkdir(mode=0o700, parents=True)
    path.touch()  # as a creation that was cut off leaves it
    assert not ledger_exists(path)
    made = accounts.created(path)
    assert ledger_exists(path) and is_id(made.id)
    place = AccountPlace(str(path), "flights", made.id)
    ledger = open_ledger(place)
    assert isinstance(ledger, Ledger) and (ledger.id, ledger.data_set) == (made.id, "flights")
    ledger.charge(charge(1))
    ledger.close()
    again = open_ledger(place)
    assert again.entries() == accounts.charges(path) == read_history(place).charges
    assert accounts.undated(again.entries()) == [charge(1)]
    again.close()


def test_ids_are_drawn(tmp_path: Path) -> None:
    made = [accounts.created(tmp_path / f"{n}.db") for n in range(3)]
    assert len({each.id for each in made}) == 3


def test_only_the_named_account_is_opened(tmp_path: Path, refused: Refused) -> None:
    """Absent, of another id, of another data set: refused by who charges and by who plans."""
    path = str(tmp_path / "ledger.db")
    accounts.create(path, "flights")
    for place in (
        AccountPlace(path, "flights", "f" * 16),
        AccountPlace(path, "weather", accounts.ID),
        AccountPlace(str(tmp_path / "none.db"), "flights", accounts.ID),
    ):
        for attempt in (open_ledger, read_history):
            refused(attempt, place)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["ledger.db"]
    assert len(read_ledger(path)) == 1


def test_an_account_without_an_entry_that_was_seen_is_refused(
    tmp_path: Path, refused: Refused
) -> None:
    place = accounts.create(tmp_path / "ledger.db", "flights")
    with_one = accounts.opened(place.path)
    with_one.charge(charge(1))
    head = with_one.head()
    with_one.close()
    read_history(place, head)
    for seen in (Head(head.id, 3, head.digest), Head(head.id, 1, head.digest)):
        refused(read_history, place, seen)


def test_files_and_urls(tmp_path: Path, refused: Refused) -> None:
    assert file_of("ledger.db") == Path("ledger.db") and file_of(tmp_path) == tmp_path
    assert place_below(tmp_path, "data/l.db") == str(tmp_path / "data" / "l.db")
    for url in ("spanner://p/i/d", "spanner:p", "mysql://h/d"):
        assert file_of(url) is None
    assert place_below(tmp_path, "spanner://p/i/d") == "spanner://p/i/d"
    for url in ("spanner:p", "mysql://h/d"):
        caught = refused(place_below, tmp_path, url)
        assert caught.field == "account.path" and url not in str(caught)


def test_names_and_limits(refused: Refused) -> None:
    check_names("flights", None)
    for data_set, id_ in (("", None), ("a\nb", None), ("x" * 1001, None), ("flights", "7")):
        refused(check_names, data_set, id_)
    assert limit_of(1, 1e-6) == (1.0, 1e-6)
    for pair in ((0, 1e-6), (-1, 1e-6), (1, 0), (1, 1), (float("inf"), 0.1), (float("nan"), 0.1)):
        caught = refused(limit_of, *pair)
        assert caught.field == ("--delta" if pair[0] == 1 else "--epsilon")


#: No crash, or one of the first starter at each of its gates.
DEATHS = (None, *range(len(GATES)))


@pytest.fixture
def folders(tmp_path: Path) -> Iterator[Path]:
    """Names of folders that do not exist yet."""
    return (tmp_path / str(n) for n in itertools.count())


def begun(folders: Iterator[Path]) -> World:
    """A run that has begun once."""
    world = new_world(next(folders))
    assert enter(world.ledger, world.stores[0]) == "settled"
    return world


def shared_store(folders: Iterator[Path], first: World, death: int | None) -> int:
    """Two starters of one store: it is accepted afterwards, and a copy from before is not."""
    worlds: list[World] = []

    def make() -> list[Starter]:
        worlds.append(copied(first, next(folders), 2))
        world = worlds[-1]
        return [Starter(world.ledger, world.stores[0], d) for d in (death, None)]

    for starters in every_order(make):
        world = worlds[-1]
        ends = [s.end for s in starters]
        assert ends == ["died" if death is not None else "settled", "settled"]
        assert enter(world.ledger, world.stores[1]) == "refused", "a copy from before"
        assert enter(world.ledger, world.stores[0]) == "settled"
        assert world.entries() == 1
        shutil.rmtree(world.ledger.parent)
    return len(worlds)


def two_copies(folders: Iterator[Path], first: World, death: int | None) -> int:
    """A store and its copy begin at once: at most one settles, and one of them goes on."""
    worlds: list[World] = []

    def make() -> list[Starter]:
        worlds.append(copied(first, next(folders), 2))
        world = worlds[-1]
        return [
            Starter(world.ledger, store, d)
            for store, d in zip(world.stores, (death, None), strict=True)
        ]

    for starters in every_order(make):
        world = worlds[-1]
        ends = [s.end for s in starters]
        assert ends.count("settled") <= 1, "both copies draw"
        order = sorted((0, 1), key=lambda n: ends[n] != "settled")
        # Whoever settled goes on; if none did, at least one of them can.
        again = [enter(world.ledger, world.stores[n]) for n in order]
        if "settled" in ends:
            assert again == ["settled", "refused"]
        else:
            assert again.count("settled") == 1
        assert world.entries() == 1
        shutil.rmtree(world.ledger.parent)
    return len(worlds)


SCENARIOS: tuple[Callable[[Iterator[Path], World, int | None], int], ...] = (
    shared_store,
    two_copies,
)


@pytest.mark.parametrize("scenario", SCENARIOS)
@pytest.mark.parametrize("death", DEATHS)
def test_every_order_of_two_starters(
    folders: Iterator[Path], scenario: Callable[..., int], death: int | None
) -> None:
    assert scenario(folders, begun(folders), death) >= (2 if death == 0 else 6)


def test_the_first_begin_of_two_copies(folders: Iterator[Path]) -> None:
    """Nothing is known of the run yet: the same holds, and it is charged once."""
    assert two_copies(folders, new_world(next(folders)), None) > 20


def test_a_lone_starter_that_dies_anywhere(folders: Iterator[Path]) -> None:
    """Again and again, at each gate in turn: the store is accepted and charged once."""
    world = copied(new_world(next(folders)), next(folders), 2)
    for death in DEATHS[1:]:
        starter = Starter(world.ledger, world.stores[0], death)
        assert len(list(every_order(lambda one=starter: [one]))) == 1  # type: ignore[misc]
        assert starter.end == "died"
        assert world.entries() <= 1
    assert enter(world.ledger, world.stores[0]) == "settled"
    assert enter(world.ledger, world.stores[1]) == "refused"
    assert world.entries() == 1


_accept, _renew_token = tokens._accept, SqliteStore.renew_token


def anyone(ledger: Ledger, run_id: str, token: str, restored: bool) -> None:
    _accept(ledger, run_id, token, True)


def forgetful(ledger: Ledger, run_id: str, token: str, restored: bool) -> None:
    """Keeps only the token it reads, not those that are to replace it."""
    _accept(ledger, run_id, token, restored)
    for other in ledger.tokens(run_id).keys() - {token}:
        ledger.drop_token(run_id, other)


def hoarding(ledger: Ledger, run_id: str, token: str, restored: bool) -> None:
    """Checks, and drops nothing."""
    run_tokens = ledger.tokens(run_id)
    if token not in run_tokens:
        _accept(ledger, run_id, token, restored)


def adding(ledger: Ledger, run_id: str, token: str, restored: bool) -> None:
    """Settles without a check: what the store holds becomes the accepted one."""
    for other in ledger.tokens(run_id):
        ledger.drop_token(run_id, other)
    ledger.add_token(run_id, token, None)


def overwriting(store: SqliteStore, old: str, new: str) -> bool:
    return _renew_token(store, store.metadata("token") or "", new)


SABOTAGE: dict[str, Callable[[], Any]] = {
    "accepts anyone": lambda: mock.patch.object(tokens, "_accept", anyone),
    "forgets announced tokens": lambda: mock.patch.object(tokens, "_accept", forgetful),
    "keeps replaced tokens": lambda: mock.patch.object(tokens, "_accept", hoarding),
    "settles unchecked": lambda: mock.patch.object(tokens, "_accept", adding),
    "announces nothing": lambda: mock.patch.object(tokens, "_announce", lambda *_: None),
    "swaps without comparing": lambda: mock.patch.object(SqliteStore, "renew_token", overwriting),
}


@pytest.mark.parametrize("name", SABOTAGE)
def test_a_sabotaged_protocol_is_caught(folders: Iterator[Path], name: str) -> None:
    first = begun(folders)
    with pytest.raises(AssertionError), SABOTAGE[name]():
        for scenario, death in itertools.product(SCENARIOS, (None, 3)):
            scenario(folders, first, death)


def opened(path: Path) -> Store:
    return SqliteStore(path, KEY_SCHEMA, STREAMS)


def test_a_copy_of_a_run_that_has_ended_is_refused(
    folders: Iterator[Path], refused: Refused
) -> None:
    world = copied(begun(folders), next(folders), 2)  # a copy while it runs
    ledger, store = open_path(world.ledger), opened(world.stores[0])
    tokens.leave(ledger, store)
    store.close()
    assert enter(world.ledger, world.stores[1]) == "refused"
    assert enter(world.ledger, world.stores[0]) == "settled"
    copy = opened(world.stores[1])
    refused(lambda: tokens.leave(ledger, copy))
    copy.close()
    ledger.close()


def test_a_restored_store_takes_over(folders: Iterator[Path]) -> None:
    """Only when it was restored on purpose; the store that it replaces is refused from then on."""
    world = copied(begun(folders), next(folders), 3)
    assert enter(world.ledger, world.stores[0]) == "settled"
    assert enter(world.ledger, world.stores[1]) == "refused"
    store = opened(world.stores[1])
    store.begin_restoring()
    store.close()
    # It may die at any gate and go on.
    for death in DEATHS[1:]:
        starter = Starter(world.ledger, world.stores[1], death)
        list(every_order(lambda one=starter: [one]))  # type: ignore[misc]
        assert starter.end == "died"
    assert enter(world.ledger, world.stores[1]) == "settled"
    assert enter(world.ledger, world.stores[0]) == "refused"
    assert enter(world.ledger, world.stores[2]) == "refused"
    store = opened(world.stores[1])
    tokens.restored(store, caught_up=False)
    assert store.metadata(RESTORE) == REPLAY
    tokens.restored(store, caught_up=True)
    assert store.metadata(RESTORE) is None
    store.close()
    assert world.entries() == 1


def test_a_refused_charge_changes_no_token(folders: Iterator[Path], refused: Refused) -> None:
    world = new_world(next(folders))
    ledger, store = open_path(world.ledger), opened(world.stores[0])
    ledger.set_limit((0.5, 1e-9))
    refused(lambda: tokens.enter(ledger, store, CHARGE))
    ledger.set_limit(LIMIT)
    assert store.token() == "" and tokens.remembered(store) is None
    assert tokens.enter(ledger, store, CHARGE) is True
    ledger.set_limit((0.5, 1e-9))
    assert tokens.enter(ledger, store, CHARGE) is False  # charged before
    seen = tokens.remembered(store)
    assert seen is not None and (seen.seq, seen.id) == (5, accounts.ID)
    store.close()
    ledger.close()


def test_a_swap_whose_answer_is_lost(folders: Iterator[Path]) -> None:
    """A database may have replaced the token and not say so: read again, replaced again."""
    world = copied(begun(folders), next(folders), 2)
    real, lost = SqliteStore.renew_token, [True]

    def renew(store: SqliteStore, old: str, new: str) -> bool:
        done = real(store, old, new)
        return done and not lost.pop() if lost else done

    with mock.patch.object(SqliteStore, "renew_token", renew):
        assert enter(world.ledger, world.stores[0]) == "settled"
    assert not lost
    assert enter(world.ledger, world.stores[1]) == "refused"
    assert enter(world.ledger, world.stores[0]) == "settled"
    assert world.entries() == 1


def test_starters_that_never_end_give_up(folders: Iterator[Path], refused: Refused) -> None:
    world = new_world(next(folders))
    ledger, store = open_path(world.ledger), opened(world.stores[0])
    with mock.patch.object(SqliteStore, "renew_token", lambda *_: False):
        refused(tokens.enter, ledger, store, CHARGE)
    assert tokens.enter(ledger, store, CHARGE) is False
    store.close()
    ledger.close()

"""Stores by URL: one object for each, and refusals of what belongs to another run."""

from pathlib import Path

import msgspec
import pytest

from dpstream.accounting.errors import PolicyError, UsageError
from dpstream.dp_transforms.noise.secret_source import SecretSource
from dpstream.dp_transforms.run import begin_run
from dpstream.state import open as stores
from dpstream.state.open import backend, key_schema
from dpstream.state.store import RunIdentity
from tests.streams import KEYS, RUN_ID, make_plan


def test_a_run_is_resumed_and_nothing_else(tmp_path: Path) -> None:
    plan, url = make_plan(), f"sqlite:{tmp_path / 'store.db'}"
    source = (b"file", b"digest")
    assert begin_run(plan, KEYS, url, 3, source=source, run_id=RUN_ID)[1] is False
    run, resumed = begin_run(plan, KEYS, url, 3, source=source)
    assert resumed and run.open().identity.run_id == RUN_ID
    refused = [
        ("store", lambda: begin_run(make_plan(triggers=6), KEYS, url, 3, source=source)),
        (
            "secret",
            lambda: begin_run(plan, SecretSource(None, "12" * 32), url, 3, source=source),
        ),
        ("source", lambda: begin_run(plan, KEYS, url, 3, source=(b"file", b"other"))),
        ("source", lambda: begin_run(plan, KEYS, url, 3, source=(b"filedigest",))),
        ("shards", lambda: begin_run(plan, KEYS, url, 4, source=source)),
    ]
    for field, attempted in refused:
        with pytest.raises(PolicyError) as caught:
            attempted()
        assert caught.value.field == field
    stores.close_all()
    with pytest.raises(PolicyError, match="another plan"):
        stores.open_store(url, make_plan(triggers=6), "22" * 16)
    assert begin_run(plan, KEYS, url, 3, source=source)[1] is True


def test_fingerprints_are_keyed(tmp_path: Path) -> None:
    plan = make_plan()
    identities: list[RunIdentity] = []
    for number, keys in enumerate((KEYS, SecretSource(None, "12" * 32))):
        url = f"sqlite:{tmp_path / f'{number}.db'}"
        identities.append(begin_run(plan, keys, url, source=(b"digest",))[0].open().identity)
    assert identities[0].secret_fingerprint != identities[1].secret_fingerprint
    assert identities[0].source_fingerprint != identities[1].source_fingerprint
    assert identities[0].run_id != identities[1].run_id and len(identities[0].run_id) == 32
    assert "11" * 32 not in msgspec.json.encode(identities[0]).decode()


@pytest.mark.parametrize("url", ["", "store.db", "postgres:x", "sqlite:"])
def test_unknown_urls_are_refused(url: str) -> None:
    with pytest.raises(UsageError) as caught:
        stores.exists(url)
    assert caught.value.field == "store"


def test_a_path_below_a_folder(tmp_path: Path) -> None:
    assert backend("sqlite:s.db").below(tmp_path).url == f"sqlite:{tmp_path / 's.db'}"
    assert backend("sqlite:/a/s.db").below(tmp_path).url == "sqlite:/a/s.db"
    there = backend("spanner://project/instance/database")
    assert there.below(tmp_path) is there


def test_key_columns_have_the_types_of_the_plan() -> None:
    schema = key_schema(make_plan(key=("string", "int", "bool", "bytes")))
    assert [str(field.type) for field in schema] == ["string", "int64", "bool", "binary"]
    assert not any(field.nullable for field in schema)


def test_a_store_is_one_object_of_its_process(tmp_path: Path) -> None:
    plan, url = make_plan(), f"sqlite:{tmp_path / 's.db'}"
    run, _ = begin_run(plan, KEYS, url, 2)
    first = stores.open_store(url, plan, run.run_id)
    assert stores.open_store(url, plan, run.run_id) is first is run.open()
    with pytest.raises(PolicyError, match="another plan or run"):
        stores.open_store(url, plan, "00" * 16)
    assert stores.open_store(url, plan, run.run_id) is not first, "the other one was closed"
    stores.close_all()
    assert stores.identity_of(url, plan).run_id == run.run_id and stores._OPEN == {}
    with pytest.raises(PolicyError, match="another plan"):
        stores.identity_of(url, make_plan(triggers=6))

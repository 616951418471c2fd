"""A folder as a store: one spelling of its URL, names below it, positions by name alone."""

import errno
import os
import pickle
from pathlib import Path

import pytest

from dpstream.accounting.errors import RunError, UsageError
from dpstream.pipelines.connectors.folder import store
from dpstream.pipelines.connectors.folder.store import (
    MAX_NAME_BYTES,
    Folder,
    find,
    is_hidden,
    is_name,
    normal_url,
    of_the_name,
    patiently,
    place,
)


def test_one_spelling_of_an_url(tmp_path: Path) -> None:
    assert normal_url(f"{tmp_path}/a/../b/") == normal_url(f"FILE://{tmp_path}/b")
    assert normal_url("GS://bucket//x/") == "gs://bucket/x"
    assert normal_url("s3://b/x/?region=r") == "s3://b/x?region=r"


@pytest.mark.parametrize(
    "name",
    [
        "",
        "/a",
        "a/",
        "a//b",
        "../a",
        "a/./b",
        "_closed/x",
        "a\\b",
        "a\nb",
        "x" * (MAX_NAME_BYTES + 1),
    ],
)
def test_what_is_no_name(name: str) -> None:
    assert not is_name(name) and is_name("a/b.csv") and is_name("x" * MAX_NAME_BYTES)


def test_hidden_names() -> None:
    assert is_hidden("a/_b/c") and is_hidden(".a") and not is_hidden("a_b/c.d")


def test_a_position_finds_its_file_and_row() -> None:
    names = [f"f{n}" for n in range(100)]
    at = place("f7")
    assert 0 <= at.partition < 2**31 and 0 <= at.base < 2**62
    assert find(names, at.partition, at.base + 3) == [("f7", 3)]
    assert find(names, at.partition, at.base - 1) == []
    assert len({place(name) for name in names}) == 100


def test_listings_of_a_folder(tmp_path: Path) -> None:
    (tmp_path / "day").mkdir()
    (tmp_path / "day" / "a.csv").write_text("abc")
    folder = pickle.loads(pickle.dumps(Folder(str(tmp_path))))  # noqa: S301
    assert folder.local and folder.is_there()
    [entry] = folder.list()
    assert (entry.name, entry.size) == ("day/a.csv", 3) and folder.info("day/a.csv") == entry
    assert list(folder.folders("")) == ["day"] and list(folder.list("none")) == []
    assert folder.info("none") is None
    with folder.stream("day/a.csv") as stream:
        assert stream.read() == b"abc"
    with pytest.raises(UsageError) as error:
        Folder("ftp://host/x")
    assert error.value.field == "table.path"


def test_a_store_that_is_away_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "FIRST_PAUSE_SECONDS", 0.001)
    left = [OSError(errno.EIO, "SECRET"), OSError(errno.EIO, "SECRET")]

    def call() -> str:
        if left:
            raise left.pop()
        return "there"

    assert patiently(call) == "there"
    monkeypatch.setattr(store, "PATIENCE_SECONDS", 0.01)
    left = [OSError(errno.EIO, "SECRET")] * 1000
    with pytest.raises(RunError) as error:
        patiently(call)
    assert error.value.field == "table.path" and "SECRET" not in str(error.value)


def test_a_fault_of_the_name_is_not_waited_for() -> None:
    with pytest.raises(FileNotFoundError):
        patiently(lambda: os.stat("/none/at/all"))
    assert of_the_name(OSError(errno.ENAMETOOLONG, "")) and not of_the_name(OSError(errno.EIO, ""))

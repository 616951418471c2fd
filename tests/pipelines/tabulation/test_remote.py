"""Files in a store are fetched and put, by the same bytes as on a disk."""

import shutil
from pathlib import Path

import pytest

from dpstream.accounting.errors import RunError, UsageError
from dpstream.pipelines.ask.draft import File
from dpstream.pipelines.tabulation.config import Choice
from dpstream.pipelines.tabulation.inputs import digest_of, inputs_of, load
from dpstream.pipelines.tabulation.private import lines_of, pieces
from dpstream.pipelines.tabulation.remote import fetched, get, is_remote, put, stamp_of
from tests.pipelines.tabulation.executing import executed
from tests.pipelines.tabulation.office import Office


def test_public_files_are_fetched_and_records_are_not(made: Office) -> None:
    wanted = inputs_of(made.parameters, made.data, Choice("p"))
    folders = made.parameters.as_uri(), made.data.as_uri()
    with fetched(*folders, "p", records=True) as (parameters, data):
        there = inputs_of(parameters, data, Choice("p"))
        assert there.digest == wanted.digest and there.parameters != wanted.parameters
        head = (data / "person-records.txt").read_bytes()
        assert head.count(b"\n") == 1
        assert made.path("person-records.txt").read_bytes().startswith(head)
        load(parameters, data, Choice("p"))
    assert not parameters.exists() and is_remote(made.data.as_uri())
    with fetched(*folders, "p") as (_, data):
        assert not (data / "person-records.txt").exists()
    with fetched(str(made.parameters), str(made.data), "p") as (parameters, data):
        assert parameters == made.parameters and data == made.data


@pytest.mark.parametrize("folder", [True, False])
def test_published_totals_are_fetched_too(folder: bool, made: Office, tmp_path: Path) -> None:
    own = Office(made.parameters, tmp_path / "data")
    shutil.copytree(made.data, own.data)
    executed(made, tmp_path / "persons")
    t1 = tmp_path / "persons" / "t1"
    place = own.data / "pop-group-totals.txt"
    if folder:
        shutil.copytree(t1, place)
    else:
        shutil.copy(t1 / "tract-2-000.csv", place)
    with fetched(own.parameters.as_uri(), own.data.as_uri(), "h") as (_, data):
        inside = data / "pop-group-totals.txt"
        assert inside.is_dir() == folder
        if folder:
            assert digest_of(sorted(inside.iterdir())) == digest_of(sorted(t1.iterdir()))
        else:
            assert inside.read_bytes() == place.read_bytes()


def test_what_is_missing_is_named(spoilt: Office, tmp_path: Path) -> None:
    spoilt.path("GRF-C.txt").unlink()
    with (
        pytest.raises(UsageError, match=r"GRF-C\.txt: is missing"),
        fetched(spoilt.parameters.as_uri(), spoilt.data.as_uri(), "p"),
    ):
        pass
    with pytest.raises(UsageError, match=r"person-records\.txt: is missing"):
        stamp_of(tmp_path.as_uri(), "p")


def test_pieces_of_an_object_are_those_of_the_file(made: Office) -> None:
    for piece in pieces(made.path("person-records.txt"), 5_000):
        there = piece._replace(path=Path(piece.path).as_uri())
        for a, b in zip(lines_of(piece), lines_of(there), strict=True):
            assert a.lines == b.lines and (a.positions == b.positions).all()


def test_objects_are_put_and_got(tmp_path: Path) -> None:
    file = File("t3/T03001/a.csv", b"one\n")
    here, there = put(str(tmp_path / "a"), file), put((tmp_path / "b").as_uri(), file)
    assert here == there and here.bytes == 4
    for folder in ("a", "b"):
        assert (tmp_path / folder / file.name).read_bytes() == b"one\n"
    assert get((tmp_path / "b").as_uri(), file.name) == b"one\n"
    assert get((tmp_path / "b").as_uri(), "t1/none.csv") is None
    (tmp_path / "c").write_text("no folder")
    with pytest.raises(RunError, match="out_folder"):
        put((tmp_path / "c").as_uri(), file)

"""Notes of the Spanner store: changed by comparison, apart by generation."""

from dpstream.state.spanner.client import connect
from dpstream.state.spanner.metadata import named, read_metadata, swap_metadata
from tests.state.spanner.bench import SpannerBench


def test_each_generation_has_notes_of_its_own() -> None:
    assert named(0, "x") == "note.x" and named(3, "x") == "note.3.x"
    assert len({named(g, n) for g in range(12) for n in ("x", "token")}) == 24


def test_a_note_is_replaced_if_it_is_what_was_thought(bench: SpannerBench) -> None:
    database, name = connect(bench.url), named(0, "x")
    assert read_metadata(database, name) is None
    assert not swap_metadata(database, name, "a", "b") and read_metadata(database, name) is None
    assert swap_metadata(database, name, None, "a")
    assert not swap_metadata(database, name, None, "b")
    assert swap_metadata(database, name, "a", "b") and read_metadata(database, name) == "b"
    assert bench.open().metadata("x") == "b" and read_metadata(database, named(1, "x")) is None
    assert swap_metadata(database, name, "b", None) and read_metadata(database, name) is None

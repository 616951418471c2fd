"""Which files are new, and the partitions that they get; once given they stay."""

import hashlib
from collections.abc import Sequence
from pathlib import Path

import pytest

from dpstream.accounting.errors import PolicyError
from dpstream.pipelines.connectors.files.input_manifest import SourceFile
from dpstream.pipelines.connectors.files.joining import Pass, Passes, arrange


def digest(part: bytes) -> str:
    return hashlib.blake2b(part, key=b"secret", digest_size=16).hexdigest()


def listed(folder: Path, names: Sequence[str]) -> list[SourceFile]:
    """These files as a manifest lists them."""
    for name in names:
        if not (folder / name).exists():
            (folder / name).write_text(f"content of {name}")
    return [
        SourceFile(at, name, str(folder / name), (folder / name).stat().st_size, (0, 0))
        for at, name in enumerate(sorted(names))
    ]


def test_partitions_stay(tmp_path: Path) -> None:
    first = arrange(listed(tmp_path, ["b", "d"]), None, digest)
    assert [file.name for file in first.new] == ["b", "d"] and first.earlier == ()
    noted = Passes((Pass(first.digests, 4),), 4, ())
    # New names stand before and between the old ones.
    then = arrange(listed(tmp_path, ["c", "a", "b", "d"]), noted, digest)
    assert [(f.name, f.partition) for f in then.earlier] == [("b", 0), ("d", 1)]
    assert [(f.name, f.partition) for f in then.new] == [("a", 2), ("c", 3)]
    assert then.first == first.first, "the run's identity stays"
    noted = noted.next(then.digests, 6)
    assert noted.files == (*first.digests, *then.digests) and noted.left == (2, 3)
    last = arrange(listed(tmp_path, ["a", "b", "c", "d", "0"]), noted, digest)
    assert [file.partition for file in (*last.earlier, *last.new)] == list(range(5))
    assert last.first == first.first


def test_what_is_gone_or_changed_is_refused(tmp_path: Path) -> None:
    files = listed(tmp_path, ["a", "b"])
    noted = Passes((Pass(arrange(files, None, digest).digests, 4),))
    (tmp_path / "b").write_text("other")
    with pytest.raises(PolicyError, match=r"1 of the 2 files.*file 1 in the order"):
        arrange(files, noted, digest)
    with pytest.raises(PolicyError, match="2 of the 2 files"):
        arrange([], noted, digest)


def test_passes() -> None:
    begun = Passes((Pass(("x", "y"), 4),), 0, (0, 1))
    assert begun.pending and begun.joined == ()
    ended = begun.ended([1])
    assert not ended.pending and (ended.done, ended.left) == (4, (1,))
    third = ended.next(["z"], 6).ended([]).next(["v", "w"], 7)
    assert third.joined == ((2, 4), (3, 6)) and third.left == (3, 4) and third.pending

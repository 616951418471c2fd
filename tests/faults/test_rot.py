"""One flipped bit, or one sector of zeros, in every redundant format, and then every command.

``pytest -m slow tests/faults/test_rot.py`` rots every file of every image.
"""

import itertools
from pathlib import Path

import pytest

from tests.faults.filecalls.server import Server
from tests.faults.rot import IMAGES, Rot, expected, rots, wrong

#: Rots of the fast lane by image.
FAST = {"session": 3}
MANY = 200


def of_image(server: Server, name: str, number: int, folder: Path) -> list[str]:
    """What is wrong after some rots of an image."""
    image, case, before = IMAGES[name], folder / "case", folder / "before"
    image.make(server, case)  # a question is known by where its files lie
    case.rename(before)
    right = expected(server, image, before, case)
    drawn = itertools.islice(rots(image, before, seed=1), number)
    return [text for rot in drawn for text in wrong(server, image, before, case, right, rot)]


@pytest.mark.parametrize("name", FAST)
def test_a_sample_of_rots(name: str, server: Server, tmp_path: Path) -> None:
    assert of_image(server, name, FAST[name], tmp_path) == []


@pytest.mark.slow
@pytest.mark.parametrize("name", IMAGES)
def test_every_file(name: str, server: Server, tmp_path: Path) -> None:
    assert of_image(server, name, MANY, tmp_path) == []


def test_a_rot_is_one_bit_or_one_sector(tmp_path: Path) -> None:
    content = bytes(range(1, 256)) * 8
    for rot, size in ((Rot("it", 700, 3), 1), (Rot("it", 700, None), 512)):
        (tmp_path / "it").write_bytes(content)
        assert rot.spoil(tmp_path)
        now = (tmp_path / "it").read_bytes()
        assert sum(a != b for a, b in zip(now, content, strict=True)) == size


def test_fewer_entries_are_seen(server: Server, tmp_path: Path) -> None:
    """The check fails where a command gives less than without rot."""
    image, case, before = IMAGES["session"], tmp_path / "case", tmp_path / "before"
    image.make(server, case)
    case.rename(before)
    right = expected(server, image, before, case)
    show = image.commands[0]
    (code, text, files), message = right.of[show]
    right.of[show] = (code, text.replace('"charges": 2', '"charges": 3'), files), message
    rot = Rot("small.csv", 0, 0)
    assert any("other results" in each for each in wrong(server, image, before, case, right, rot))

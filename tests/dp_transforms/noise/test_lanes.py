"""Lanes of shared blocks and blocks of a node's own: what is asked for, and what never meets."""

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from dpstream.dp_transforms.noise import lanes
from dpstream.dp_transforms.noise.continuous import ContinuousGaussian
from dpstream.dp_transforms.noise.prf import Prf
from tests.dp_transforms.noise.test_sampler import tweaks

KEY = b"\x07" * 32


def test_own_blocks_are_no_lanes_of_any_node(monkeypatch: pytest.MonkeyPatch) -> None:
    block_sets: list[set[tuple[int, int]]] = []

    class Recording(Prf):
        def blocks(self, blocks: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
            block_sets.append({(int(a), int(b)) for a, b in blocks})
            return super().blocks(blocks)

    of, name = ContinuousGaussian(1.0), tweaks(1, seed=1)[0]
    of.exact(Recording(KEY), name, 500)
    shared, own = block_sets
    assert len(shared) == 250 and len(own) == 500 and not shared & own
    block_sets.clear()
    monkeypatch.setattr(lanes, "_OWN_BLOCK", np.uint64(0))
    of.exact(Recording(KEY), name, 500)
    assert block_sets[0] & block_sets[1]  # what the tag is there for


@pytest.mark.parametrize("kind", [np.uint8, np.uint16, np.uint32, np.uint64])
def test_a_lane_is_a_part_of_the_block_of_its_number(kind: type[np.unsignedinteger[Any]]) -> None:
    """In rows that begin and end anywhere, empty ones among them."""
    prf, names = Prf(KEY), tweaks(4, seed=2)
    first, last = np.array([0, 5, 3, 17]), np.array([3, 5, 40, 18])
    shared = lanes.shared_lanes(prf, names, first, last, kind)
    assert shared.starts.tolist() == [0, 3, 3, 40] and shared.size == 41
    per_block = 16 // np.dtype(kind).itemsize
    for row in range(4):
        for node in range(first[row], last[row]):
            name = names[row : row + 1].copy()
            name[0, 0] ^= np.uint64(node // per_block)
            expected = prf.blocks(name).view(kind).reshape(-1)[node % per_block]
            assert shared.lanes[shared.shift[row] + node] == expected


def test_no_block_is_drawn_twice_in_a_row() -> None:
    drawn: list[int] = []

    class Counted(Prf):
        def blocks(self, blocks: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
            drawn.append(len(blocks))
            return super().blocks(blocks)

    ends = np.array([0, 7]), np.array([16, 9])
    lanes.shared_lanes(Counted(KEY), tweaks(2), *ends, np.uint16)
    assert drawn == [2 + 2]


def test_a_nodes_own_blocks_are_all_different() -> None:
    prf, names = Prf(KEY), np.repeat(tweaks(2, seed=3), 3, axis=0)
    nodes = np.array([0, 1, 7] * 2)
    blocks = [lanes.own_blocks(prf, names, nodes, further) for further in range(3)]
    assert len({tuple(block) for array in blocks for block in array.tolist()}) == 18
    assert np.array_equal(blocks[0], lanes.own_blocks(prf, names, nodes))
    name = names[2].copy()
    name ^= np.array([7, (1 << 63) + 2], np.uint64)
    assert blocks[2][2].tolist() == prf.blocks(name.reshape(1, 2))[0].tolist()

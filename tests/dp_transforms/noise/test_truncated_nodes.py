"""Truncated noise of nodes: its coin, its names, and the one node that a key has."""

import itertools

import numpy as np
import pytest

from dpstream.accounting.errors import InvariantError
from dpstream.dp_transforms.noise.prf import Prf
from dpstream.dp_transforms.noise.truncated import TruncatedNodes

PRF = Prf(b"\x05" * 32)
NAMES = np.random.default_rng(3).integers(0, 2**64, (20_000, 2), np.uint64)
ZEROS = np.zeros(len(NAMES), np.int64)


def test_a_test_reads_the_published_noise_and_its_coin() -> None:
    half = 1 << 31
    published, _ = TruncatedNodes(0.5, 2, half).draw(PRF, NAMES, ZEROS, ZEROS + 1)
    read, _ = TruncatedNodes(0.5, 2, half, tested=True).draw(PRF, NAMES, ZEROS, ZEROS + 1)
    coin = read - published
    assert set(coin.tolist()) == {0, 1} and abs(coin.mean() - 0.5) < 0.02
    assert np.abs(published[coin == 1]).max() == 1 and np.abs(published).max() == 2
    never = TruncatedNodes(0.5, 2, 0, tested=True).draw(PRF, NAMES, ZEROS, ZEROS + 1)[0]
    assert np.abs(never).max() == 2


def test_each_number_of_the_law_names_its_noise() -> None:
    laws = itertools.product((0.5, 0.75), (3, 4), (0, 7))
    assert len({TruncatedNodes(*law).digest for law in laws}) == 8


def test_a_key_has_one_node() -> None:
    zero, one = ZEROS[:1], ZEROS[:1] + 1
    for first, last in ((one, one + 1), (zero, one + 1), (one, one)):
        with pytest.raises(InvariantError):
            TruncatedNodes(0.5, 2, 0).draw(PRF, NAMES[:1], first, last)

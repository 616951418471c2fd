"""Draws of exact tables: reference decisions, open uniforms settled, shapes, and wrong scales."""

import functools
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import pytest
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

from dpstream.accounting.arrays import Ids
from dpstream.accounting.mechanisms.laws import Table, discrete_gaussian, discrete_laplace, settle
from dpstream.dp_transforms.noise.prf import Prf
from dpstream.dp_transforms.noise.sampler import TableSampler
from tests.dp_transforms.laws import LEAST_P, masses, shape_p

Make = Callable[[float], Table]
KEY = b"\x31" * 32
FULL = 1 << 128
MAKES: list[Make] = [discrete_laplace, discrete_gaussian]
SCALES = (0.3, 1.0, 3.7, 20.0)


@functools.lru_cache(maxsize=16)
def sampler(make: Make, scale: float) -> TableSampler:
    return TableSampler(make(scale))


@functools.lru_cache(maxsize=16)
def draws(make: Make, scale: float) -> npt.NDArray[np.int32]:
    rows, nodes = 2000, 250
    names = np.random.default_rng(0).integers(0, 2**64, (rows, 2), np.uint64)
    first = np.zeros(rows, np.int64)
    return sampler(make, scale).draw(Prf(KEY), names, first, first + nodes)[0]


@pytest.mark.parametrize("make", MAKES)
@pytest.mark.parametrize("scale", SCALES)
def test_shapes(make: Make, scale: float) -> None:
    noise = draws(make, scale)
    assert shape_p(noise, masses(make(1.0).law, scale)) > LEAST_P
    for wrong in (0.98, 1.02):
        if scale > 0.5:
            assert shape_p(noise, masses(make(1.0).law, scale * wrong)) < LEAST_P
    assert shape_p(np.abs(noise), masses(make(1.0).law, scale)) < LEAST_P


@pytest.mark.parametrize("make", MAKES)
@pytest.mark.parametrize("scale", SCALES)
def test_draws_equal_a_plain_reference(make: Make, scale: float) -> None:
    """The law's exact inverse at 32 bits of the lane and 96 of the node's own block."""
    names = np.random.default_rng(3).integers(0, 2**64, (3, 2), np.uint64)
    first = np.array([0, 7, 1000])
    noise, starts = sampler(make, scale).draw(Prf(KEY), names, first, first + 40)
    law = make(scale).law

    def aes(low: int, high: int) -> bytes:
        cipher = Cipher(algorithms.AES(KEY), modes.ECB()).encryptor()
        return cipher.update(low.to_bytes(8, "little") + high.to_bytes(8, "little"))

    for i, (low, high) in enumerate(names.tolist()):
        for node in range(int(first[i]), int(first[i]) + 40):
            lane = int.from_bytes(aes(low ^ (node // 4), high)[4 * (node % 4) :][:4], "little")
            own = int.from_bytes(aes(low ^ node, high ^ (1 << 63)), "little") >> 32
            expected = settle(law, lambda _, u=lane << 96 | own: (u, 128))  # type: ignore[misc]
            assert noise[starts[i] + node - first[i]] == expected


class Chosen:
    """A stand-in for the PRF: row i gets the uniform ``wanted[i]`` of 128 bits, then ``more``."""

    def __init__(self, wanted: list[int], more: int) -> None:
        self.wanted, self.more, self.further = wanted, more, 0

    def blocks(self, blocks: Ids) -> Ids:
        out = np.empty_like(blocks)
        for i, (word, own) in enumerate(blocks.tolist()):
            bits = self.wanted[word] >> 96
            if own:
                bits = (self.wanted[word] & ((1 << 96) - 1)) << 32 | 0xFFFFFFFF
            if own > 1 << 63:
                self.further += 1
                bits = self.more
            out[i] = bits & (2**64 - 1), bits >> 64
        return out


def decided(of: TableSampler, uniforms: list[int], more: int) -> tuple[list[int], int]:
    rows = np.arange(len(uniforms), dtype=np.uint64)
    prf = Chosen(uniforms, more)
    ones = np.ones(len(rows), np.int64)
    names = np.stack([rows, 0 * rows], axis=1)
    noise, _ = of.draw(prf, names, 0 * ones, ones)  # type: ignore[arg-type]
    values: list[int] = noise.tolist()
    return values, prf.further


@pytest.mark.parametrize("make", MAKES)
@pytest.mark.parametrize("scale", SCALES)
def test_open_uniforms_take_further_bits(make: Make, scale: float) -> None:
    table = make(scale)
    cuts = table.thresholds
    cuts = cuts if len(cuts) < 20 else cuts[:: len(cuts) // 20]
    open_ = [0, FULL - 1, *(t - 1 for t in cuts)]
    values = set()
    for more in (1 << 100, FULL - (1 << 100)):
        noise, further = decided(sampler(make, scale), open_, more)
        assert further >= len(open_)
        for u, value in zip(open_, noise, strict=True):
            exact = settle(table.law, lambda n, u=u, m=more: (u << 128 | m, 256) if n else (u, 128))  # type: ignore[misc]
            assert value == exact
        values.add(tuple(noise))
    assert len(values) == 2
    near = [u for t in cuts for u in (t, t + 1) if u < FULL - 1 and u + 1 not in table.thresholds]
    assert decided(sampler(make, scale), near, 0)[1] == 0


def test_another_law_or_scale_is_another_name() -> None:
    digests = {TableSampler(make(scale)).digest for make in MAKES for scale in (1.0, 1.0 + 2**-50)}
    assert len(digests) == 4

"""Even and odd blocks are the same matrix in another basis."""

import numpy as np
import pytest

from dpstream.accounting.arrays import kron
from dpstream.accounting.strategies.cells.folding import Folding, folding_of
from dpstream.accounting.workloads.workload import marginals, over
from tests.accounting.strategies.cells.shapes import attributes, small

SHAPES = [
    ((6,), (True,)),
    ((7,), (True,)),
    ((1,), (True,)),
    ((5,), (False,)),
    ((3, 4), (True, True)),
    ((3, 4, 5), (True, False, True)),
    ((2, 1, 3), (True,) * 3),
]


@pytest.mark.parametrize(("sizes", "folded"), SHAPES)
def test_blocks_are_the_matrix_in_another_basis(
    sizes: tuple[int, ...], folded: tuple[bool, ...]
) -> None:
    rng, folding = np.random.default_rng(0), Folding(sizes, folded)
    grams = []
    for n, fold in zip(sizes, folded, strict=True):
        root = rng.normal(size=(n, n))
        gram = root @ root.T
        grams.append(gram + gram[::-1, ::-1] if fold else gram)
    matrix = kron(grams)
    blocks = [
        kron([folding.part(gram, axis, parity[axis]) for axis, gram in enumerate(grams)])
        for parity in folding.parities
    ]
    assert sum(map(len, blocks)) == folding.cells
    values = np.concatenate([np.linalg.eigvalsh(block) for block in blocks])
    np.testing.assert_allclose(np.sort(values), np.linalg.eigvalsh(matrix), rtol=1e-9)
    np.testing.assert_allclose(folding.unfold(blocks), matrix, atol=1e-9)
    diagonal = sum(
        np.bincount(orbits, np.diag(block), len(folding.counts))
        for orbits, block in zip(folding.orbits, blocks, strict=True)
    )
    np.testing.assert_allclose(
        folding.spread(diagonal / folding.counts), np.diag(matrix), rtol=1e-12
    )


@pytest.mark.parametrize(("sizes", "folded"), SHAPES)
def test_orbits_gather_what_they_spread(sizes: tuple[int, ...], folded: tuple[bool, ...]) -> None:
    folding = Folding(sizes, folded)
    values = np.random.default_rng(1).random(len(folding.counts))
    assert folding.counts.sum() == folding.cells
    np.testing.assert_allclose(folding.gather(folding.spread(values)), values * folding.counts)


def test_an_axis_is_folded_only_if_all_queries_allow_it() -> None:
    assert folding_of(over([4, 4], ["range", "prefix"])).folded == (True, False)
    assert folding_of(marginals(attributes(3, 4), [1, 2], "range")).folded == (True, True)


@pytest.mark.parametrize("name", small())
def test_grams_of_workloads(name: str) -> None:
    workload = small()[name]
    folding = folding_of(workload)
    np.testing.assert_allclose(folding.unfold(folding.grams(workload)), workload.gram(), atol=1e-9)

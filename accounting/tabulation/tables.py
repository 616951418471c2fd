"""What each table measures in a population group, by how much detail.

A record falls into one *leaf* of a table, the finest cells there are.  A *detail* is a partition of
the leaves into measured cells, so that a record changes one measured cell of a group by one,
whatever detail the group has.  Published beside the measured cells are sums of them, which cost
nothing: ages of both sexes, the total, families of every kind.
"""

from typing import NamedTuple

#: Inner edges of the bins of age by how many bins there are; the first begins at 0.
AGE_BINS: dict[int, tuple[int, ...]] = {
    4: (18, 45, 65),
    9: (5, 18, 25, 35, 45, 55, 65, 75),
    23: (
        5,
        10,
        15,
        18,
        20,
        21,
        22,
        25,
        30,
        35,
        40,
        45,
        50,
        55,
        60,
        62,
        65,
        67,
        70,
        75,
        80,
        85,
    ),
}
#: Oldest age; the last bin ends with it.
OLDEST = 115


class Detail(NamedTuple):
    """A partition of a table's leaves.

    Attributes:
        cells: (leaves,) measured cell of each leaf, 0 .. size - 1.
    """

    cells: tuple[int, ...]

    @property
    def size(self) -> int:
        """How many cells are measured."""
        return max(self.cells) + 1


class Table(NamedTuple):
    """What is measured.

    Attributes:
        name: ``t1t2`` of persons, ``t3`` and ``t4`` of households.
        leaves: of ``t1t2`` 46, 23 ages of sex 1 and then of sex 2; of ``t3`` the 5 data cells 2, 4,
            5, 7, 8; of ``t4`` the 3 data cells 1, 2, 3.
        details: from the least detail, which is the total, to the most, which are the leaves.
        data_cells: leaves of each numbered data cell (``t3``, ``t4``); 0 is the total.
    """

    name: str
    leaves: int
    details: tuple[Detail, ...]
    data_cells: tuple[tuple[int, ...], ...] = ()

    def published(self, detail: int) -> tuple[tuple[int, tuple[int, ...]], ...]:
        """Numbered data cells that a detail yields, each with the measured cells it is the sum of.

        A data cell is there if it is a union of measured cells.
        """
        cells, out = self.details[detail].cells, []
        for number, leaves in enumerate(self.data_cells):
            measured = sorted({cells[leaf] for leaf in leaves})
            if sum(cell in measured for cell in cells) == len(leaves):
                out.append((number, tuple(measured)))
        return tuple(out)


def _sex_by_age(bins: int) -> Detail:
    """The partition of sex by 23 ages into sex by so many."""
    fine = (0, *AGE_BINS[23])
    of = [sum(edge <= start for edge in AGE_BINS[bins]) for start in fine]
    return Detail(tuple(sex * bins + bin_ for sex in (0, 1) for bin_ in of))


PERSONS = Table("t1t2", 46, (Detail((0,) * 46), *(_sex_by_age(bins) for bins in (4, 9, 23))))
T3 = Table(
    "t3",
    5,
    (
        Detail((0, 0, 0, 0, 0)),
        Detail((0, 0, 0, 1, 1)),
        Detail((0, 1, 1, 2, 3)),
        Detail((0, 1, 2, 3, 4)),
    ),
    ((0, 1, 2, 3, 4), (0, 1, 2), (0,), (1, 2), (1,), (2,), (3, 4), (3,), (4,)),
)
T4 = Table("t4", 3, (Detail((0, 0, 0)), Detail((0, 1, 2))), ((0, 1, 2), (0,), (1,), (2,)))
#: Tables of each program.
TABLES: dict[str, tuple[Table, ...]] = {"p": (PERSONS,), "h": (T3, T4)}

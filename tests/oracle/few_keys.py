"""A stream of few records a person and private keys, and what mechanisms are worth on it, exactly.

Records of 91 months on 36 keys of Zipf's law (exponent 1), 22,000 in all; 89% of the people have
one.  The others come again, each time with chance 1/2 once more, now and then in the month of their
record before.  A unit is a (person, month), keys are private, a month is published once, and of a
unit in a key one record counts.  Figures are expectations over the noise, computed from its law:
what is published with which chance, and |published - true| there.  The truth counts everybody, so
that the loss of bounding to C keys a month is in it.

All is written from the definitions of the mechanisms and shares nothing with the product:

* ``truncated``: Desfontaines, Voss, Gipson and Mandayam 2022, n + Z > k at (epsilon / C,
  delta / C), k - 1 in the place of k by a coin that takes the rest of delta;
* ``laplace``: the textbook's, n + Laplace(C / epsilon) >= 1 - (C / epsilon) ln(2 p),
  p = 1 - (1 - delta)^(1 / C);
* ``geometric``: the same with two-sided geometric noise and the least whole threshold that holds.
"""

import math
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
MONTHS, KEYS, RECORDS = 91, 36, 22_000
ONCE, AGAIN, SAME_MONTH = 0.89, 1 / 2, 1 / 20
EPSILON, DELTA = 2.0, 1e-7
#: People of a cell that is large enough to be looked at.
LARGE = 18


class Records(NamedTuple):
    """(records,) person, month (0 ..), second of the month, key (0 ..); sorted by time."""

    person: Ints
    month: Ints
    second: Ints
    key: Ints


def records(seed: int = 36) -> Records:
    """The stream of a seed."""
    draw = np.random.default_rng(seed)
    person, month = list[int](), list[int]()
    number = 0
    while len(person) < RECORDS:
        at = int(draw.integers(MONTHS))
        person.append(number)
        month.append(at)
        more = draw.random() >= ONCE
        while more:
            at = at if draw.random() < SAME_MONTH else int(draw.integers(MONTHS))
            person.append(number)
            month.append(at)
            more = draw.random() < AGAIN
        number += 1
    weight = 1 / np.arange(1, KEYS + 1)
    key = draw.choice(KEYS, RECORDS, p=weight / weight.sum())
    second = draw.integers(0, 28 * 86_400, RECORDS)
    order = np.lexsort((second, np.array(month[:RECORDS])))
    columns = np.array(person[:RECORDS]), np.array(month[:RECORDS]), second, key
    return Records(*(np.asarray(column, np.int64)[order] for column in columns))


def cells(stream: Records, contributions: int | None = None) -> Ints:
    """(months, keys) people of each cell; of each unit only the first C keys in time count."""
    unit = stream.person * MONTHS + stream.month
    out, keys_of = np.zeros((MONTHS, KEYS), np.int64), dict[int, set[int]]()
    for u, m, k in zip(unit.tolist(), stream.month.tolist(), stream.key.tolist(), strict=True):
        mine = keys_of.setdefault(u, set())
        if k not in mine and (contributions is None or len(mine) < contributions):
            mine.add(k)
            out[m, k] += 1
    return out


class Law(NamedTuple):
    """What is published of a cell of n people: n + noise, if that is ``least`` or more.

    Attributes:
        value, chance: of the noise, on a grid; least: of each value of the noise, or of all.
    """

    value: Floats
    chance: Floats
    least: Floats | float

    def published(self, counts: Ints) -> Floats:
        """Chance of each cell; 0 without people."""
        mask = counts[..., None] + self.value >= self.least
        return np.asarray(np.where(counts > 0, (mask * self.chance).sum(axis=-1), 0.0))

    def error(self, counts: Ints, true: Ints) -> Floats:
        """Mean |published - true| of each cell times the chance that it is published."""
        noisy = counts[..., None] + self.value
        size = np.abs(noisy - true[..., None]) * (noisy >= self.least) * self.chance
        return np.asarray(np.where(counts > 0, size.sum(axis=-1), 0.0))


def truncated(epsilon: float, delta: float, contributions: int) -> Law:
    """Truncated geometric noise; k by trying, and the coin."""
    b, d = epsilon / contributions, delta / contributions
    k = 1
    while _truncated(b, k)[1][-1] > d:
        k += 1
    (less, of_less), (value, of_all) = _truncated(b, k - 1), _truncated(b, k)
    coin = (d - of_all[-1]) / (of_less[-1] - of_all[-1]) if k > 1 else 0.0
    least = np.repeat([k, k + 1.0], [len(less), len(value)])
    chance = np.concatenate([coin * of_less, (1 - coin) * of_all])
    return Law(np.concatenate([less, value]), chance, least)


def _truncated(b: float, most: int) -> tuple[Floats, Floats]:
    value = np.arange(-most, most + 1).astype(np.float64)
    weight = np.exp(-b * np.abs(value))
    return value, weight / weight.sum()


def geometric(epsilon: float, delta: float, contributions: int) -> Law:
    """Two-sided geometric noise, not truncated."""
    b = epsilon / contributions
    p = -math.expm1(math.log1p(-delta) / contributions)
    value = np.arange(-math.ceil(60 / b), math.ceil(60 / b) + 1).astype(np.float64)
    weight = np.exp(-b * np.abs(value))
    chance = weight / weight.sum()
    least = next(
        t for t in range(2, len(value)) if math.exp(-b * (t - 1)) / (1 + math.exp(-b)) <= p
    )
    return Law(value, chance, least)


def laplace(epsilon: float, delta: float, contributions: int) -> Law:
    """Laplace noise, on a grid of a hundredth of its scale."""
    scale = contributions / epsilon
    p = -math.expm1(math.log1p(-delta) / contributions)
    edge = np.arange(-4000, 4001) / 100
    below = np.where(edge < 0, np.exp(edge) / 2, 1 - np.exp(-edge) / 2)
    return Law(scale * (edge[1:] + edge[:-1]) / 2, np.diff(below), 1 - scale * math.log(2 * p))


LAWS = {"truncated": truncated, "laplace": laplace, "geometric": geometric}


class Figures(NamedTuple):
    """Of one mechanism at one C on all cells.

    Attributes:
        keys: expected published (month, key) cells.
        error: mean |published - true| over what is published of cells of LARGE people or more.
        all_error: mean of |published - true| over all cells with people, the truth where nothing
            is published.
        on_others: mean error over what the Laplace textbook publishes, weighted by its chances.
    """

    mechanism: str
    contributions: int
    keys: float
    error: float
    all_error: float
    on_others: float


def figures(stream: Records) -> Iterator[Figures]:
    """Of every law at C = 1 and 2."""
    true = cells(stream)
    large, present = true >= LARGE, true > 0
    for contributions in (1, 2):
        counts = cells(stream, contributions)
        textbook = laplace(EPSILON, DELTA, contributions).published(counts)
        for name, make in LAWS.items():
            law = make(EPSILON, DELTA, contributions)
            chance, error = law.published(counts), law.error(counts, true)
            missed = (1 - chance) * true
            conditional = np.divide(error, chance, out=np.zeros_like(error), where=chance > 1e-12)
            yield Figures(
                name,
                contributions,
                float(chance.sum()),
                float(error[large].sum() / chance[large].sum()),
                float((error + missed)[present].mean()),
                float((conditional * textbook).sum() / textbook.sum()),
            )

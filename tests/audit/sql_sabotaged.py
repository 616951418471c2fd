"""Sabotaged variants of SQL questions: plausible mistakes, each with a trial that shows it."""

import contextlib
import re
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple
from unittest import mock

import numpy as np

from dpstream.dp_transforms.one_shot import answers, bounding, estimates, partials
from dpstream.pipelines.sql import query_plan, stage, work
from tests.audit.sabotage import Patch
from tests.audit.sql_trials import Trial

PER_GROUP = "contribution_bounds_per_group => "
HUNDRED = "contribution_bounds_per_row => (0, 100)"
TWO_ROWS = "epsilon = 12, delta = 1e-6, max_rows_contributed = 2"
#: A larger delta makes thresholds low: a few other units are enough.
FEW = "epsilon = 12, delta = 1e-3"


class Broken(NamedTuple):
    """A sabotage, and the trial that refutes it."""

    patch: Patch
    trial: Trial


def wrapped(owner: Any, name: str, make: Callable[[Any], Any]) -> Patch:
    """One function replaced by ``make(function)``."""
    return lambda: mock.patch.object(owner, name, make(getattr(owner, name)))


def _together(*patches: Patch) -> Patch:
    @contextlib.contextmanager
    def patch() -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for one in patches:
                stack.enter_context(one())
            yield

    return patch


class _WithoutClip:
    """numpy whose clip lets everything through."""

    def __getattr__(self, name: str) -> Any:
        return (lambda values, *_: values) if name == "clip" else getattr(np, name)


#: Partials are clamped twice, by DuckDB and by stage 2: both are left out.
_NO_CLIP = wrapped(partials, "np", lambda real: _WithoutClip())
_WIDE = wrapped(work, "grids_of", lambda real: lambda plan: {
    c.name: (c.grid, -(1 << 40), 1 << 40) for c in plan.columns if c.kind != "units"})  # fmt: skip
_NO_CENTRE = _together(
    _NO_CLIP,
    wrapped(query_plan.Grid, "middle", lambda real: 0),
    wrapped(estimates, "middle_of", lambda real: lambda column: 0),
)


def _smaller_noise(what: str, factor: float) -> Patch:
    """Noise of one part of one column."""

    def make(real: Any) -> Any:
        def part(self: Any, noise: Any, items: Any, scale: float | None = None) -> Any:
            used = noise.scale if scale is None else scale
            return real(self, noise, items, used / factor if noise.part.what == what else used)

        return part

    return wrapped(answers.Noise, "part", make)


def _row_is_unit(real: Any) -> Any:
    one = re.compile(r'"\w+"\."uid" AS "unit"')
    return lambda self, *turn: one.sub('ROW_NUMBER() OVER () AS "unit"', real(self, *turn))


def _largest_groups(real: Any) -> Any:
    """Each unit keeps its groups with the most rows, of all units."""

    def sampled(groups: Any, keys: Any, name: Any, most: int) -> Any:
        size = np.bincount(groups.group, groups.sums[0])
        order = np.lexsort((groups.group, -size[groups.group], groups.unit))
        unit = groups.unit[order]
        first = np.flatnonzero(np.diff(unit, prepend=-1))
        rank = np.arange(len(unit)) - np.repeat(first, np.diff(first, append=len(unit)))
        return np.sort(order[rank < most])

    return sampled


def _one_name(real: Any) -> Any:
    return lambda self, noise, items, scale=None: np.repeat(
        real(self, noise, items[:1] * 0, scale), len(items)
    )


_EIGHT = [(g, 0.0) for g in range(8)]
_OTHERS = [[(0, 5.0), (0, 10.0)]]
BROKEN = {
    "kappa bound left out": Broken(
        wrapped(bounding, "_sampled", lambda real: lambda groups, *_: np.arange(len(groups.unit))),
        Trial(f"COUNT(*, {PER_GROUP}(0, 1)) AS n", [(g, 1) for g in range(6)], groups=6),
    ),
    "clamp left out": Broken(
        _together(_NO_CLIP, _WIDE), Trial(f"SUM(x, {PER_GROUP}(0, 1)) AS s", [(0, 50)])
    ),
    "rows of a group left unbounded": Broken(
        wrapped(bounding, "smallest",
                lambda real: lambda groups, rows, slot, *_: np.arange(len(slot))),
        Trial(f"MEDIAN(x, {HUNDRED}) AS m", [(0, 99)] * 60, _OTHERS * 6, options=TWO_ROWS),
    ),
    "noise a fifth too small": Broken(
        _smaller_noise("sum", 1.25), Trial(f"SUM(x, {PER_GROUP}(0, 8)) AS s", [(0, 8)])
    ),
    "unit counted per row": Broken(
        wrapped(work.Work, "stage_one", _row_is_unit),
        Trial("COUNT(DISTINCT r.uid) AS u", [(0, 1)] * 5),
    ),
    "weights of selection not normalised": Broken(
        wrapped(stage, "aggregated",
                lambda real: lambda rows, groups, w: real(rows, groups, [1 << 16] * len(w))),
        Trial(f"SUM(x, {PER_GROUP}(0, 1)) AS s", _EIGHT, [_EIGHT] * 2, groups=8, kappa=8,
              options=FEW, public=False, presence=True),
    ),
    "noise of a tree too small": Broken(
        _smaller_noise("tree", 8.0),
        Trial(f"MEDIAN(x, {HUNDRED}) AS m", [(0, 99)] * 2, _OTHERS, options=TWO_ROWS),
    ),
    "centre of a mean left out": Broken(
        _NO_CENTRE,
        Trial(f"AVG(x, {PER_GROUP}(0, 100)) AS a", [(0, 100)], [[(0, 0.0)]] * 6),
    ),
    "sampling that looks at other units": Broken(
        wrapped(bounding, "_sampled", _largest_groups),
        Trial(f"COUNT(*, {PER_GROUP}(0, 3)) AS n", [(1, 1)] * 3,
              [*([[(0, 1), (1, 1)] * 2] * 5), [(0, 1), (1, 1), (0, 1)]], groups=2),
    ),
    "norm left out": Broken(
        wrapped(bounding, "_factor", lambda real: lambda unit, *_: np.ones(len(unit))),
        Trial(f"COUNT(*, {PER_GROUP}(0, 9), contribution_norm => 2) AS n",
              [(g, 1) for g in range(9)] * 9, groups=9, kappa=9),
    ),
    "one name for all groups": Broken(
        wrapped(answers.Noise, "part", _one_name),
        Trial(f"COUNT(*, {PER_GROUP}(0, 3)) AS n", [(0, 1)] * 3, groups=2),
    ),
}  # fmt: skip

"""Noise of released prefixes, advanced step by step: one path per (key, column).

The name of a path identifies the data (mechanism.md section 5): run id, epoch, plan hash,
digest of the sampler's table, window, column and key.  Everything but the key is
hashed once by keyed BLAKE2b-128; the key id is then mixed in by a keyed AES CBC-MAC,
which is vectorised (a BLAKE2b call per key would be a Python loop on the hot path) and keyed
just the same.  Paths are a cache: they can be dropped and recomputed at any time.
"""

import functools
import itertools
from typing import Any

import numpy as np
import numpy.typing as npt

from dpstream.accounting.arrays import Ids, Int64
from dpstream.accounting.budget.allocation import StreamNoise
from dpstream.accounting.errors import RunError
from dpstream.accounting.limits import MAX_DRAWS_AT_ONCE
from dpstream.accounting.strategies.base import ExactNoise, Ranges
from dpstream.dp_transforms.noise.continuous import ContinuousGaussian
from dpstream.dp_transforms.noise.prf import KeyRing, Prf
from dpstream.dp_transforms.noise.sampler import GeometricNodes, RoundedGaussian, TruncatedNodes

#: What a stream's node noise is drawn by, as its law and strategy need (``rounds_nodes``).
Sampler = RoundedGaussian | ContinuousGaussian | GeometricNodes | TruncatedNodes

State = npt.NDArray[Any]


class NoiseStream:
    """The noise of one column of one window: names, sampler and decoder of its paths.

    Args:
        ring: key ring of the deployment.
        run_name: run id, epoch and plan hash (committed before the first draw).
        window: (start, end) micros.
        role: ``selection``, ``units`` or ``value``; keeps equal stream names apart.
        noise: calibrated strategy of the stream.
        sampler: Gaussian of ``noise.sigma``, rounded or not as the strategy needs (shared
            between windows).
    """

    def __init__(
        self,
        ring: KeyRing,
        run_name: tuple[bytes, ...],
        window: tuple[int, int],
        role: str,
        noise: StreamNoise,
        sampler: Sampler,
    ) -> None:
        self._node = ring.node
        self._tweak = ring.tweak
        self.strategy = noise.strategy_object
        self.sampler = sampler
        bounds = b"".join(edge.to_bytes(16, "little", signed=True) for edge in window)
        labels = (role.encode(), noise.name.encode(), noise.strategy.encode())
        self._prefix = ring.name((*run_name, sampler.digest, bounds, *labels))

    def names(self, key_ids: Ids) -> Ids:
        """Return (n, 2) names (tweaks) of the paths of n keys.

        Args:
            key_ids: (n, 2) keyed ids.
        """
        count = len(key_ids)
        message = np.empty((count, 4, 2), np.uint64)
        message[:, 0] = (np.uint64(3), np.uint64(0))  # blocks that follow: a fixed length
        message[:, 1] = self._prefix
        message[:, 2] = key_ids
        message[:, 3] = 0
        return self._tweak.mac(message.reshape(-1, 2), np.full(count, 4, np.int64))

    def component_names(self, numbers: Int64) -> Ids:
        """Return (n, 2) tweaks of the components of mixed cells, by their public numbers.

        The last word of a key's message is 0 and of a component's 1, so that no component has the
        name of a key, whatever key ids are.
        """
        count = len(numbers)
        message = np.zeros((count, 4, 2), np.uint64)
        message[:, 0, 0] = 3
        message[:, 1] = self._prefix
        message[:, 2, 0] = numbers.astype(np.uint64)
        message[:, 3, 1] = 1
        return self._tweak.mac(message.reshape(-1, 2), np.full(count, 4, np.int64))

    def no_state(self, rows: int) -> State:
        """Return the (rows, state_columns) state of paths into which nothing is folded yet."""
        return np.zeros((rows, self.strategy.state_columns), self.strategy.state_dtype)

    def advance(
        self, tweaks: Ids, step_index: Int64, upto: Int64, stack: State, width: int
    ) -> Int64:
        """Fold the noise of steps ``step_index + 1 .. upto`` into ``stack`` (updated in place).

        Returns:
            (n, width) n_t * 2^DECODE_BITS of the steps in order; with width 1 of the last.

        Raises:
            RunError: width is 1 and a path is at that step already or beyond it: its noise was
                handed out before, and 0 in its place would publish the exact count.
        """
        if width == 1 and (upto <= step_index).any():
            raise RunError(
                "noise",
                "a prefix is asked for at a step that its path has passed",
                "run again, and report it if that does not help",
            )
        out = np.zeros((len(step_index), width), np.int64)
        first = self.strategy.first_node(step_index)
        last = self.strategy.last_node(step_index, upto)
        for rows in _chunks(last - first):
            names = tweaks[rows]
            noise, starts = self.sampler.draw(self._node, names, first[rows], last[rows])
            exact = functools.partial(self._exact, names)
            spans = step_index[rows], upto[rows], stack[rows], out[rows]
            self.strategy.fold(Ranges(noise, starts, *spans, exact, self.sampler.error))
        return out

    @property
    def node(self) -> Prf:
        """The pseudo-random function that draws all node noise of the stream."""
        return self._node

    def _exact(self, tweaks: Ids, row: int, nodes: int) -> ExactNoise:
        """The first nodes of one name, for a prefix whose rounding floats leave open."""
        return self.sampler.exact(self._node, tweaks[row], nodes)


class Paths:
    """The noise paths of one stream's keys, in a table that grows.

    A path is the decoded noise of one key in one round over the steps.  Rows are the dense numbers
    (slots) that the key shard gives its keys; a row must be started before it is moved on.
    """

    def __init__(self, stream: NoiseStream) -> None:
        self._stream = stream
        self.tweaks = np.empty((0, 2), np.uint64)
        self.step_index = np.empty(0, np.int64)
        self._stack = stream.no_state(0)

    def start(self, rows: Int64, key_ids: Ids) -> None:
        """Begin the paths of ``rows`` at step 0 under the names of their keys."""
        if len(rows) == 0:
            return
        self._grow(int(rows.max()) + 1)
        self.tweaks[rows] = self._stream.names(key_ids)
        self.step_index[rows] = 0
        self._stack[rows] = 0

    def advance(self, rows: Int64, upto: Int64, width: int = 1) -> Int64:
        """Move the paths of ``rows`` to steps ``upto``; see ``NoiseStream.advance``."""
        stack = self._stack[rows]
        out = self._stream.advance(self.tweaks[rows], self.step_index[rows], upto, stack, width)
        self._stack[rows] = stack
        self.step_index[rows] = upto
        return out

    def seek(self, rows: Int64, step_index: Int64) -> None:
        """Move the noise paths of ``rows`` forward to steps ``step_index``, without decoding.

        Paths that are already there stay.  The next ``advance`` returns the same noise as if every
        step between had been decoded.
        """
        behind = self.step_index[rows] < step_index
        rows, step_index = rows[behind], step_index[behind]
        if self._stack.shape[1]:
            self.advance(rows, step_index)
        self.step_index[rows] = step_index

    def _grow(self, size: int) -> None:
        have = len(self.step_index)
        if size <= have:
            return
        size = max(size, have + have // 2, 1024)
        self.tweaks = np.resize(self.tweaks, (size, 2))
        self.step_index = np.concatenate([self.step_index, np.zeros(size - have, np.int64)])
        stack = self._stream.no_state(size)
        stack[:have] = self._stack
        self._stack = stack


def _chunks(draws: Int64) -> list[slice]:
    """Row ranges of at most MAX_DRAWS_AT_ONCE draws each (a single row may exceed it)."""
    if draws.sum() <= MAX_DRAWS_AT_ONCE:
        return [slice(0, len(draws))]
    group = np.cumsum(draws) // MAX_DRAWS_AT_ONCE
    edges = np.flatnonzero(np.diff(group)) + 1
    bounds = [0, *edges.tolist(), len(draws)]
    return [slice(a, b) for a, b in itertools.pairwise(bounds)]

"""The interface of a noise strategy: an encoder of a stream, its noise, and a streaming decoder.

Symbols are listed in ``strategies/README.md``.  A strategy for T public triggers turns the
step inputs x (int64, one per trigger) into nodes ``y = A x + z`` with z independent Gaussians
of sd sigma; what is released at trigger t is a fixed function of y's first nodes, equal to
``prefix_t + n_t`` where n_t is a fixed function of z alone, a whole number of 2^-DECODE_BITS.
Only ``geometric`` has two-sided geometric z; its prefixes may use nodes of future steps.
All methods are public arithmetic: no data, no randomness.

**Generators** are lower-triangular encoders with few numbers for each step, decoded with few
buffers.  A has numbers theta, out and into for each step and buffer, and a gain for each step:

    A[t, t] = 1 / gain_t,    A[t, j] = sum_k out_tk theta_(t-1)k ... theta_(j+1)k into_jk  (j < t),

so that w = A^-1 z, and with it n_t = w_1 + ... + w_t, takes one pass with a buffer for each k:

    w_t = gain_t (z_t - sum_k out_tk s_k),   then   s_k <- theta_tk s_k + into_tk w_t.

A buffered linear Toeplitz encoder is the case in which nothing depends on t.  Every figure here is
that of the numbers as they are, not of what they were meant to approximate.

**The binary tree** is decoded by Honaker's bottom-up estimate in exact integers (mechanism.md
section 3).  Leaf t of the tree completes the nodes of levels 0 .. tz(t) (tz = trailing zero bits),
so the nodes in order of completion are numbered 0, 1, 2, ... and ``2t - popcount(t)`` of them are
complete after leaf t.  A complete node of level l with true sum S has the integer statistic

    I_l = 2^l * (S + z) + I_left + I_right = (2^(l+1) - 1) * S + N_l,

N_l a fixed integer combination of the node noises below it.  ``I_l / (2^(l+1) - 1)`` is
Honaker's minimum-variance bottom-up estimate.  Rounding it to the lattice of 2^-DECODE_BITS
commutes with S (S is a whole number of lattice points), so the released prefix is

    q_t = sum over set bits l of t of round(2^D I_l / (2^(l+1)-1)) / 2^D = prefix_t + n_t,

a function of noisy integers only, and n_t can be computed from the noise alone.

Sensitivity: one unit of input at leaf t is added to one node of each level, and with T leaves
only the levels 0 .. floor(log2 T) ever hold a complete node, so col2 = floor(log2 T) + 1.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import flint
import numpy as np
import numpy.typing as npt
from typing_extensions import override

from dpstream.accounting.arrays import Float64, Int64
from dpstream.accounting.balls import ROUND_UP
from dpstream.accounting.limits import DECODE_BITS, MAX_TRIGGERS, MAX_TRIGGERS_OF


class Responses(NamedTuple):
    """The largest changes in a pass with node noises of at most 1, and those that an error causes.

    Attributes:
        decoder: (T, T) row t has the weights of z in n_t.
        step: the most that 1 added to a w moves a prefix; buffers: (d,) the same of a buffer.
        steps: the largest |w|; filled: (d,) the largest |s_k|.
    """

    decoder: Float64
    step: float
    buffers: Float64
    steps: float
    filled: Float64


class Generators(NamedTuple):
    """The numbers of an encoder.

    Attributes:
        theta, out, into: (T, d) float64; theta and into are not negative where ``out`` is not.
        gain: (T,) float64, positive.
    """

    theta: Float64
    out: Float64
    into: Float64
    gain: Float64

    @property
    def table(self) -> Float64:
        """(T, 3 d + 1) theta, out, into and gain of each step, as compiled kernels read them."""
        return np.concatenate([self.theta, self.out, self.into, self.gain[:, None]], axis=1)

    def matrix(self) -> Float64:
        """Return (T, T) A."""
        size = len(self.gain)
        matrix, buffers = np.diag(1 / self.gain), np.zeros(self.theta.shape)
        for t in range(size):
            matrix[t, :t] = buffers[:t] @ self.out[t]
            buffers[:t] *= self.theta[t]
            buffers[t] = self.into[t]
        return matrix

    def responses(self) -> Responses:
        """See there; takes T^2 d operations.

        The decoder is built from the last step to the first: where one more in w_t moves prefix
        t' by ``moved``, and one more in buffer k before step t by ``pull``,

            moved = 1 + sum_k into_tk pull_k,    pull_k <- theta_tk pull_k - gain_t out_tk moved,

        and z_t's weight in it is gain_t moved.
        """
        size, width = self.theta.shape
        decoder, pull = np.zeros((size, size)), np.zeros((size, width))
        step, buffers = 1.0, np.zeros(width)
        for t in range(size - 1, -1, -1):
            later = pull[t:]
            moved = 1 + later @ self.into[t]
            decoder[t:, t] = self.gain[t] * moved
            later *= self.theta[t]
            later -= np.outer(self.gain[t] * moved, self.out[t])
            step = max(step, float(np.abs(moved).max()))
            buffers = np.maximum(buffers, np.abs(later).max(axis=0))
        steps, filled = 0.0, np.zeros(width)
        held = np.zeros((size, width))
        for t in range(size):
            before = decoder[t - 1, : t + 1] if t else 0.0
            given = decoder[t, : t + 1] - before
            steps = max(steps, float(np.abs(given).sum()))
            held[: t + 1] *= self.theta[t]
            held[: t + 1] += np.outer(given, self.into[t])
            filled = np.maximum(filled, np.abs(held[: t + 1]).sum(axis=0))
        return Responses(decoder, step, buffers, steps, filled)

    def prefix(self, noise: Sequence[Any], step_index: int) -> Any:
        """Return n_t before rounding, as a ball at the precision in force.

        Args:
            noise: balls of the first node noises, at least ``step_index`` of them.
        """
        total = flint.arb(0)
        buffers = [flint.arb(0)] * self.theta.shape[1]
        rows = zip(*(part.tolist() for part in self), strict=True)
        for (theta, out, into, gain), node in zip(rows, noise[:step_index], strict=False):
            rest = node
            for weight, held in zip(out, buffers, strict=True):
                rest -= weight * held
            given = gain * rest
            total += given
            buffers = [
                a * held + b * given for a, b, held in zip(theta, into, buffers, strict=True)
            ]
        return total


_SLACK = 1e-10
#: precision in bits -> one row's node noises as balls (``flint.arb``) that contain them.
ExactNoise = Callable[[int], Sequence[Any]]


class Ranges(NamedTuple):
    """Noise paths that ``Strategy.fold`` advances, each over its own range of steps.

    Attributes:
        noise: node noises of all rows; row i's from ``starts[i]``, beginning with node
            ``first_node(step_index[i])``, in the order of completion.
        step_index: (n,) steps already folded in; ``upto``: (n,) last step to fold in.
        stack: (n, state_columns) state, updated.
        out: (n, width) receives n_t * 2^DECODE_BITS of step ``step_index[i] + 1 + k`` in column k.
            With width 1 only the last step's is kept.
        exact: (row, nodes) -> the first ``nodes`` node noises of a row, counted from node 0; asked
            only where floats leave a rounding open.
        noise_error: bound of each node noise's float error (0: integers).
    """

    noise: npt.NDArray[Any]
    starts: Int64
    step_index: Int64
    upto: Int64
    stack: npt.NDArray[Any]
    out: Int64
    exact: Callable[[int, int], ExactNoise]
    noise_error: float = 0.0

    def settle(self, open_: tuple[Int64, Int64], exact: Callable[[int, int], int]) -> None:
        """Fill in the prefixes that floats leave open.

        Args:
            open_: their (rows, steps).
            exact: (row, step) -> n_t * 2^DECODE_BITS.
        """
        for row, step_index in zip(*(where.tolist() for where in open_), strict=True):
            column = step_index - self.step_index[row] - 1 if self.out.shape[1] > 1 else 0
            self.out[row, column] = exact(row, step_index)

    @property
    def arrays(self) -> tuple[npt.NDArray[Any], Int64, Int64, Int64, npt.NDArray[Any], Int64]:
        """The arrays in order, as compiled kernels take them."""
        return self[:6]


class Strategy(ABC):
    """One way to noise all T prefixes of a stream.

    Args:
        triggers: T >= 1.
        parameters: see there; default: chosen by this version of the program.

    Attributes:
        name: name of the strategy, as jobs write it.
        law: of z.  With ``gaussian`` the encoder is lower-triangular in time, which the path-wise
            proof of mu needs; ``geometric`` is charged plain epsilon, which does not.
        rounds_nodes: z are rounded Gaussians (A is an integer matrix); else z are Gaussians
            themselves, and only decoded prefixes are rounded.
        state_dtype: dtype of the state that ``fold`` carries from step to step.
    """

    name: str
    law: Literal["gaussian", "geometric"] = "gaussian"
    rounds_nodes = True
    state_dtype: npt.DTypeLike = np.int64

    def __init__(self, triggers: int, parameters: Float64 | None = None) -> None:
        if not 1 <= triggers <= MAX_TRIGGERS_OF.get(self.name, MAX_TRIGGERS):
            raise ValueError("the strategy takes at least one trigger, and fewer than these")
        self.triggers = triggers
        self.choose(parameters)

    def choose(self, parameters: Float64 | None) -> None:
        """Set the encoder's coefficients; here there are none to choose.

        Raises:
            ValueError: the parameters are not of this strategy.
        """
        if parameters is not None and len(parameters):
            raise ValueError("the strategy takes no parameters")

    @property
    def parameters(self) -> Float64:
        """Numbers that, with T, define the encoder; a run commits them when it begins."""
        return np.zeros(0)

    @property
    @abstractmethod
    def col2(self) -> float:
        """Largest squared column norm of the encoder: squared L2 effect of one unit of input."""

    @property
    @abstractmethod
    def sd_factors(self) -> Float64:
        """(T,) sd of n_t for node noise of sd 1, rounded up."""

    @property
    def rounding(self) -> Float64:
        """(T,) D_t: the largest distance of n_t from its ideal, by rounding of nodes and of
        decoding.

        Here it is that of decoding alone.
        """
        return np.full(self.triggers, ROUND_UP / (1 << DECODE_BITS) * (1 + _SLACK))

    @property
    @abstractmethod
    def reach(self) -> float:
        """Largest |n_t| when no node noise exceeds 1, rounded up."""

    @abstractmethod
    def matrix(self) -> npt.NDArray[Any]:
        """Return the dense encoder (nodes, T), nodes in the order in which they complete (small
        T).
        """

    def nodes_through(self, step_index: int | Int64) -> Int64:
        """Return the number of nodes that are complete after step ``step_index`` (0 for step 0).

        It is one a step, unless the strategy overrides it.
        """
        return np.asarray(step_index, np.int64).copy()

    @property
    def generators(self) -> Generators | None:
        """The encoder's numbers, where real nodes are decoded with buffers; else ``None``."""
        return None

    @property
    @abstractmethod
    def state_columns(self) -> int:
        """The number of state values that a path carries to the next step, at least 1."""

    def first_node(self, step_index: Int64) -> Int64:
        """Return the first node whose noise ``fold`` needs to go on after ``step_index``."""
        return self.nodes_through(step_index)

    def last_node(self, step_index: Int64, upto: Int64) -> Int64:
        """Return (n,) the first node that ``fold`` does not need from ``step_index`` to
        ``upto``.
        """
        return np.maximum(self.first_node(step_index), self.nodes_through(upto))

    @abstractmethod
    def fold(self, ranges: Ranges) -> None:
        """Advance many noise paths: update their states and fill ``ranges.out``."""


class TreeStrategy(Strategy):
    """The binary tree with Honaker's bottom-up estimate, for any T."""

    name = "tree"

    @property
    def levels(self) -> int:
        """Levels that can hold a complete node: floor(log2 T) + 1."""
        return self.triggers.bit_length()

    @property
    @override
    def col2(self) -> float:
        return float(self.levels)

    @property
    @override
    def reach(self) -> float:
        # A block's weights sum to at most (levels) and a prefix has at most that many blocks.
        return float(self.levels**2)

    @property
    @override
    def state_columns(self) -> int:
        return self.levels

    def _per_set_bit(self, block: Float64) -> Float64:
        """(T,) sum over the set bits l of t of ``block[l]``."""
        leaves = np.arange(1, self.triggers + 1)
        bits = (leaves[:, None] >> np.arange(self.levels)) & 1
        total: Float64 = bits @ block
        return total

    @property
    @override
    def sd_factors(self) -> Float64:
        # Var(I_l / (2^(l+1)-1)) = 1 / (2 (1 - 2^-(l+1))): equation (1) of the paper.
        level = np.arange(self.levels, dtype=np.float64)
        variance = self._per_set_bit(0.5 / (1.0 - 2.0 ** -(level + 1.0)))
        return np.asarray(np.sqrt(variance) * (1 + 1e-15), dtype=np.float64)

    @property
    @override
    def rounding(self) -> Float64:
        # A node's noise is within 1/2 of its Gaussian; level j of a block has 2^(l-j) nodes
        # of weight 2^j / (2^(l+1)-1) each, l+1 levels: (l+1) 2^l / (2^(l+1)-1) halves.
        # Decoding rounds each block once more by at most half a lattice step (level 0: exact).
        level = np.arange(self.levels, dtype=np.float64)
        nodes = 0.5 * (level + 1) * 2.0**level / (2.0 ** (level + 1) - 1)
        decode = np.where(level == 0, 0.0, 2.0 ** -(DECODE_BITS + 1))
        return self._per_set_bit((nodes + decode) * (1 + 1e-15))

    @override
    def matrix(self) -> Int64:
        rows = []
        for leaf in range(1, self.triggers + 1):
            level = 0
            while leaf % (1 << level) == 0:
                row = np.zeros(self.triggers, np.int64)
                row[leaf - (1 << level) : leaf] = 1
                rows.append(row)
                level += 1
        return np.array(rows)

    @override
    def nodes_through(self, leaf: int | Int64) -> Int64:
        leaf = np.asarray(leaf, np.int64)
        return np.asarray(2 * leaf - np.bitwise_count(leaf), np.int64)

    @override
    def fold(self, ranges: Ranges) -> None:
        """See base; the state is N_l of the complete blocks, one per set bit of the leaf."""
        from dpstream.accounting.strategies.kernels import fold_tree

        fold_tree(*ranges.arrays)

"""What a noise strategy is: an encoder of a stream, its noise, and a streaming decoder.

Symbols are listed in ``strategies/README.md``.  A strategy for T public triggers turns the
step inputs x (int64, one per trigger) into nodes ``y = A x + z`` with z independent Gaussians
of sd sigma; what is released at trigger t is a fixed function of y's first nodes, equal to
``prefix_t + n_t`` where n_t is a fixed function of z alone, a whole number of 2^-DECODE_BITS.
Only ``geometric`` has two-sided geometric z; its prefixes may use nodes of future steps.
All methods are public arithmetic: no data, no randomness.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from dpstream.accounting.arrays import Float64, Int64
from dpstream.accounting.strategies.generators import Generators

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
        name: as in the job.
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
        if triggers < 1:
            raise ValueError("a strategy needs at least one trigger")
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
    @abstractmethod
    def rounding(self) -> Float64:
        """(T,) D_t: the most n_t differs from its Gaussian ideal (node and decode rounding)."""

    @property
    @abstractmethod
    def reach(self) -> float:
        """Largest |n_t| when no node noise exceeds 1, rounded up."""

    @abstractmethod
    def worst_split(self, pieces: int, total: int | Int64) -> float | Float64:
        """Upper bound of |A a|^2 over a >= 1 on ``pieces`` distinct steps, sum(a) = ``total``, for
        each total."""

    @abstractmethod
    def matrix(self) -> npt.NDArray[Any]:
        """Dense encoder (nodes, T), nodes in the order in which they complete (small T)."""

    @abstractmethod
    def nodes_through(self, step_index: int | Int64) -> Int64:
        """Number of nodes that are complete after step ``step_index`` (0 for step 0)."""

    @property
    def generators(self) -> Generators | None:
        """The encoder's numbers, where real nodes are decoded with buffers; else ``None``."""
        return None

    @property
    @abstractmethod
    def state_columns(self) -> int:
        """Numbers of state a path carries from step to step (0: ``fold`` starts at step 0)."""

    def first_node(self, step_index: Int64) -> Int64:
        """First node whose noise ``fold`` needs to go on after ``step_index``."""
        return self.nodes_through(step_index) if self.state_columns else np.zeros_like(step_index)

    def last_node(self, step_index: Int64, upto: Int64) -> Int64:
        """(n,) number of the first node that ``fold`` no longer needs to go from ``step_index`` to
        ``upto``."""
        return np.maximum(self.first_node(step_index), self.nodes_through(upto))

    @abstractmethod
    def fold(self, ranges: Ranges) -> None:
        """Advance many noise paths: update their states and fill ``ranges.out``."""

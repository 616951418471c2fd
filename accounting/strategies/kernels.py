"""The strategies' inner loops, compiled by numba.

They are imported by whoever folds, not by whoever plans: numba takes longer to load than a plan
takes to compute.  Arrays have the shapes and dtypes of ``Ranges``.  `impulse` is plain Python, too,
so that a plan of few triggers needs no compiler.
"""

import numpy as np

from dpstream.accounting.arrays import Float64, Int32, Int64
from dpstream.accounting.balls import ROUND_UP
from dpstream.accounting.libraries import njit
from dpstream.accounting.limits import DECODE_BITS


def impulse(theta: Float64, omega: Float64, out: Float64) -> None:
    """Fill ``out`` with b_k, the prefix of w after k + 1 steps for z = (1, 0, 0, ...).

    Direct-form filters lose digits where poles lie near 1.

    Args:
        theta, omega: (d,) of the exponentials; out: (T,).
    """
    buffers = np.zeros(theta.size)
    total = 0.0
    for t in range(out.size):
        step = 1.0 if t == 0 else 0.0
        for k in range(theta.size):
            step -= omega[k] * buffers[k]
        for k in range(theta.size):
            buffers[k] = theta[k] * buffers[k] + step
        total += step
        out[t] = total


_SCALE = 1 << DECODE_BITS
_FLOAT_SCALE = float(_SCALE)
_UNIT_ROUND_OFF = 2.0**-53

#: `impulse`, for many triggers; the same operations in the same order.
fill_impulse = njit(cache=True, nogil=True)(impulse)


@njit(cache=True, nogil=True)
def decode_block(total: int, level: int) -> int:  # pragma: no cover - compiled
    """Return round(2^DECODE_BITS * I / (2^(level+1) - 1)); the divisor is odd, so no ties."""
    scaled = total << DECODE_BITS
    # Constant divisors, of all but one block in eight, compile to multiplications.
    if level == 0:
        return scaled
    if level == 1:
        return (scaled + 1) // 3
    if level == 2:
        return (scaled + 3) // 7
    divisor = (1 << (level + 1)) - 1
    return (scaled + (divisor >> 1)) // divisor


@njit(cache=True, nogil=True)
def fold_tree(
    noise: Int32, starts: Int64, step_index: Int64, upto: Int64, stack: Int64, out: Int64
) -> None:  # pragma: no cover - compiled
    """Run the compiled body of ``TreeStrategy.fold``."""
    levels = stack.shape[1]
    width = out.shape[1]
    # Sum of the decoded blocks of a level and above.
    above = np.zeros(levels + 1, np.int64)
    for i in range(step_index.size):
        for level in range(levels - 1, -1, -1):
            above[level] = above[level + 1]
            if (step_index[i] >> level) & 1:
                above[level] += decode_block(stack[i, level], level)
        node = starts[i]
        for t in range(step_index[i] + 1, upto[i] + 1):
            total = np.int64(noise[node])
            node += 1
            level = 0
            while (t >> level) & 1 == 0:
                total += stack[i, level]
                level += 1
                total += np.int64(noise[node]) << level
                node += 1
            stack[i, level] = total
            value = above[level + 1] + decode_block(total, level)
            # The blocks below are part of this one now.
            for lower in range(level + 1):
                above[lower] = value
            column = t - step_index[i] - 1
            out[i, column if width > 1 else 0] = value


@njit(cache=True, nogil=True)
def fold_blt(
    noise: Float64,
    starts: Int64,
    step_index: Int64,
    upto: Int64,
    stack: Float64,
    out: Int64,
    tables: Float64,
    given: float,
) -> tuple[Int64, Int64]:  # pragma: no cover - compiled
    """Run the compiled body of a BLT's ``fold``.

    Every local rounding error reaches a prefix through a bounded linear response: 1 for an error of
    w or n, ``responses[i]`` for one of buffer i.  There are four buffers in registers, whatever
    their number: those without weight stay out of every sum.

    Args:
        tables: (3, 4) theta, omega and responses, padded with zeros.
    """
    t0, t1, t2, t3 = tables[0]
    o0, o1, o2, o3 = tables[1]
    r0, r1, r2, r3 = tables[2]
    width = out.shape[1]
    rows, step_indices = [np.int64(0) for _ in range(0)], [np.int64(0) for _ in range(0)]
    for i in range(step_index.size):
        s0, s1, s2, s3, total, magnitude = stack[i]
        for t in range(step_index[i] + 1, upto[i] + 1):
            node = noise[starts[i] + t - step_index[i] - 1]
            p0, p1, p2, p3 = o0 * s0, o1 * s1, o2 * s2, o3 * s3
            step = node - ((p0 + p1) + (p2 + p3))
            local = 5.0 * (abs(node) + abs(p0) + abs(p1) + abs(p2) + abs(p3))
            local += r0 * abs(s0) + r1 * abs(s1) + r2 * abs(s2) + r3 * abs(s3)
            s0, s1, s2, s3 = t0 * s0 + step, t1 * s1 + step, t2 * s2 + step, t3 * s3 + step
            local += r0 * abs(s0) + r1 * abs(s1) + r2 * abs(s2) + r3 * abs(s3)
            total += step
            magnitude += local + abs(total)
            if width == 1 and t < upto[i]:
                continue
            scaled = total * _FLOAT_SCALE + ROUND_UP
            floor = np.int64(scaled)
            if scaled < floor:
                floor -= 1
            out[i, 0 if width == 1 else t - step_index[i] - 1] = floor
            error = (magnitude * 1.01 * _UNIT_ROUND_OFF + given) * _FLOAT_SCALE
            if scaled - floor < error or scaled - floor > 1 - error:
                rows.append(np.int64(i))
                step_indices.append(np.int64(t))
        stack[i, 0], stack[i, 1], stack[i, 2], stack[i, 3] = s0, s1, s2, s3
        stack[i, 4], stack[i, 5] = total, magnitude
    return np.array(rows), np.array(step_indices)


@njit(cache=True, nogil=True)
def fold_generators(
    noise: Float64,
    starts: Int64,
    step_index: Int64,
    upto: Int64,
    stack: Float64,
    out: Int64,
    table: Float64,
    responses: Float64,
    given: float,
) -> tuple[Int64, Int64]:  # pragma: no cover - compiled
    """Fold as in ``fold_blt``, with numbers of its own for each step.

    Args:
        table: ``Generators.table``.
        responses: (d + 1,) the most that 1 added to each buffer, and to a step, moves a prefix.
    """
    size = stack.shape[1] - 2
    width = out.shape[1]
    rows, step_indices = [np.int64(0) for _ in range(0)], [np.int64(0) for _ in range(0)]
    for i in range(step_index.size):
        held = stack[i]
        total, magnitude = held[size], held[size + 1]
        for t in range(step_index[i] + 1, upto[i] + 1):
            line = table[t - 1]
            node = noise[starts[i] + t - step_index[i] - 1]
            rest, around = node, abs(node)
            for k in range(size):
                part = line[size + k] * held[k]
                rest -= part
                around += abs(part)
            step = line[3 * size] * rest
            # size + 1 terms, each with a product, size subtractions and the gain.
            local = responses[size] * (size + 3.0) * line[3 * size] * around
            for k in range(size):
                decayed, added = line[k] * held[k], line[2 * size + k] * step
                local += responses[k] * 2.0 * (abs(decayed) + abs(added))
                held[k] = decayed + added
            total += step
            magnitude += local + abs(total)
            if width == 1 and t < upto[i]:
                continue
            scaled = total * _FLOAT_SCALE + ROUND_UP
            floor = np.int64(np.floor(scaled))
            out[i, 0 if width == 1 else t - step_index[i] - 1] = floor
            error = (magnitude * 1.01 * _UNIT_ROUND_OFF + given) * _FLOAT_SCALE
            if scaled - floor < error or scaled - floor > 1 - error:
                rows.append(np.int64(i))
                step_indices.append(np.int64(t))
        held[size], held[size + 1] = total, magnitude
    return np.array(rows), np.array(step_indices)


@njit(cache=True, nogil=True)
def fold_geometric(
    noise: Int64,
    starts: Int64,
    step_index: Int64,
    upto: Int64,
    stack: Float64,
    out: Int64,
    alone: Float64,
    rows: Float64,
    decoder: Float64,
) -> tuple[Int64, Int64]:  # pragma: no cover - compiled
    """Fold of strategy ``geometric``; node noises are whole numbers below 2^53.

    Args:
        alone: (T,) S; rows: (p, T) P; decoder: (T, p) W.

    Returns:
        (rows, step indices) of the prefixes that floats leave open; fractions decide these.
    """
    width, (mixed, size) = out.shape[1], rows.shape
    open_rows, open_steps = [np.int64(0) for _ in range(0)], [np.int64(0) for _ in range(0)]
    for i in range(step_index.size):
        held = stack[i]
        if step_index[i] == 0:
            for k in range(mixed):
                rest = np.float64(noise[starts[i] + size + k])
                around = abs(rest)
                for j in range(size):
                    if rows[k, j] != 0.0:
                        part = rows[k, j] * (noise[starts[i] + j] / alone[j])
                        rest -= part
                        around += abs(part)
                held[3 + k] = rest
                # A quotient, a product and at most ``size`` sums.
                held[2] = max(held[2], (size + 3.0) * around)
        total, magnitude = held[0], held[1]
        for t in range(step_index[i] + 1, upto[i] + 1):
            step = noise[starts[i] + t - step_index[i] - 1] / alone[t - 1]
            total += step
            magnitude += abs(step) + abs(total)
            if width == 1 and t < upto[i]:
                continue
            value, around, weight = total, abs(total), 0.0
            for k in range(mixed):
                part = decoder[t - 1, k] * held[3 + k]
                value += part
                around += abs(part)
                weight += abs(decoder[t - 1, k])
            scaled = value * _FLOAT_SCALE + ROUND_UP
            floor = np.int64(np.floor(scaled))
            out[i, 0 if width == 1 else t - step_index[i] - 1] = floor
            error = magnitude + (mixed + 2.0) * around + weight * held[2]
            error = error * 1.01 * _UNIT_ROUND_OFF * _FLOAT_SCALE + 2.0**-40
            error += abs(scaled) * _UNIT_ROUND_OFF * 2.0
            if scaled - floor < error or scaled - floor > 1 - error:
                open_rows.append(np.int64(i))
                open_steps.append(np.int64(t))
        held[0], held[1] = total, magnitude
    return np.array(open_rows), np.array(open_steps)


@njit(cache=True, nogil=True)
def largest_response(
    theta: float, omega: float, decoder: Float64
) -> float:  # pragma: no cover - compiled
    """Return the largest change of a later prefix by 1 added to a buffer (theta, omega) at any
    step.
    """
    value, largest = 0.0, 0.0
    for k in range(1, decoder.size):
        value = theta * value - omega * decoder[k - 1]
        largest = max(largest, abs(value))
    return largest

"""The keyed functions: plain references, framing that tells everything apart, their end."""

import gc
import hashlib
import pickle
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from hypothesis import given, settings
from hypothesis import strategies as st

from dpstream.accounting.arrays import Ids, Int64
from dpstream.accounting.errors import InvariantError
from dpstream.accounting.query.bounds import BoundsDesign
from dpstream.accounting.query.calibration import allocate_query
from dpstream.accounting.query.plan import QueryColumn
from dpstream.accounting.regions.space import Budget, Integer, Space
from dpstream.accounting.sessions.aggregates import Axis, Cells, Question
from dpstream.accounting.strategies.cells.bases import Even, reduced
from dpstream.accounting.strategies.cells.products import LatticeStrategy
from dpstream.accounting.tuning.question import Histogram, encoder_matrix
from dpstream.dp_transforms import residual
from dpstream.dp_transforms.noise import inputs as module
from dpstream.dp_transforms.noise import prf
from dpstream.dp_transforms.noise.inputs import InputDigest, combined
from dpstream.dp_transforms.noise.oneshot import numbered
from dpstream.dp_transforms.noise.prf import KeyRing, Prf, destroyed
from dpstream.dp_transforms.noise.secret import wipe
from dpstream.dp_transforms.one_shot import aggregated, answer, bounded, bounding, choose_bounds
from dpstream.dp_transforms.one_shot.answers import inputs_of
from dpstream.dp_transforms.session import inputs_of as inputs_of_session
from dpstream.dp_transforms.session import measured, nothing
from dpstream.dp_transforms.tuning import noisy
from dpstream.pipelines.workload import lattice
from tests.fixed import held_noise
from tests.golden.refusals import Refused
from tests.queries import QUANTILES, RUN, generated, query, stage_one
from tests.sessions import sum_of

KEY = bytes(range(32))


def aes(key: bytes, block: bytes) -> bytes:
    encryptor = Cipher(algorithms.AES(key), modes.ECB()).encryptor()
    return encryptor.update(block) + encryptor.finalize()


def random_blocks(count: int, seed: int = 0) -> Ids:
    return np.random.default_rng(seed).integers(0, 2**64, (count, 2), np.uint64)


# --- AES ---------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [0, 1, 2, 100])
def test_blocks_are_aes_row_by_row(count: int) -> None:
    blocks = random_blocks(count)
    out = Prf(KEY).blocks(blocks)
    assert out.shape == (count, 2)
    assert [r.tobytes() for r in out] == [aes(KEY, b.tobytes()) for b in blocks]
    spread = np.asfortranarray(np.repeat(blocks, 2, axis=0))[::2]
    assert (Prf(KEY).blocks(spread) == out).all()


def test_calls_do_not_depend_on_earlier_ones() -> None:
    prf, blocks = Prf(KEY), random_blocks(50)
    first = prf.blocks(blocks)
    prf.blocks(random_blocks(7, seed=1))
    assert (prf.blocks(blocks) == first).all()
    assert (prf.blocks(blocks[20:30]) == first[20:30]).all()


@settings(max_examples=60)
@given(lengths=st.lists(st.integers(1, 9), max_size=12), seed=st.integers(0, 99))
def test_mac_is_cbc_mac_row_by_row(lengths: list[int], seed: int) -> None:
    message = random_blocks(sum(lengths), seed)
    got = Prf(KEY).mac(message, np.array(lengths, np.int64))
    begin = 0
    for row, length in enumerate(lengths):
        data = message[begin : begin + length].tobytes()
        encryptor = Cipher(algorithms.AES(KEY), modes.CBC(b"\0" * 16)).encryptor()
        assert got[row].tobytes() == encryptor.update(data)[-16:]
        begin += length


# --- the ring --------------------------------------------------------------------------------


def test_children_of_the_key_differ_by_purpose() -> None:
    block = random_blocks(1)
    rings = [KeyRing(KEY), KeyRing(b"\1" * 32)]
    outputs = [
        child.blocks(block).tobytes()
        for ring in rings
        for child in (ring.node, ring.tweak, ring.unit, ring.key, ring.release)
    ]
    assert len({*outputs, Prf(KEY).blocks(block).tobytes()}) == 11
    assert rings[0].fingerprint != rings[1].fingerprint
    assert KeyRing(KEY).fingerprint == rings[0].fingerprint and len(rings[0].fingerprint) == 32


def test_names_and_sources_are_framed(ring: KeyRing) -> None:
    lists = [(), (b"",), (b"", b""), (b"ab", b"c"), (b"a", b"bc"), (b"abc",), (b"c", b"ab")]
    assert len({ring.name(parts).tobytes() for parts in lists}) == len(lists)
    assert len({ring.source_fingerprint(parts) for parts in lists}) == len(lists)
    assert ring.name(lists[3]).tobytes().hex() != ring.source_fingerprint(lists[3])
    framed = b"\2" + bytes(7) + b"ab" + b"\1" + bytes(7) + b"c"
    keyed = [hashlib.blake2b(framed, key=key, digest_size=16) for key in (ring._name, ring._source)]
    assert ring.name(lists[3]).tobytes() == keyed[0].digest()
    assert ring.source_fingerprint(lists[3]) == keyed[1].hexdigest()


def test_nothing_secret_is_pickled_or_printed() -> None:
    ring = KeyRing(KEY)
    for secret in (ring, ring.node, Prf(KEY)):
        with pytest.raises(TypeError):
            pickle.dumps(secret)
        assert KEY.hex() not in repr(secret) + str(vars(secret))
        assert repr(KEY) not in str(vars(secret))


# --- the end of a ring -----------------------------------------------------------------------

#: Children a ring gives out, and all it can be asked for.
CHILDREN = ("node", "tweak", "unit", "key", "release", "sample")
ONE = np.ones(1, np.int64)


def uses(ring: KeyRing) -> list[Any]:
    """Every way to use a ring, children that were taken from it before its end included."""
    taken = [getattr(ring, name) for name in CHILDREN]
    return [
        *(lambda p=p, n=n: p.blocks(random_blocks(n)) for p in taken for n in (0, 1, 50)),
        *(lambda p=p: p.mac(random_blocks(1), ONE) for p in taken),
        lambda: ring.name((b"a",)),
        lambda: ring.source_fingerprint((b"a",)),
    ]


def test_a_destroyed_ring_draws_nothing(refused: Refused) -> None:
    ring = KeyRing(KEY)
    every = uses(ring)
    for use in every:
        use()
    for _ in range(2):
        ring.destroy()
        for use in every:
            refused(use)
    with KeyRing(KEY) as other:
        assert other.fingerprint == ring.fingerprint
        other.name(())
    refused(other.name, ())


def secrets_held(ring: KeyRing) -> list[bytes]:
    """All buffers and texts of a key's size that can be reached from a ring."""
    seen: set[int] = set()
    todo: list[Any] = [ring]
    buffers = []
    while todo:
        one = todo.pop()
        if id(one) in seen or isinstance(one, type):
            continue
        seen.add(id(one))
        if isinstance(one, bytes | bytearray) and len(one) == 32:
            buffers.append(bytes(one))
        if isinstance(one, bytes | bytearray | str | int) or type(one).__name__ == "module":
            continue
        todo += gc.get_referents(one) if not callable(one) else []
    return buffers


def test_a_ring_holds_no_key_but_two_children_and_these_until_its_end() -> None:
    root = bytearray(KEY)
    ring = KeyRing(root)
    assert root == KEY, "the owner overwrites it"
    held = secrets_held(ring)
    assert len(held) == 2 and KEY not in held and all(any(one) for one in held)
    ring.destroy()
    assert secrets_held(ring) == [bytes(32)] * 2
    wipe(root)
    assert root == bytes(32)


class Keeps(KeyRing):
    """Sabotage: destroyed in name only."""

    def destroy(self) -> None:
        self._alive = False


def test_a_ring_that_keeps_its_children_is_caught() -> None:
    ring = Keeps(KEY)
    ring.destroy()
    assert bytes(32) not in secrets_held(ring)
    ring.node.blocks(random_blocks(1))  # and draws


def test_a_dropped_ring_is_overwritten() -> None:
    ring = KeyRing(KEY)
    buffers, node = (ring._name, ring._source), ring.node
    expected = Prf.blocks(node, random_blocks(3))
    del ring
    assert buffers == (bytearray(32), bytearray(32))
    assert (node.blocks(random_blocks(3)) == expected).all(), "its holder goes on"


class AsksFirst(KeyRing):
    """Sabotage: asks whether it is alive, and only then reads the key."""

    def _digest(self, key: bytearray, parts: Sequence[bytes]) -> Ids:
        if not self._alive:
            raise destroyed()
        digest = vars(prf)["hashlib"].blake2b(key=key, digest_size=16)
        return np.frombuffer(digest.digest(), np.uint64)


@pytest.mark.parametrize("kind", [KeyRing, AsksFirst])
def test_a_ring_destroyed_by_another_thread_names_nothing(
    monkeypatch: pytest.MonkeyPatch, kind: type[KeyRing], refused: Refused
) -> None:
    """The worst moment: the key is overwritten just before it is read."""
    ring, real = kind(KEY), hashlib.blake2b

    def interrupted(*args: Any, **options: Any) -> Any:
        ring.destroy()
        return real(*args, **options)

    monkeypatch.setattr(prf, "hashlib", SimpleNamespace(blake2b=interrupted))
    if kind is KeyRing:
        refused(ring.name, ())
    else:
        unkeyed = real(key=bytes(32), digest_size=16).digest()
        assert ring.name(()).tobytes() == unkeyed, "a name that anyone can compute"


# The digest tells all numbers apart and nothing else; noise of every mechanism follows it.


RANDOM = np.random.default_rng(5)
ITEMS = RANDOM.integers(0, 1 << 62, (60, 2)).astype(np.uint64)
ROW, WIDE = RANDOM.integers(-9, 9, 60), RANDOM.integers(-2, 3, (60, 7))


def digest(ring: KeyRing, items: Ids, *columns: Int64, label: str = "a") -> bytes:
    return InputDigest(ring).add(label, items, *columns).value


def rows(ring: KeyRing, items: Ids, values: Int64, weights: Int64) -> bytes:
    return InputDigest(ring).add_rows("a", items, values, weights).value


def test_neither_order_nor_layout_nor_what_is_done_at_once_matters(ring: KeyRing) -> None:
    first = digest(ring, ITEMS, ROW, WIDE)
    order = RANDOM.permutation(60)
    assert len(first) == 16 and first != bytes(16)
    assert digest(ring, ITEMS[order], ROW[order], WIDE[order]) == first
    assert digest(ring, ITEMS, np.column_stack([ROW, WIDE])) == first
    assert digest(ring, ITEMS, ROW, *WIDE.T) == first
    assert digest(ring, ITEMS, ROW, np.asfortranarray(WIDE)) == first
    with mock.patch.object(module, "_AT_ONCE", 16):
        assert digest(ring, ITEMS, ROW, WIDE) == first
    labels = InputDigest(ring).add("a", ITEMS, ROW).add("b", ITEMS, WIDE).value
    assert InputDigest(ring).add("b", ITEMS, WIDE).add("a", ITEMS, ROW).value == labels


def test_digests_of_shards_add_up(ring: KeyRing) -> None:
    total = digest(ring, ITEMS, ROW, WIDE)
    for shards in (1, 2, 16, 60):
        parts = np.array_split(np.arange(60), shards)
        each = [digest(ring, ITEMS[part], ROW[part], WIDE[part]) for part in parts]
        assert combined(each) == combined(reversed(each)) == total
    assert combined([]) == digest(ring, ITEMS[:0], ROW[:0], WIDE[:0]) == bytes(16)


def test_numbers_that_are_0_do_not_matter(ring: KeyRing) -> None:
    one = ROW.copy()
    one[::3] = 0
    listed = np.flatnonzero(one)
    assert digest(ring, ITEMS[listed], one[listed]) == digest(ring, ITEMS, one)
    assert digest(ring, ITEMS, one, 0 * WIDE) == digest(ring, ITEMS, one)


def test_whatever_changes_another_digest_comes(ring: KeyRing) -> None:
    seen = {digest(ring, ITEMS, ROW, WIDE), digest(KeyRing(b"\x12" * 32), ITEMS, ROW, WIDE),
            digest(ring, ITEMS, ROW, WIDE, label="b"), digest(ring, ITEMS[:, ::-1], ROW, WIDE),
            digest(ring, ITEMS, WIDE, ROW), rows(ring, ITEMS, ROW, WIDE[:, 0]),
            rows(ring, ITEMS, WIDE[:, 0], ROW)}  # fmt: skip
    for item in range(60):
        for by in (1, -1, 1 << 40):
            one = ROW.copy()
            one[item] += by
            seen.add(digest(ring, ITEMS, one, WIDE))
            for column in range(7):
                wide = WIDE.copy()
                wide[item, column] += by
                seen.add(digest(ring, ITEMS, ROW, wide))
    assert len(seen) == 7 + 60 * 3 * 8
    swapped = np.concatenate([ROW[1::-1], ROW[2:]])
    assert digest(ring, ITEMS, swapped) != digest(ring, ITEMS, ROW) or ROW[0] == ROW[1]


def test_equal_rows_count_as_often_as_they_occur(ring: KeyRing) -> None:
    items = np.repeat(ITEMS[:2], 2, axis=0)
    first = rows(ring, items, np.array([1, 3, 5, 5]), np.array([2, 4, 6, 6]))
    # Weights of two rows of one item that change places are other rows.
    assert rows(ring, items, np.array([1, 3, 5, 5]), np.array([4, 2, 6, 6])) != first
    assert rows(ring, items[:3], np.array([1, 3, 5]), np.array([2, 4, 6])) != first
    parts = [rows(ring, items[k : k + 1], np.array([v]), np.array([w]))
             for k, (v, w) in enumerate([(1, 2), (3, 4), (5, 6), (5, 6)])]  # fmt: skip
    assert combined(parts) == first
    assert rows(ring, ITEMS[:1], np.array([0]), np.array([1])) != bytes(16)  # a row of value 0


def test_other_than_whole_numbers_are_refused(ring: KeyRing) -> None:
    wrong: Any
    for wrong in (ROW.astype(float), ROW.astype(np.uint64), ROW[1:]):
        with pytest.raises(InvariantError):
            digest(ring, ITEMS, wrong)


# --- noise of every mechanism ---------------------------------------------------------------------

GROUPS = 2_000


def of_query(law: str) -> Callable[[KeyRing, int], Int64]:
    columns = QueryColumn("u", "units"), QueryColumn("s", "sum", 0, 12, rows=3, grid=1.0)
    plan = query(*columns, groups=1, selects=False, mechanism=law)

    def drawn(ring: KeyRing, by: int) -> Int64:
        exact = aggregated(bounded(plan, stage_one(plan, generated(1)), ring, RUN), 64)
        large = 10**6 + np.arange(GROUPS)  # far from where figures end
        units = large.copy()
        units[7] += by  # which only a selection would look at
        sums = dict.fromkeys(exact.sums, large)
        exact = exact._replace(units=units, weighted=0 * units, sums=sums)
        estimates = answer(plan, allocate_query(plan), exact, [], numbered(GROUPS), ring, RUN)
        noise = [estimates.columns[name].value - large[estimates.group] for name in "us"]
        return np.rint(np.concatenate(noise)).astype(np.int64)

    return drawn


def histogram(name: str) -> Histogram:
    return Histogram(name, (), 512, (), 1, 1.0, 0.5, 25.0, 0.0)


def of_bounds(ring: KeyRing, by: int) -> Int64:
    plan = query(QueryColumn("a", "mean", rows=2), epsilon=4.0)
    design = BoundsDesign("gaussian", (histogram("a"), histogram("b")))
    counts = {name: np.arange(512) for name in "ab"}
    counts["b"][3] += by
    with mock.patch.object(bounding, "settled", lambda plan, design, noisy: noisy):
        out: Any = choose_bounds(plan, design, counts, ring, RUN)
    exact = [encoder_matrix(512) @ counts[name] for name in "ab"]
    return np.concatenate(out) - np.concatenate(exact)


def of_tuning(ring: KeyRing, by: int) -> Int64:
    of = histogram("m"), histogram("n")
    counts = [np.arange(512), np.arange(512)]
    counts[1][9] += by
    exact = [encoder_matrix(512) @ cells for cells in counts]
    return np.concatenate(noisy(ring, RUN, of, counts)) - np.concatenate(exact)


def of_session(ring: KeyRing, by: int) -> Int64:
    space = Space((Integer(name="x", low=0, high=GROUPS), Integer(name="y", low=0, high=7),
                   Budget(name="e", most=1), Budget(name="r", kind="rho", most=1)))  # fmt: skip
    cells = Cells((Axis("x", tuple(range(GROUPS + 1))),))
    question = Question(kind="epsilon", amount=90_000, aggregates=(sum_of("y"),), cells=cells)
    totals = nothing(cells.count, question.needs(space, space.everything))
    totals.records[5] += by
    inputs = inputs_of_session(totals, ring)
    estimates = measured(space, question, space.everything, totals, ring, "5a" * 16, inputs)[0][0]
    return np.delete(estimates, 5)


def of_lattice(ring: KeyRing, by: int) -> Int64:
    strategy = LatticeStrategy((np.eye(GROUPS, dtype=np.int64),))
    cells = np.arange(GROUPS)
    cells[4] += by
    made = lattice.lattice_of(strategy, 0.05, 1)
    return lattice.published(made, cells, ring, (b"run", b"plan")) - cells


def of_tables(ring: KeyRing, by: int) -> Int64:
    tables = [np.arange(600).reshape(20, 30), np.arange(40)]
    tables[1][3] += by
    bases = [[Even(20), Even(30)], [Even(40)]]
    estimates = residual.published(tables, [(0, 1), (2,)], bases, [40.0, 40.0], ring, (b"run",))
    exact = map(reduced, tables, bases)
    noise = [one - table for one, table in zip(estimates, exact, strict=True)]
    return np.concatenate([np.rint(one).astype(np.int64).ravel() for one in noise])


DRAWS: dict[str, Callable[[KeyRing, int], Int64]] = {
    "query, gaussian": of_query("gaussian"),
    "query, geometric": of_query("geometric"),
    "bounds": of_bounds,
    "tuning": of_tuning,
    "session": of_session,
    "workload, pure": of_lattice,
    "workload, tables": of_tables,
}


@pytest.mark.parametrize("kind", DRAWS)
def test_noise_is_the_same_on_the_same_numbers_only(kind: str, ring: KeyRing) -> None:
    """One number of them changed, and all noise is another, of which the old one tells nothing."""
    drawn = DRAWS[kind]
    first = drawn(ring, 0)
    assert (drawn(ring, 0) == first).all()
    other = drawn(ring, 1)
    assert (other == first).mean() < 0.2
    assert abs(np.corrcoef(other, first)[0, 1]) < 0.25
    with held_noise():  # the check fails where the digest is a constant
        assert (drawn(ring, 1) == drawn(ring, 0)).all()


def test_all_numbers_of_a_query_are_in_its_digest(ring: KeyRing) -> None:
    plan = query(QueryColumn("u", "units"), QUANTILES, groups=3)
    shard = bounded(plan, stage_one(plan, generated(1)), ring, RUN)
    ids = numbered(64)
    totals = aggregated(shard, 64, allocate_query(plan).weights)
    seen = [inputs_of(totals, [shard], ids, ring)]
    for part in (totals.units, totals.weighted, *totals.sums.values(),
                 *(rows for of in shard.rows.values() for rows in of[1:])):  # fmt: skip
        part[2] += 1
        seen.append(inputs_of(totals, [shard], ids, ring))
    assert len(set(seen)) == len(seen) >= 5

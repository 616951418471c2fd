"""The keyed functions: plain references, framing that tells everything apart, their end."""

import gc
import hashlib
import itertools
import pickle
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pytest
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from hypothesis import given, settings
from hypothesis import strategies as st

from dpstream.accounting.arrays import Ids
from dpstream.accounting.errors import RunError, UsageError
from dpstream.dp_transforms.noise import prf
from dpstream.dp_transforms.noise.ids import typed_ids
from dpstream.dp_transforms.noise.prf import KeyRing, Prf, destroyed
from dpstream.dp_transforms.noise.secret import wipe

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


# --- framing -------------------------------------------------------------------------------


class Frames:
    """Stands for a PRF and keeps what it would be given."""

    def __init__(self) -> None:
        self.rows: list[bytes] = []

    def mac(self, message: Ids, lengths: npt.NDArray[np.int64]) -> Ids:
        ends = np.cumsum(lengths)
        self.rows = [
            message[end - length : end].tobytes() for end, length in zip(ends, lengths, strict=True)
        ]
        return np.zeros((len(lengths), 2), np.uint64)


ARROW = {"string": pa.string(), "bytes": pa.binary(), "int": pa.int64(), "bool": pa.bool_()}
VALUES: dict[str, st.SearchStrategy[Any]] = {
    "string": st.sampled_from(["", "\0", "\0\0", "a", "b", "ab", "1", "i", "a" * 11, "a" * 12])
    | st.text("a\0\u00e9", max_size=4),
    "bytes": st.sampled_from([b"", b"\0", b"\0" * 8, b"a", b"ab", b"\1" + b"\0" * 7])
    | st.binary(max_size=20),
    "int": st.sampled_from([0, 1, -1, 256, 2**63 - 1, -(2**63)]),
    "bool": st.booleans(),
}
FIELD = st.sampled_from(list(VALUES)).flatmap(lambda t: st.tuples(st.just(t), VALUES[t]))
NAME = st.tuples(st.lists(FIELD, min_size=1, max_size=3), st.integers(0, 3))
Name = tuple[list[tuple[str, Any]], int]


def framed(name: Name) -> bytes:
    fields, period = name
    columns = [(kind, pa.array([value], ARROW[kind])) for kind, value in fields]
    frames = Frames()
    typed_ids(frames, columns, np.array([period], np.int64))  # type: ignore[arg-type]
    return frames.rows[0]


def distinct(name: Name) -> tuple[object, ...]:
    return (name[1], *((kind, type(value), value) for kind, value in name[0]))


@settings(max_examples=66)
@given(names=st.lists(NAME, min_size=2, max_size=8))
def test_framing_is_injective_and_prefix_free(names: list[Name]) -> None:
    for a, b in itertools.combinations(names, 2):
        left, right = framed(a), framed(b)
        if distinct(a) == distinct(b):
            assert left == right
        else:
            assert not left.startswith(right) and not right.startswith(left)


CONFUSABLE: list[list[Name]] = [
    [([("string", "1")], 0), ([("bytes", b"1")], 0), ([("int", 1)], 0), ([("bool", True)], 0)],
    [([("string", "")], 0), ([("string", "\0")], 0), ([("bytes", b"")], 0), ([("int", 0)], 0)],
    [([("string", "a"), ("string", "b")], 0), ([("string", "b"), ("string", "a")], 0)],
    [([("string", "ab"), ("string", "")], 0), ([("string", "a"), ("string", "b")], 0)],
    [([("string", "a"), ("int", 1)], 0), ([("int", 1), ("string", "a")], 0)],
    [([("string", "a")], 0), ([("string", "a")], 1), ([("string", "a"), ("int", 1)], 0)],
    [([("int", 1)], 0), ([("bytes", b"\1" + b"\0" * 7)], 0)],
    [([("string", "a" * 11)], 0), ([("string", "a" * 12)], 0), ([("string", "a" * 27)], 0)],
    [([("string", "a\0\0")], 0), ([("string", "a\0")], 0), ([("string", "a")], 0)],
]


@pytest.mark.parametrize("names", CONFUSABLE)
def test_confusable_names_have_other_ids(names: list[Name], ring: KeyRing) -> None:
    ids = set()
    for fields, period in names:
        columns = [(kind, pa.array([value], ARROW[kind])) for kind, value in fields]
        ids.add(typed_ids(ring.unit, columns, np.array([period])).tobytes())
    assert len(ids) == len(names)


def test_a_framing_without_lengths_would_be_noticed() -> None:
    """The test above rejects what only writes one component behind the other."""
    naive = {b"".join(str(v).encode() for _, v in fields) for fields, _ in CONFUSABLE[3]}
    assert len(naive) < len(CONFUSABLE[3])


def test_rows_are_framed_alone(ring: KeyRing) -> None:
    """An id depends on its own row: not on neighbours, slices or the batch."""
    words = ["", "a", "\0", "e" * 40, "b" * 11, "a"] * 5
    numbers = list(range(30))
    columns = [("string", pa.array(words)), ("int", pa.array(numbers))]
    period = np.arange(30) % 2
    ids = typed_ids(ring.key, columns, period)
    assert len({row.tobytes() for row in ids}) == 30
    for begin, end in ((0, 1), (3, 17), (29, 30), (5, 5)):
        sliced = [(kind, column.slice(begin, end - begin)) for kind, column in columns]
        assert (typed_ids(ring.key, sliced, period[begin:end]) == ids[begin:end]).all()


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
        with pytest.raises(TypeError, match="never pickled"):
            pickle.dumps(secret)
        assert KEY.hex() not in repr(secret) + str(vars(secret))
        assert repr(KEY) not in str(vars(secret))


@pytest.mark.parametrize("size", [0, 16, 31, 33])
def test_keys_of_another_length_are_refused(size: int) -> None:
    with pytest.raises(UsageError, match="64 hex digits"):
        KeyRing(b"\1" * size)


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


def test_a_destroyed_ring_draws_nothing() -> None:
    ring = KeyRing(KEY)
    every = uses(ring)
    for use in every:
        use()
    for _ in range(2):
        ring.destroy()
        for use in every:
            with pytest.raises(RunError) as caught:
                use()
            assert caught.value.field == "secret"
    with KeyRing(KEY) as other:
        assert other.fingerprint == ring.fingerprint
        other.name(())
    with pytest.raises(RunError):
        other.name(())


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
    monkeypatch: pytest.MonkeyPatch, kind: type[KeyRing]
) -> None:
    """The worst moment: the key is overwritten just before it is read."""
    ring, real = kind(KEY), hashlib.blake2b

    def interrupted(*args: Any, **options: Any) -> Any:
        ring.destroy()
        return real(*args, **options)

    monkeypatch.setattr(prf, "hashlib", SimpleNamespace(blake2b=interrupted))
    if kind is KeyRing:
        with pytest.raises(RunError):
            ring.name(())
    else:
        unkeyed = real(key=bytes(32), digest_size=16).digest()
        assert ring.name(()).tobytes() == unkeyed, "a name that anyone can compute"

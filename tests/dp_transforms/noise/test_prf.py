"""The keyed functions: plain references, framing that tells everything apart, their end."""

import gc
import hashlib
import pickle
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from hypothesis import given, settings
from hypothesis import strategies as st

from dpstream.accounting.arrays import Ids
from dpstream.dp_transforms.noise import prf
from dpstream.dp_transforms.noise.prf import KeyRing, Prf, destroyed
from dpstream.dp_transforms.noise.secret import wipe
from tests.golden.refusals import Refused

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

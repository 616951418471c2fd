"""Sockets as the kernel tells of them (engines are listened to in tests/runners)."""

import os
import socket

import pytest

from dpstream.pipelines.runners.listeners import (
    Listener,
    _address,
    connected,
    descendants,
    listeners,
    listens,
    supported,
)


def test_addresses_are_words_backwards() -> None:
    assert _address("0100007F:1F90") == ("127.0.0.1", 8080)
    assert _address("00000000000000000000000001000000:0016") == ("::1", 22)


@pytest.mark.parametrize(
    ("address", "loopback"),
    [("127.9.9.9", True), ("::ffff:127.0.0.1", True), ("0.0.0.0", False), ("::", False)],
)
def test_loopback_is_what_no_other_machine_reaches(address: str, loopback: bool) -> None:
    assert Listener(1, address, 80).loopback is loopback


def test_own_sockets_are_found() -> None:
    assert supported() and os.getpid() in descendants(os.getppid())
    with socket.create_server(("127.0.0.1", 0)) as server, socket.socket() as client:
        port = server.getsockname()[1]
        assert listens(os.getpid(), port) and not connected(os.getpid(), port)
        client.connect(("127.0.0.1", port))
        assert connected(os.getpid(), port)
        assert Listener(os.getpid(), "127.0.0.1", port) in listeners([os.getpid()])
    assert not listens(os.getpid(), port)


def test_a_process_that_has_ended_has_none() -> None:
    assert listeners([2**22 + 1]) == []

"""TCP sockets of processes, as Linux tells of them: who listens where, and who is connected.

Elsewhere there is no ``/proc``, and nothing is known.
"""

import ipaddress
import re
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

_PROC = Path("/proc")
_TABLES = ("tcp", "tcp6")
_ESTABLISHED, _LISTEN = "01", "0A"
_SOCKET = re.compile(r"socket:\[(\d+)\]")


class Listener(NamedTuple):
    """A port that a process accepts connections on."""

    pid: int
    address: str
    port: int

    @property
    def loopback(self) -> bool:
        """Whether only this machine can reach it."""
        address = ipaddress.ip_address(self.address)
        mapped = getattr(address, "ipv4_mapped", None)
        return bool((mapped or address).is_loopback)


def supported() -> bool:
    """Whether this system tells of sockets."""
    return (_PROC / "self").exists()


def descendants(pid: int) -> list[int]:
    """A process and all that it and its children started, as far as they live."""
    if not supported():
        return [pid]
    children: dict[int, list[int]] = {}
    for entry in _PROC.iterdir():
        if entry.name.isdigit():
            with suppress(OSError):  # it has ended meanwhile
                # After the name, which may hold anything, come the state and the parent.
                parent = (entry / "stat").read_text().rpartition(")")[2].split()[1]
                children.setdefault(int(parent), []).append(int(entry.name))
    pids, left = [], [pid]
    while left:
        pids.append(left.pop())
        left += children.get(pids[-1], [])
    return pids


def listeners(pids: Iterable[int]) -> list[Listener]:
    """All ports that these processes listen on; none for one that has ended."""
    sockets = []
    for pid in pids:
        for _, local, _, state in _sockets(pid):
            if state == _LISTEN:
                sockets.append(Listener(pid, *local))
    return sockets


def beyond_loopback(pid: int) -> list[Listener]:
    """What other machines could reach of a process and those that it started."""
    return [listener for listener in listeners(descendants(pid)) if not listener.loopback]


def listens(pid: int, port: int) -> bool:
    """Whether a process, or one that it started, listens on a port."""
    return any(listener.port == port for listener in listeners(descendants(pid)))


def connected(pid: int, port: int) -> bool:
    """Whether a process, or one that it started, has a connection to a port."""
    return any(
        state == _ESTABLISHED and remote[1] == port
        for one in descendants(pid)
        for _, _, remote, state in _sockets(one)
    )


Address = tuple[str, int]


def _sockets(pid: int) -> Iterator[tuple[str, Address, Address, str]]:
    """(number, local, remote, state) of a process's TCP sockets."""
    root = _PROC / str(pid)
    with suppress(OSError):  # it has ended, or is another user's
        mine = set()
        for link in (root / "fd").iterdir():
            with suppress(OSError):
                mine |= set(_SOCKET.findall(str(link.readlink())))
        for table in _TABLES:
            for line in (root / "net" / table).read_text().splitlines()[1:]:
                words = line.split()
                if words[9] in mine:
                    yield words[9], _address(words[1]), _address(words[2]), words[3]


def _address(text: str) -> Address:
    """``0100007F:1F90`` -> ``("127.0.0.1", 8080)``: words of four bytes, each backwards."""
    host, _, port = text.partition(":")
    raw = bytes.fromhex(host)
    data = b"".join(raw[i : i + 4][::-1] for i in range(0, len(raw), 4))
    return str(ipaddress.ip_address(data)), int(port, 16)

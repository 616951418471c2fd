"""Tickets: what was paid, and nobody's but the key's."""

from pathlib import Path

import msgspec
import pytest

from dpstream.accounting.errors import PolicyError
from dpstream.dp_transforms.noise.prf import KeyRing
from dpstream.pipelines.session.records.manifest import read_manifest
from dpstream.pipelines.session.ticket import opened, ticket_of
from tests.pipelines.session.batching import KEY, RUN, Made, made, secret_file


@pytest.fixture
def table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Made:
    return made(tmp_path, monkeypatch)


def test_a_ticket_says_what_was_paid_and_is_of_its_key(table: Made, tmp_path: Path) -> None:
    parts = read_manifest(table.folder, table.table).parts
    with secret_file(tmp_path).ring() as keys:
        data, name = ticket_of(table.table, parts, table.question(), table.boxes, RUN, keys)
        ticket, again = opened(data, keys)
        assert name == again and name.encode() in data
        other = ticket_of(table.table, parts, table.question(), table.boxes, "6b" * 16, keys)
        assert other.name != name  # of the same records
        fewer = ticket_of(table.table, parts[1:], table.question(), table.boxes, RUN, keys)
        assert fewer.name != name
        assert (ticket.boxes == table.boxes).all() and ticket.run_id == RUN
        assert ticket.table == table.table and ticket.table.digest == table.table.digest
        assert ticket.question == table.question() and ticket.parts == parts
        assert KEY.encode() not in data
        changed = data.replace(b'"amount":700000', b'"amount":700001')
        assert changed != data
        for bad in (changed, data[:-5] + b"00000", b"", b"\n", data[1:]):
            with pytest.raises(PolicyError, match="secret"):
                opened(bad, keys)
        # A form that this program does not know, of the right key.
        text = msgspec.json.encode({"form": 2})
        sealed = text + b"\n" + keys.source_fingerprint([b"session ticket", text]).encode()
        with pytest.raises(PolicyError, match="secret"):
            opened(sealed, keys)
    with KeyRing(bytearray(range(32))) as stranger, pytest.raises(PolicyError, match="secret"):
        opened(data, stranger)

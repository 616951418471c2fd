"""A store's life where nothing of it is built: everything is kept, and copies are refused.

A run expires nothing on such a store (positions and counters stay), which is safe and costs space.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import NoReturn

import pyarrow as pa
from typing_extensions import override

from accounting.errors import UsageError
from state.life_store import (
    KeyPiece,
    LifeStore,
    Part,
    PositionPiece,
    UnitPiece,
    UnitProgress,
)


def _refuse() -> NoReturn:
    raise UsageError("state.store", "of this kind cannot do that yet", "use 'sqlite:PATH'")


class KeepsEverything(LifeStore):
    """``LifeStore`` of a store that expires nothing and cannot be copied."""

    @override
    def progress(self) -> list[tuple[int, int, int]]:
        _refuse()

    @override
    def unit_progress(self, shard: int) -> UnitProgress:
        return UnitProgress()  # expiry leaves a shard alone that says it decided nothing

    @override
    def forget_positions(self, shard: int, cut: int) -> None:
        """Kept."""

    @override
    def drop_releases(self, before: int) -> None:
        _refuse()

    @override
    def compact(self) -> None:
        """The database does it by itself."""

    @override
    def parts(self) -> list[Part]:
        return []

    @override
    def snapshot(self) -> AbstractContextManager[None]:
        _refuse()

    @override
    def key_pieces(self, window: int, shard: int) -> Iterator[KeyPiece]:
        _refuse()

    @override
    def unit_pieces(self, shard: int) -> Iterator[UnitPiece]:
        _refuse()

    @override
    def position_pieces(self, shard: int) -> Iterator[PositionPiece]:
        _refuse()

    @override
    def carried(self, window: int, shard: int, trigger: int) -> pa.RecordBatch | None:
        return None  # only copies carry, and none was made

    @override
    def filling(self) -> AbstractContextManager[None]:
        _refuse()

    @override
    def put_step(
        self, window: int, shard: int, trigger: int, releases: pa.RecordBatch | None
    ) -> None:
        _refuse()

    @override
    def put_carried(self, window: int, shard: int, trigger: int, releases: pa.RecordBatch) -> None:
        _refuse()

    @override
    def put_keys(self, window: int, shard: int, piece: KeyPiece) -> None:
        _refuse()

    @override
    def put_units(self, shard: int, piece: UnitPiece) -> None:
        _refuse()

    @override
    def put_positions(self, shard: int, piece: PositionPiece) -> None:
        _refuse()

    @override
    def put_unit_progress(self, shard: int, progress: UnitProgress) -> None:
        _refuse()

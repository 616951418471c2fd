"""Tables of pandas, Polars and Arrow with the same rows, and an account for their answers."""

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa

import dpstream
from dpstream.dp_transforms.noise.prf import KeyRing
from dpstream.dp_transforms.noise.secret_source import SecretSource
from dpstream.pipelines.frames.question import Arguments, Question, question_of
from dpstream.pipelines.jobs.secret import new_secret
from tests import accounts

KEY = "3f7a91c4d2e85b60718293a4b5c6d7e8f90a1b2c3d4e5f60718293a4b5c6d7e8"
DEFAULTS: dict[str, Any] = {
    "kind": "units", "unit": "user", "key": "page", "value": None, "bounds": None, "epsilon": 1.0,
    "whole_numbers": False,
    "delta": 1e-9, "max_keys": 8, "max_rows": 5, "public_keys": None,
    "mechanism": "auto", "optimise": None, "charged": False,
}  # fmt: skip


def visits(rows: int = 3_000, users: int = 400, seed: int = 3) -> pa.Table:
    """Users, pages and seconds in eighths."""
    draw = np.random.default_rng(seed)
    pages = np.minimum(draw.exponential(2.0, rows).astype(int), 9)
    return pa.table({
        "user": draw.integers(0, users, rows),
        "page": pa.array([f"p{page}" for page in pages]),
        "seconds": draw.integers(0, 800, rows) / 8,
    })  # fmt: skip


def as_pandas(table: pa.Table) -> pd.DataFrame:
    return table.to_pandas()


def as_polars(table: pa.Table) -> pl.DataFrame:
    frame = pl.from_arrow(table)
    assert isinstance(frame, pl.DataFrame)
    return frame


LIBRARIES = {"pandas": as_pandas, "polars": as_polars, "arrow": lambda table: table}


def ring() -> KeyRing:
    return KeyRing(bytes.fromhex(KEY))


def question(data: Any, **given: Any) -> tuple[Question, dict[str, pa.ChunkedArray]]:
    return question_of(data, Arguments(**{**DEFAULTS, **given}))


def account(folder: Path, epsilon: float = 100.0) -> dict[str, Any]:
    """Arguments of a question that is charged."""
    if not (folder / "noise.secret").exists():
        new_secret(folder / "noise.secret")
    place = accounts.create(folder / "ledger.db", "visits", (epsilon, 1e-5), type_="int")
    secret = f"file:{folder / 'noise.secret'}"
    return {"account": dpstream.account(place.path, "visits", id=place.id, secret=secret)}


def with_secret(paid: dict[str, Any], secret: SecretSource) -> dict[str, Any]:
    """The same with the secret at another place."""
    return {"account": dataclasses.replace(paid["account"], secret=secret)}

"""Damaged files: every door refuses one before a charge, or reads all of its rows."""

import itertools
import random
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pyarrow as pa
import pytest
from pyarrow import feather, orc

from dpstream.accounting.errors import DpstreamError, UsageError
from dpstream.dp_transforms.ingest.records import positions
from dpstream.pipelines.connectors.files.source import batches, pieces
from dpstream.pipelines.connectors.files.types import check_types
from dpstream.pipelines.connectors.folder.store import close_files, place
from dpstream.pipelines.connectors.inputs import refusal
from dpstream.pipelines.connectors.registry import input_of
from dpstream.pipelines.connectors.write import write_dead_letters
from dpstream.pipelines.jobs.job import load_job
from dpstream.pipelines.session.config import load_config
from dpstream.pipelines.session.records.reading import Letters, files_of, records_of
from dpstream.pipelines.sql.load import load_catalog
from dpstream.pipelines.tables.engine import Engine
from dpstream.pipelines.tables.registration import require_fitting
from tests.worlds.fixtures import (
    LAYOUTS,
    PACKERS,
    ROWS,
    Variant,
    csv_of,
    json_variants,
    parquet_of,
    write,
    zipped,
)
from tests.worlds.test_doors import PROJECT, SESSION, project


def flipped(layout: str, seed: int) -> Variant:
    """A Parquet file of which one bit before the footer is another."""
    variant = parquet_of(layout=layout)
    footer = int.from_bytes(variant.data[-8:-4], "little")
    return other_bit(variant, f"{layout}-{seed}.parquet", seed, 4, footer + 8)


def other_bit(variant: Variant, name: str, seed: int, begin: int = 0, behind: int = 0) -> Variant:
    data, drawn = bytearray(variant.data), random.Random(seed)
    data[drawn.randrange(begin, len(data) - behind)] ^= 1 << drawn.randrange(8)
    return variant._replace(name=name, data=bytes(data))


def cut(variant: Variant, part: int) -> Variant:
    """A compressed text, or an array of JSON, that ends early."""
    end, kind = len(variant.data) * part // 10, variant.name.partition(".")[2]
    return variant._replace(name=f"{part}.{kind}", data=variant.data[:end])


PACKED = [csv_of(packer=packer) for packer in PACKERS if packer]
#: Their writers add checksums.
CHECKED = [variant for variant in PACKED if not variant.name.endswith("zst")]
ARRAYS = [variant for variant in json_variants() if ".json" in Path(variant.name).suffixes]
COLUMNS = {
    "arrow": parquet_of(ending="arrow", write=feather.write_feather),
    "plain.arrow": parquet_of(
        ending="arrow", write=partial(feather.write_feather, compression="uncompressed")
    ),
    "orc": parquet_of(ending="orc", write=partial(orc.write_table, compression="zlib")),
}


DAMAGED = [
    *(flipped(layout, seed) for layout, seed in itertools.product(LAYOUTS, range(8))),
    *(cut(variant, part) for variant in [*PACKED, *ARRAYS] for part in range(1, 10, 2)),
    *(other_bit(v, f"{n}.csv{Path(v.name).suffix}", n) for v in CHECKED for n in range(4)),
    *(other_bit(v, f"{n}.{end}", n) for end, v in COLUMNS.items() for n in range(12)),
    csv_of()._replace(name="two.csv.zip", data=zipped(csv_of().data, members=2)),
]


def rows_of_a_job(folder: Path, variant: Variant) -> int:
    job = load_job(project(folder, variant))
    pieces(job)
    check_types(job)
    return sum(batch.num_rows for batch in batches(job))


def rows_of_sql(folder: Path, variant: Variant) -> int:
    typed = 'columns = { user = "STRING", shop = "STRING", at = "TIMESTAMP", amount = "FLOAT64" }'
    variant = variant._replace(unit="string")
    catalog = load_catalog(project(folder, variant, table=typed))
    require_fitting(catalog, ["day"])
    with Engine(catalog, ["day"]) as engine:
        return int(engine.run("SELECT COUNT(*) AS n FROM day")["n"][0].as_py())


def rows_of_a_session(folder: Path, variant: Variant) -> int:
    config = load_config(project(folder, variant, SESSION))
    parts = list(records_of(config, files_of(config.records, "path"), None))
    reasons = {reason for part in parts if isinstance(part, Letters) for reason in part.reasons}
    if reasons == {"unreadable_file"}:  # of a kind that it is not: the file is a dead letter
        raise UsageError("records", "is named as unreadable", "make it again")
    return sum(len(part.rows) for part in parts if not isinstance(part, Letters))


DOORS = [rows_of_a_job, rows_of_sql, rows_of_a_session]


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("variant", DAMAGED, ids=lambda variant: variant.name)
def test_a_damaged_file_is_refused_or_read_to_its_end(
    variant: Variant, door: Callable[[Path, Variant], int], tmp_path: Path
) -> None:
    try:
        assert door(tmp_path, variant) == len(ROWS)
    except DpstreamError as error:
        assert not any(row.shop in str(error) for row in ROWS)


@pytest.mark.parametrize("kind", ["parquet", "csv"])
def test_a_growing_folder_names_the_files_of_which_rows_are_missing(
    kind: str, tmp_path: Path
) -> None:
    """It reads all others, and says no more of a damaged one than its name and a fixed reason."""
    damaged = {v.name: v for v in DAMAGED if f".{kind}" in v.name}
    table = f'time_column = "at"\nfolder = "in"\nformat = "{kind}"\nstamp = "manifest"'
    text = PROJECT.replace('path = "{path}"', "")
    job = load_job(project(tmp_path, Variant("none", b"", table, "string"), text))
    (tmp_path / "in").mkdir()
    for variant in damaged.values():
        write(tmp_path / "in", variant)
    close_files(tmp_path / "in", damaged)
    rows, letters = Counter[int](), list[pa.RecordBatch]()
    for part in input_of(job).scan():
        if isinstance(part, pa.RecordBatch):
            rows[positions(part)[0][0]] += part.num_rows
        else:
            letters.append(refusal(*part))
    write_dead_letters(Path(job.dead_letter), letters)
    short = {name for name in damaged if rows[place(name).partition] < len(ROWS)}
    assert input_of(job).damaged().keys() == short and len(short) > len(damaged) // 3
    assert {*input_of(job).damaged().values()} <= {"unreadable_file", "unreadable_rest"}
    gone = short.pop()
    (tmp_path / "in" / gone).unlink()
    assert input_of(job).damaged().keys() - short == {f"partition {place(gone).partition}"}


def test_most_damage_is_seen(tmp_path: Path) -> None:
    """A cut text always, pages with checksums but for their own headers, no file that is whole."""
    refused = list[str]()
    for variant in DAMAGED:
        try:
            rows_of_a_job(tmp_path, variant)
            assert "csv" not in variant.name or variant.data[2:4] == b"\x03\x04"
        except DpstreamError:
            refused.append(variant.name)
    assert sum("checksums" in name for name in refused) >= 7
    assert len(refused) >= 50
    assert rows_of_a_job(tmp_path, parquet_of()) == len(ROWS)

"""The table's file: what it means, and what of it is refused."""

from pathlib import Path
from typing import Any

import pytest

from dpstream.accounting.errors import DpstreamError, UsageError
from dpstream.accounting.regions.dimensions import Budget, Category, Integer, Real, Timestamp
from dpstream.pipelines.project.text import MAX_FILE_BYTES, parse_toml
from dpstream.pipelines.session import config as module
from dpstream.pipelines.session.config import config_of, kind_of, load_config
from tests.pipelines.session.tables import DAY, START, config_at

HOUR = DAY // 24


def example() -> dict[str, Any]:
    """The file of the module's docstring."""
    text = (module.__doc__ or "").split("key are.\n")[1].split("\nEverything in")[0]
    return parse_toml(text.encode())


def test_the_documented_file_is_one() -> None:
    config = config_of(example(), Path("/somewhere"))
    assert config.table.name == "rides"
    assert config.table.dimensions[0] == Timestamp(
        name="pickup", low=1_356_998_400_000_000, high=1_388_534_400_000_000, step=HOUR, grid=24
    )
    assert config.table.dimensions[1] == Real(
        name="longitude", low=-74.3, high=-73.7, step=0.001, grid=10, missing="point"
    )
    assert config.table.dimensions[2] == Category(name="vendor", codes=("CMT", "VTS"))
    assert config.table.dimensions[3] == Budget(name="epsilon", most=4.0)
    assert config.columns == ("pickup", "longitude", "vendor", "budget")
    assert (config.id, config.id_type) == ("ride_id", "string")
    assert config.folder == Path("/somewhere/rides.table")
    assert (
        config.records == "/somewhere/rides-*.parquet"
        and config.account.path == "/somewhere/ledger.db"
    )
    quotas = config.rules.quotas
    assert quotas.of("epsilon", "alice") == 3_000_000 and quotas.of("epsilon", "bob") == 2_000_000
    assert quotas.of("rho", "alice") is None
    assert config.rules.unlock is not None and config.rules.unlock.start == START
    assert config.rules.usable(START + 2 * DAY) == 300_000
    source = config.key_source()
    assert source.reference == "file:/somewhere/noise.key"


def test_a_small_table(tmp_path: Path) -> None:
    config = config_at(tmp_path)
    assert config.table.dimensions[0] == Integer(name="hour", low=0, high=24, grid=6)
    assert config.table.dimensions[4] == Budget(name="epsilon", most=2.0, step=500_000)
    assert config.table.dimensions[5] == Budget(name="rho", kind="rho", most=1.0)
    assert config.columns[2:] == ("time", "vendor", "budget", None)
    assert config.fixed[4:] == (None, 0.25)
    assert config.key_source().kind == "insecure_test_key"


def test_places_and_rules_are_no_part_of_the_model(tmp_path: Path) -> None:
    one, tables = config_of(example(), tmp_path), example()
    tables["table"] |= {"folder": "elsewhere", "records": "x.csv", "id": "other"}
    tables["ledger"]["data_set"] = "other"
    del tables["quota"], tables["unlock"], tables["privacy"]
    tables["dimension"][0]["column"] = "at"
    other = config_of(tables, tmp_path)
    assert one.table.digest == other.table.digest
    tables["dimension"][0]["grid"] = "2d"
    assert config_of(tables, tmp_path).table.digest != one.table.digest
    with pytest.raises(UsageError, match=r"secret: is required"):
        other.key_source()


def changed(path: str, value: Any) -> dict[str, Any]:
    """The example with one entry put, or taken away."""
    tables: Any = example()
    at, names = tables, path.split(".")
    for name in names[:-1]:
        at = at[int(name)] if name.isdigit() else at.setdefault(name, {})
    if value is None:
        del at[names[-1]]
    else:
        at[names[-1]] = value
    return tables


@pytest.mark.parametrize(
    ("path", "value", "field", "rule"),
    [
        ("table.nmae", "x", "table.nmae", "is not a known key"),
        ("table.name", None, "table.name", "is required"),
        ("table.name", "", "table.name", "must be printable"),
        ("table.folder", "", "table.folder", "must not be empty"),
        ("table.records", "rides.txt", "table.records", "is of no known kind"),
        ("table.id_type", "float", "table.id_type", "is not one of the choices"),
        ("table.cap", 0, "table.cap", "must be 1 to"),
        ("ledger.path", None, "ledger.path", "is required"),
        ("ledger.path", "mysql://x", "account.path", "is not a known kind of account"),
        ("privacy.key", "env:KEY", "secret", "is given twice"),
        ("dimension.0.low", None, "dimension[0].low", "is required for type timestamp"),
        ("dimension.0.low", 7, "dimension[0].low", "must be a text"),
        ("dimension.0.low", "yesterday", "dimension[0].low", "is not an RFC 3339 time"),
        ("dimension.0.step", "0s", "dimension[0].step", "must be a microsecond or more"),
        ("dimension.0.grid", "90m", "dimension[0].grid", "must be a whole number of steps"),
        ("dimension.0.high", "2012-01-01T00:00:00Z", "pickup", "coordinates"),
        ("dimension.0.type", "text", "dimension[0].type", "is not one of the choices"),
        ("dimension.1.step", 0, "dimension[1].step", "must be above 0"),
        ("dimension.1.step", 0.0007, "dimension[1].grid", "must be a whole number of steps"),
        ("dimension.1.values", ["a"], "dimension[1].values", "is not for type real"),
        ("dimension.1.missing", "drop", "dimension[1].missing", "is not one of the choices"),
        ("dimension.1.name", "vendor", "dimensions", "of different names"),
        ("dimension.2.values", ["a", "a"], "vendor", "must have codes that differ"),
        ("dimension.2.values", None, "dimension[2].values", "is required for type category"),
        ("dimension.3.step", 1e-7, "dimension[3].step", "must be a whole number of millionths"),
        ("dimension.3.most", -1.0, "epsilon", "must be 0 to"),
        ("dimension.1.low", float("nan"), "dimension[1].low", "must be a finite number"),
        ("dimension.3.most", float("inf"), "epsilon", "must be a finite number"),
        ("dimension.3.missing", "point", "dimension[3].missing", "is not for type budget"),
        ("dimension.3.value", 1.0, "dimension[3].value", "and a column too"),
        ("dimension.3.type", "integer", "dimension[3].low", "is required for type integer"),
        ("quota.epsilon", -1.0, "quota.epsilon", "must be 0 to"),
        ("quota.analyst.eve", {"epsilon": -1.0}, "quota.analyst.eve.epsilon", "must be 0 to"),
        ("unlock.share", 2.0, "unlock.share", "must be above 0 and at most 1"),
        ("unlock.start", "soon", "unlock.start", "is not an RFC 3339 time"),
    ],
)  # fmt: skip
def test_refusals_name_field_and_rule(path: str, value: Any, field: str, rule: str) -> None:
    with pytest.raises(DpstreamError, match=rule) as caught:
        config_of(changed(path, value), Path("/somewhere"))
    assert field in caught.value.field


def test_a_fixed_budget_is_one(tmp_path: Path) -> None:
    tables = changed("dimension.3.column", None)
    tables["dimension"][3]["value"] = -1.0
    with pytest.raises(UsageError, match=r"dimension\[3\]\.value: must be 0 to"):
        config_of(tables, tmp_path)


def test_a_table_without_budgets(tmp_path: Path) -> None:
    tables = example()
    del tables["dimension"][3]
    with pytest.raises(UsageError, match="must have one initial budget"):
        config_of(tables, tmp_path)


def test_files_that_are_none(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot be read"):
        load_config(tmp_path / "absent.toml")
    (tmp_path / "a.toml").write_bytes(b"\xff")
    with pytest.raises(UsageError, match="not TOML"):
        load_config(tmp_path / "a.toml")
    (tmp_path / "a.toml").write_bytes(b"#" * (MAX_FILE_BYTES + 1))
    with pytest.raises(UsageError, match="exceeds"):
        load_config(tmp_path / "a.toml")


def test_kinds_of_files() -> None:
    names = {"a.parquet": "parquet", "b.CSV": "csv", "c.csv.gz": "csv", "d.ndjson": "jsonl"}
    assert {name: kind_of(name, "records") for name in names} == names


def test_codes_are_composed(tmp_path: Path) -> None:
    config = config_of(changed("dimension.2.values", ["e\u0301"]), tmp_path)
    assert config.table.dimensions[2].codes == ("\u00e9",)

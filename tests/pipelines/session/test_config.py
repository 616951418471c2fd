"""A session table of the project file: what it means, and what of it is refused."""

from pathlib import Path
from typing import Any

import pytest

from dpstream.accounting.errors import DpstreamError, UsageError, instance
from dpstream.accounting.fields import Field
from dpstream.accounting.regions.space import Budget, Category, Integer, Real, Timestamp
from dpstream.pipelines.project.text import MAX_FILE_BYTES, parse_toml
from dpstream.pipelines.session import config as module
from dpstream.pipelines.session.config import Config, config_in, kind_of, load_config
from dpstream.state.ledger.open import PROJECT_FILE
from tests import projects
from tests.pipelines.session.tables import DAY, START, config_at

HOUR = DAY // 24


def example() -> dict[str, Any]:
    """The file of the module's docstring."""
    text = (module.__doc__ or "").split("secret are.\n")[1].split("\nThe model has")[0]
    tables = parse_toml(text.encode())
    del tables["version"]
    return tables


def config_of(tables: dict[str, Any], name: str | None = None) -> Config:
    return config_in(projects.of_sections(Path("/somewhere"), tables), name)


def test_the_documented_file_is_one() -> None:
    config = config_of(example())
    assert (config.name, config.table.name, config.account.data_set) == ("rides",) * 3
    assert config.table.dimensions[0] == Timestamp(
        name="pickup", low=1_356_998_400_000_000, high=1_388_534_400_000_000, step=HOUR, grid=24
    )
    assert config.table.dimensions[1] == Real(
        name="longitude", low=-74.3, high=-73.7, step=0.001, grid=10, missing="point"
    )
    assert config.table.dimensions[2] == Category(name="vendor", codes=("CMT", "VTS"))
    assert config.table.dimensions[3] == Budget(name="epsilon", most=4.0)
    assert config.columns == ("pickup", "longitude", "vendor", "budget")
    assert config.record_id == Field("ride_id", "string")
    assert config.folder == Path("/somewhere/rides.table")
    assert config.records == "/somewhere/rides-*.parquet"
    assert config.account.path == "/somewhere/rides.account.db"
    quotas = config.rules.quotas
    assert quotas.of("epsilon", "alice") == 3_000_000 and quotas.of("epsilon", "bob") == 2_000_000
    assert quotas.of("rho", "alice") is None
    assert config.rules.unlock is not None and config.rules.unlock.start == START
    assert config.rules.usable(START + 2 * DAY) == 300_000
    source = config.secret_source()
    assert source.reference == "file:/somewhere/rides.secret"


def test_a_small_table(tmp_path: Path) -> None:
    config = config_at(tmp_path)
    assert config.table.dimensions[0] == Integer(name="hour", low=0, high=24, grid=6)
    assert config.table.dimensions[4] == Budget(name="epsilon", most=2.0, step=500_000)
    assert config.table.dimensions[5] == Budget(name="rho", kind="rho", most=1.0)
    assert config.columns[2:] == ("time", "vendor", "budget", None)
    assert config.fixed[4:] == (None, 0.25)
    assert config.secret_source().kind == "insecure_test_secret"


def test_cells_are_counted_in_steps_of_a_power_of_two() -> None:
    part = {"type": "real", "low": 0, "high": 2.0**-4, "step": 2.0**-30, "grid": 3 * 2.0**-30}
    config = config_of(changed("dimension", example()["table"]["rides"]["dimension"] | {"x": part}))
    [x] = [dimension for dimension in config.table.dimensions if dimension.name == "x"]
    assert (x.grid, x.values) == (3, 1 << 26)


def test_places_and_rules_are_no_part_of_the_model() -> None:
    one, tables = config_of(example()), example()
    table = tables["table"]["rides"]
    table |= {"coordinates": "elsewhere", "path": "x.csv", "record_id": "other"}
    del table["quota"], table["unlock"], tables["data_set"]["rides"]["secret"]
    table["dimension"]["pickup"]["column"] = "at"
    tables["table"]["trips"] = tables["table"].pop("rides")
    other = config_of(tables)
    assert other.name == "trips" and one.table.digest == other.table.digest
    table["dimension"]["pickup"]["grid"] = "2d"
    assert config_of(tables).table.digest != one.table.digest
    with pytest.raises(UsageError, match=r"data_set\.rides\.secret: is required"):
        other.secret_source()


def test_the_model_has_the_name_of_the_data_set() -> None:
    tables = example()
    tables["data_set"]["fares"] = tables["data_set"].pop("rides")
    config = config_of(tables)
    assert (config.name, config.table.name, config.account.data_set) == ("rides", "fares", "fares")
    assert config.table.digest != config_of(example()).table.digest


def test_defaults_and_ids() -> None:
    config = config_of(changed("coordinates", None))
    assert config.folder == Path("/somewhere/rides.table")
    assert config_of(changed("record_id", None)).record_id is None
    field = Field("ride", "int")
    assert config_of(changed("record_id", {"column": "ride", "type": "int"})).record_id == field
    assert config_of(changed("regions", 7)).table.cap == 7


def test_tables_by_name() -> None:
    """One table may be meant without a name: the only one whose records have budgets."""
    tables = example()
    tables["table"]["visits"] = {"path": "visits.csv", "unit_column": "user", "data_set": "shop"}
    tables["data_set"]["shop"] = {"unit": {"name": "user"}}
    tables["table"]["rides"]["data_set"] = "rides"
    assert config_of(tables).name == config_of(tables, "rides").name == "rides"
    refusals = {
        "visits": ("table.visits.dimension", "is required"),
        "rode": ("table", "no table 'rode'"),
    }
    for name, (field, rule) in refusals.items():
        with pytest.raises(UsageError, match=rule) as caught:
            config_of(tables, name)
        assert caught.value.field == field
    tables["table"]["wide"] = tables["table"]["rides"]
    with pytest.raises(UsageError, match="several: rides, wide"):
        config_of(tables)
    del tables["table"]["rides"], tables["table"]["wide"]
    with pytest.raises(UsageError, match="is required") as caught:
        config_of(tables)
    assert caught.value.field == "table.NAME.dimension"


def changed(path: str, value: Any, within: tuple[str, ...] = ("table", "rides")) -> dict[str, Any]:
    """The example with one entry put, or removed."""
    tables: Any = example()
    *parents, last = *within, *path.split(".")
    section = tables
    for name in parents:
        section = section.setdefault(name, {})
    if value is None:
        del section[last]
    else:
        section[last] = value
    return tables


@pytest.mark.parametrize(
    ("path", "value", "field", "rule"),
    [
        ("nmae", "x", "nmae", "is not a known key"),
        ("path", None, "path", "is required"),
        ("path", "rides.txt", "path", "is of no known kind"),
        ("path", "gs://rides/a.csv", "path", "is a URL"),
        ("path", "a\0.csv", "path", "NUL"),
        ("coordinates", "", "coordinates", "must not be empty"),
        ("coordinates", "s3://x", "coordinates", "is a URL"),
        ("record_id", {"column": "a", "type": "bytes"}, "record_id.type", "is not one of"),
        ("record_id", {"column": "a", "type": "float"}, "record_id.type", "is not one of"),
        ("regions", 0, "regions", "must be 1 to"),
        ("unit_column", "user", "unit_column", "is not for a table whose records"),
        ("public", True, "public", "is not for a table whose records"),
        ("options", {"a": "b"}, "options", "is not for a table whose records"),
        ("data_set", "other", "data_set", "no data set 'other'"),
        ("dimension.pickup.low", None, "dimension.pickup.low", "is required for type timestamp"),
        ("dimension.pickup.low", 7, "dimension.pickup.low", "must be a text"),
        ("dimension.pickup.low", "yesterday", "dimension.pickup.low", "is not an RFC 3339 time"),
        ("dimension.pickup.step", "0s", "dimension.pickup.step", "must be a microsecond or more"),
        ("dimension.pickup.grid", "90m", "dimension.pickup.grid", "must be a whole number of step"),
        ("dimension.pickup.high", "2012-01-01T00:00:00Z", "dimension.pickup", "coordinates"),
        ("dimension.pickup.type", "text", "dimension.pickup.type", "is not one of the choices"),
        ("dimension.longitude.step", 0, "dimension.longitude.step", "must be above 0"),
        ("dimension.longitude.step", 0.0007, "dimension.longitude.grid", "must be a whole number"),
        ("dimension.longitude.values", ["a"], "dimension.longitude.values", "not for type real"),
        ("dimension.longitude.missing", "drop", "dimension.longitude.missing", "is not one of the"),
        ("dimension.longitude.low", float("nan"), "dimension.longitude.low", "a finite number"),
        ("dimension.vendor.values", ["a", "a"], "dimension.vendor", "must have codes that differ"),
        ("dimension.vendor.values", None, "dimension.vendor.values", "is required for type categ"),
        ("dimension.epsilon.step", 1e-7, "dimension.epsilon.step", "whole number of millionths"),
        ("dimension.epsilon.most", -1.0, "dimension.epsilon", "must be 0 to"),
        ("dimension.epsilon.most", float("inf"), "dimension.epsilon", "must be a finite number"),
        ("dimension.epsilon.missing", "point", "dimension.epsilon.missing", "not for type budget"),
        ("dimension.epsilon.value", 1.0, "dimension.epsilon.value", "and a column too"),
        ("dimension.epsilon.type", "integer", "dimension.epsilon.low", "is required for type int"),
        ("dimension.", {"type": "category", "values": ["a"]}, "dimension", "has no name"),
        ("quota.epsilon", -1.0, "quota.epsilon", "must be 0 to"),
        ("quota.analyst.eve", {"epsilon": -1.0}, "quota.analyst.eve.epsilon", "must be 0 to"),
        ("unlock.share", 2.0, "unlock.share", "must be above 0 and at most 1"),
        ("unlock.start", "soon", "unlock.start", "is not an RFC 3339 time"),
    ],
)
def test_refusals_name_field_and_rule(path: str, value: Any, field: str, rule: str) -> None:
    with pytest.raises(DpstreamError, match=rule) as caught:
        config_of(changed(path, value))
    assert caught.value.field == f"table.rides.{field}"


@pytest.mark.parametrize(
    ("path", "value", "field", "rule"),
    [
        ("account.path", None, "account.path", "is required"),
        ("account.path", "mysql://x", "account.path", "is not a known kind of account"),
        ("account.id", None, "account.id", "is required"),
        ("account.id", "1", "account.id", "is not an account's id"),
        ("account", None, "account", "is required"),
        ("insecure_test_secret", "00" * 32, "secret", "is given twice"),
    ],
)
def test_refusals_of_the_data_set(path: str, value: Any, field: str, rule: str) -> None:
    with pytest.raises(DpstreamError, match=rule) as caught:
        config_of(changed(path, value, ("data_set", "rides")))
    assert caught.value.field == f"data_set.rides.{field}"


def test_a_data_set_with_a_unit_is_for_jobs_and_statements() -> None:
    with pytest.raises(UsageError, match="a budget of its own") as caught:
        config_of(changed("unit", {"name": "user"}, ("data_set", "rides")))
    assert caught.value.field == "table.rides.data_set"
    assert "without a unit" in caught.value.fix


def test_a_fixed_budget_is_one() -> None:
    tables = changed("dimension.epsilon.column", None)
    tables["table"]["rides"]["dimension"]["epsilon"]["value"] = -1.0
    with pytest.raises(UsageError, match="must be 0 to") as caught:
        config_of(tables)
    assert caught.value.field == "table.rides.dimension.epsilon.value"


def test_a_table_without_budgets() -> None:
    with pytest.raises(UsageError, match="must have one initial budget") as caught:
        config_of(changed("dimension.epsilon", None))
    assert caught.value.field == "table.rides.dimension"


def test_files_that_are_none(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot be read"):
        load_config(tmp_path)
    for data, rule in ((b"\xff", "not TOML"), (b"#" * (MAX_FILE_BYTES + 1), "exceeds")):
        (tmp_path / PROJECT_FILE).write_bytes(data)
        with pytest.raises(UsageError, match=rule):
            load_config(tmp_path)


def test_places_of_an_environment_and_of_settings(tmp_path: Path) -> None:
    config_at(tmp_path, more='[env.prod.table.rides]\ncoordinates = "prod"\n')
    assert load_config(tmp_path, environment="prod").folder == tmp_path / "prod"
    config = load_config(tmp_path, "rides", settings=["table.rides.path=more.csv"])
    assert config.records == str(tmp_path / "more.csv")
    with pytest.raises(UsageError, match="is not a place"):
        load_config(tmp_path, settings=["table.rides.dimension.hour.grid=12"])


def test_kinds_of_files() -> None:
    names = {"a.parquet": "parquet", "b.CSV": "csv", "c.csv.gz": "csv", "d.ndjson": "jsonl"}
    assert {name: kind_of(name, "records") for name in names} == names


def test_codes_are_composed() -> None:
    config = config_of(changed("dimension.vendor.values", ["e\u0301"]))
    assert instance(config.table.dimensions[2], Category).codes == ("\u00e9",)

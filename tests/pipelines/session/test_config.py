"""A session table of the project file: what it means, and its account."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from dpstream.accounting.errors import instance
from dpstream.accounting.fields import Field
from dpstream.accounting.regions.space import Budget, Category, Integer, Real, Timestamp
from dpstream.pipelines.project.project import load_project
from dpstream.pipelines.project.text import MAX_FILE_BYTES, parse_toml
from dpstream.pipelines.session import config as module
from dpstream.pipelines.session.account import with_account
from dpstream.pipelines.session.config import Config, config_in, kind_of, load_config
from dpstream.state.ledger.open import PROJECT_FILE, read_history
from tests import accounts, projects
from tests.golden.pinned import check, of_refusals
from tests.golden.refusals import Refused
from tests.pipelines.session.tables import DAY, SMALL_PROJECT, START, config_at
from tests.state.ledger.conformance import charge

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


def test_places_and_rules_are_no_part_of_the_model(refused: Refused) -> None:
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
    refused(other.secret_source)


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
    tables["table"]["wide"] = tables["table"]["rides"]
    none = example()
    none["table"] = {"visits": tables["table"]["visits"]}
    none["data_set"]["shop"] = tables["data_set"]["shop"]
    fixed = changed("dimension.epsilon.column", None)
    fixed["table"]["rides"]["dimension"]["epsilon"]["value"] = -1.0
    shop = ("data_set", "rides")
    calls: dict[str, Callable[[], object]] = {
        **{f"{path} = {value!r}"[:60]: partial(config_of_change, path, value)
           for path, value in REFUSED},
        **{f"data_set: {path} = {value!r}"[:60]: partial(config_of_change, path, value, shop)
           for path, value in REFUSED_OF_DATA_SET},
        "a table without budgets": partial(config_of, tables, "visits"),
        "no table": partial(config_of, tables, "rode"), "several": partial(config_of, tables),
        "none": partial(config_of, none), "a fixed budget": partial(config_of, fixed),
    }  # fmt: skip
    check(Path(__file__).with_name("refusals_config.txt"), of_refusals(calls))


def config_of_change(path: str, value: Any, within: tuple[str, ...] = ("table", "rides")) -> Config:
    return config_of(changed(path, value, within))


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


#: Entries that are put, or removed (``None``), one at a time.
REFUSED: list[tuple[str, Any]] = [
    ("nmae", "x"), ("path", None), ("path", "rides.txt"), ("path", "gs://rides/a.csv"),
    ("path", "a\0.csv"), ("coordinates", ""), ("coordinates", "s3://x"),
    ("record_id", {"column": "a", "type": "bytes"}),
    ("record_id", {"column": "a", "type": "float"}),
    ("regions", 0), ("unit_column", "user"), ("public", True), ("options", {"a": "b"}),
    ("data_set", "other"),
    *((f"dimension.pickup.{name}", value) for name, value in (
        ("low", None), ("low", 7), ("low", "yesterday"), ("step", "0s"), ("grid", "90m"),
        ("high", "2012-01-01T00:00:00Z"), ("type", "text"),
    )),
    *((f"dimension.longitude.{name}", value) for name, value in (
        ("step", 0), ("step", 0.0007), ("values", ["a"]), ("missing", "drop"),
        ("low", float("nan")),
    )),
    ("dimension.vendor.values", ["a", "a"]), ("dimension.vendor.values", None),
    *((f"dimension.epsilon.{name}", value) for name, value in (
        ("step", 1e-7), ("most", -1.0), ("most", float("inf")), ("missing", "point"),
        ("value", 1.0), ("type", "integer"),
    )),
    ("dimension.epsilon", None), ("dimension.", {"type": "category", "values": ["a"]}),
    ("quota.epsilon", -1.0), ("quota.analyst.eve", {"epsilon": -1.0}),
    ("time_column", "pick_up"), ("unlock.share", 2.0), ("unlock.start", "soon"),
]  # fmt: skip
REFUSED_OF_DATA_SET: list[tuple[str, Any]] = [
    ("account.path", None), ("account.path", "mysql://x"), ("account.id", None),
    ("account.id", "1"), ("account", None), ("insecure_test_secret", "00" * 32),
    ("unit", {"name": "user"}),
]  # fmt: skip


def test_files_that_are_none(tmp_path: Path) -> None:
    calls: dict[str, Callable[[], object]] = {"no file": partial(load_config, tmp_path / "none")}
    for name, data in {"no text": b"\xff", "too large": b"#" * (MAX_FILE_BYTES + 1)}.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / PROJECT_FILE).write_bytes(data)
        calls[name] = partial(load_config, tmp_path / name)
    config_at(tmp_path)
    grid = ["table.rides.dimension.hour.grid=12"]
    calls["no place"] = lambda: load_config(tmp_path, settings=grid)
    check(Path(__file__).with_name("refusals_project.txt"), of_refusals(calls))


def test_places_of_an_environment_and_of_settings(tmp_path: Path) -> None:
    config_at(tmp_path, more='[env.prod.table.rides]\ncoordinates = "prod"\n')
    assert load_config(tmp_path, environment="prod").folder == tmp_path / "prod"
    config = load_config(tmp_path, "rides", settings=["table.rides.path=more.csv"])
    assert config.records == str(tmp_path / "more.csv")


def test_kinds_of_files() -> None:
    names = {"a.parquet": "parquet", "b.CSV": "csv", "c.csv.gz": "csv", "d.ndjson": "jsonl"}
    assert {name: kind_of(name, "records") for name in names} == names


def test_codes_are_composed() -> None:
    config = config_of(changed("dimension.vendor.values", ["e\u0301"]))
    assert instance(config.table.dimensions[2], Category).codes == ("\u00e9",)


TEXT = SMALL_PROJECT.format(key="22" * 32, more="")
LINE = 'account = { path = "ledger.db" }'
assert LINE in TEXT


def project(folder: Path, line: str = LINE, text: str = TEXT) -> Path:
    """A project file whose data set has this line of its account."""
    path = folder / PROJECT_FILE
    path.write_text(text.replace(LINE, line))
    return path


def named(path: Path, *settings: str) -> tuple[Config, bool]:
    return with_account(load_project(path, settings=settings), None)


def test_the_id_is_written_into_the_file(tmp_path: Path) -> None:
    path = project(tmp_path, f"{LINE}   # mine")
    config, made = named(path)
    assert made and read_history(config.account).created.unit.name == "record"
    line = f'account = {{ path = "ledger.db", id = "{config.account.id}" }}'
    assert path.read_text() == TEXT.replace(LINE, f"{line}   # mine")
    again, made = named(path)
    assert not made and again == config == load_config(path)


@pytest.mark.parametrize("newline", ["\n", "\r\n"])
def test_a_data_set_without_the_line_gets_it(newline: str, tmp_path: Path) -> None:
    path = project(tmp_path, "# no account yet")
    path.write_bytes(path.read_text().replace("\n", newline).encode())
    config, _ = named(path)
    line = f'account = {{ path = "small.account.db", id = "{config.account.id}" }}'
    text = TEXT.replace(LINE, f"# no account yet\n{line}").replace("\n", newline)
    assert path.read_bytes() == text.encode()
    assert Path(config.account.path) == tmp_path / "small.account.db"
    assert load_config(path) == config


@pytest.mark.parametrize(
    ("line", "new"),
    [
        ('account.path = "ledger.db"  # here', 'account.path = "ledger.db"  # here\naccount.id = '),
        ('[data_set.small.account]\npath = "ledger.db"', 'path = "ledger.db"\nid = '),
        ('account = {path = "ledger.db"}', 'account = { path = "ledger.db", id = '),
    ],
)
def test_every_form_of_the_line(line: str, new: str, tmp_path: Path) -> None:
    path = project(tmp_path, line)
    config, made = named(path)
    assert made and f'{new}"{config.account.id}"' in path.read_text()
    assert load_config(path) == config and named(path) == (config, False)


def test_a_file_that_takes_no_line_says_what_to_add(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refused: Refused
) -> None:
    path = project(tmp_path)
    monkeypatch.setattr("dpstream.pipelines.session.account._with_line", lambda *_: TEXT)
    caught = refused(named, path)
    id_ = accounts.events(tmp_path / "ledger.db")[0].id  # type: ignore[union-attr]
    assert f'account = {{ path = "ledger.db", id = "{id_}" }}' in caught.fix
    assert path.read_text() == TEXT


def test_an_account_of_these_records_is_used(tmp_path: Path) -> None:
    """One that a stopped process left, and one with charges: the path says which."""
    path = project(tmp_path)
    ledger = accounts.of_records(tmp_path / "ledger.db", "small")
    for charges in (0, 1):
        if charges:
            ledger.charge(charge(1, kind="session"))
        config, made = named(project(tmp_path))
        assert made and config.account.id == accounts.ID == load_config(path).account.id
    ledger.close()


def test_an_account_that_is_refused(tmp_path: Path) -> None:
    accounts.create(tmp_path / "shop.db", "small")
    accounts.of_records(tmp_path / "rides.db", "rides").close()
    path, place = project(tmp_path), "data_set.small.account.path"
    (tmp_path / "made").mkdir()
    made = project(tmp_path / "made")
    (tmp_path / "made" / "small.table").mkdir()
    (tmp_path / "made" / "small.table" / "manifest.json").write_text("{}")
    (tmp_path / "no line").mkdir()
    calls: dict[str, Callable[[], object]] = {
        "no id": partial(load_config, path),
        "no account": partial(load_config, project(tmp_path / "no line", "# no account yet")),
        "of a unit": partial(named, path, f"{place}=shop.db"),
        "of another data set": partial(named, path, f"{place}=rides.db"),
        "of a table that has one": partial(named, made),
    }
    text = of_refusals(calls).replace(str(tmp_path), "FOLDER")
    check(Path(__file__).with_name("refusals_account.txt"), text)
    assert path.read_text() == TEXT and not [*tmp_path.rglob("ledger.db")]


def test_an_account_in_another_place(tmp_path: Path) -> None:
    """The id goes into the file, the path stays that of the option."""
    path = project(tmp_path)
    config, _ = named(path, "data_set.small.account.path=other.db")
    assert Path(config.account.path) == tmp_path / "other.db"
    assert f'account = {{ path = "ledger.db", id = "{config.account.id}" }}' in path.read_text()

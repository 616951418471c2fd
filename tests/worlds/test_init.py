"""`dpstream init` describes each form of a day; `dpstream check` then finds all of its records."""

import json
import tomllib
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from dpstream.pipelines.cli.main import cli
from tests.worlds.fixtures import (
    AXES,
    JSON_LINES,
    NAMES,
    ROWS,
    Variant,
    csv_of,
    parquet_of,
    parquet_variants,
    write,
)

ONCE = {
    variant.name: variant
    for variant in [
        *(csv_of(**{axis: value}) for axis, values in AXES.items() for value in values),
        *JSON_LINES,
        *(variant for variant in parquet_variants() if "plain" in variant.name),
    ]
}


def call(*words: str) -> Result:
    return CliRunner().invoke(cli, words)


def flags_of(variant: Variant) -> list[str]:
    """What a person answers: the delimiter is seen in the first line, if that has names."""
    declared = tomllib.loads(variant.table)
    time, csv = declared["time_column"], declared.get("csv", {})
    flags = ["--unit", "user", "--key", "shop", "--time", "at", "--value", "amount"]
    flags += ["--bounds", "-10000", "10000", "--start", "2024-03-01", "--end", "2024-05-01"]
    flags += ["--window", "61d", "--epsilon", "1"]
    for field, value in csv.items():
        is_seen = field == "delimiter" and not {"names", "skip_rows"} & csv.keys()
        if not is_seen:
            flags += ["--csv", f"{field}={','.join(value) if field == 'names' else value}"]
    for flag, field in (("--time-format", "format"), ("--time-unit", "unit"), ("--zone", "zone")):
        flags += [flag, time[field]] if field in time else []
    return flags


@pytest.mark.parametrize("name", ONCE)
def test_what_init_writes_reads_all_records(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    written = call("init", str(write(tmp_path, ONCE[name])), *flags_of(ONCE[name]), "--json")
    assert written.exit_code == 0, written.output
    words = json.loads(written.stdout)["next"].split()
    assert words[:2] == ["dpstream", "check"]
    checked = json.loads(call(*words[1:], "--json").stdout)["operator_only"]
    assert (checked["read"], checked["usable"]) == (len(ROWS), len(ROWS))


@pytest.mark.parametrize("axis", ["time", "signs"])
def test_a_public_sample_says_how_values_are_written(
    axis: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is declared of times, units and signs, and all records are read."""
    rare = ("short year", "full month")  # are asked for
    for number, value in enumerate(value for value in AXES[axis] if value not in rare):
        variant = csv_of(**{axis: value})
        flags, declared = flags_of(variant), tomllib.loads(variant.table)
        for flag in ("--time-format", "--time-unit"):
            if flag in flags:
                del flags[flags.index(flag) : flags.index(flag) + 2]
        signs = {"decimal", "thousands"} & declared.get("csv", {}).keys()
        for sign in signs:
            place = flags.index(f"{sign}={declared['csv'][sign]}")
            del flags[place - 1 : place + 1]
        folder = tmp_path / str(number)
        folder.mkdir()
        monkeypatch.chdir(folder)
        written = call("init", str(write(folder, variant)), *flags, "--public-sample", "--json")
        assert written.exit_code == 0, (variant.name, written.output)
        words = json.loads(written.stdout)["next"].split()
        checked = json.loads(call(*words[1:], "--json").stdout)["operator_only"]
        assert (checked["read"], checked["usable"]) == (len(ROWS), len(ROWS)), variant.name


@pytest.mark.parametrize(
    ("time", "amount", "flag", "values"),
    [
        ("03/04/2024", "1", "--time-format", ("%d/%m/%Y", "%m/%d/%Y")),
        ("2024-03-04", '"1,234"', "--csv", ("decimal=,", "thousands=,")),
    ],
)
def test_a_sample_that_fits_two_forms_is_asked_for(
    time: str,
    amount: str,
    flag: str,
    values: tuple[str, str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Days up to the twelfth may be months, and a comma the sign of decimals or of thousands."""
    monkeypatch.chdir(tmp_path)
    Path("day.csv").write_text(f"user,shop,at,amount\n1,a,{time},{amount}\n")
    flags = [*flags_of(parquet_of()), "--public-sample"]
    refusal = call("init", "day.csv", *flags)
    assert refusal.exit_code == 2 and not Path("dpstream.toml").exists()
    for number, value in enumerate(values):
        assert f"{flag} " in refusal.output and value in refusal.output
        assert call("init", "day.csv", *flags, flag, value, "--job", f"j{number}").exit_code == 0


def test_the_first_line_of_a_file_without_header_is_not_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is a person: it is neither printed nor written."""
    monkeypatch.chdir(tmp_path)
    file = write(tmp_path, csv_of(head="no header", delimiter=";"))
    result = call("init", str(file), *flags_of(parquet_of()))
    assert result.exit_code == 2 and not Path("dpstream.toml").exists()
    assert not any(row.shop in result.output or str(2**63)[:9] in result.output for row in ROWS)
    given = ("--csv", f"names={','.join(NAMES)}", "--csv", "delimiter=;")
    assert call("init", str(file), *flags_of(parquet_of()), *given).exit_code == 0

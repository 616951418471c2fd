"""Generated files: right, repeatable, and in numbers like those of production."""

import hashlib
import json
from pathlib import Path

import pytest

from dpstream.accounting.errors import RunError, UsageError
from dpstream.accounting.tabulation.parameters import Level
from dpstream.dp_transforms.tabulation.domain import domain_of
from dpstream.pipelines.tabulation.generate import PRODUCTION, Size, generate
from tests.pipelines.tabulation.office import Office, office


def digests(made: Office) -> dict[str, str]:
    files = [*made.parameters.iterdir(), *made.data.iterdir()]
    return {path.name: hashlib.blake2b(path.read_bytes()).hexdigest() for path in files}


def test_the_same_seed_gives_the_same_files(made: Office, tmp_path: Path) -> None:
    again = office(tmp_path / "a")
    assert digests(again) == digests(made) and len(digests(made)) == 8
    other = digests(office(tmp_path / "b", Size(persons=300, seed=1)))
    changed = {name for name, digest in digests(made).items() if digest != other[name]}
    assert changed >= {"person-records.txt", "household-records.txt", "GRF-C.txt"}


def test_regions_are_as_many_as_asked_for(made: Office) -> None:
    geography = made.load().files.geography
    assert len(set(geography["tract"].to_pylist())) == 12
    assert len(set(geography["place"].drop_null().to_pylist())) == 6
    assert len(set(geography["aiannh"].drop_null().to_pylist())) == 3
    assert set(geography["state"].to_pylist()) == {"01", "02", "72"}


@pytest.fixture(scope="module")
def production(tmp_path_factory: pytest.TempPathFactory) -> Office:
    """Files of production's shape, of few persons."""
    return office(tmp_path_factory.mktemp("production"), PRODUCTION._replace(persons=100))


def test_numbers_like_those_of_production(production: Office) -> None:
    assert production.faults() == []
    loaded = production.load()
    counted = loaded.files.iterations.to_pylist()
    race = [row for row in counted if not row["ETHNICITY"]]
    assert [sum(r["LEVEL"] == level for r in race) for level in (1, 2)] == [48, 2_914]
    ethnicity = [row for row in counted if row["ETHNICITY"]]
    assert [sum(r["LEVEL"] == level for r in ethnicity) for level in (1, 2)] == [4, 30]
    assert len(loaded.files.codes) == 1_755
    domain = domain_of(loaded.files, loaded.parameters)
    sizes = {level.level.name: len(level.iterations) for level in domain.levels}
    for region in ("usa", "state"):
        assert (sizes[f"level_1_{region}"], sizes[f"level_2_{region}"]) == (52, 2_944)
    for region in ("county", "tract", "place"):
        assert (sizes[f"level_1_{region}"], sizes[f"level_2_{region}"]) == (48, 2_150)
    assert domain.of(Level(1, "AIANNH")) is None and sizes["level_2_aiannh"] == 2_150
    assert {level.stability.groups for level in domain.levels} == {9}
    assert 6_000_000 < sum(level.groups for level in domain.levels) < 7_000_000


def test_small_files_have_every_kind_of_iteration(made: Office) -> None:
    counted = made.load().files.iterations.to_pylist()
    kinds = {(r["LEVEL"], r["ALONE"], r["DETAILED_ONLY"], r["COARSE_ONLY"]) for r in counted}
    for alone in (True, False):
        assert {(2, alone, True, False), (2, alone, False, True), (2, alone, False, False),
                (1, alone, True, False), (1, alone, False, False)} <= kinds  # fmt: skip
    assert {(1, None, False, False), (2, None, True, False)} <= kinds


def test_puerto_rico_alone_and_nothing_of_it(tmp_path: Path) -> None:
    alone = office(tmp_path / "pr", Size(100, ("72",), 3, 2, 0))
    assert alone.faults() == []
    config = json.loads((alone.parameters / "config.json").read_text())
    assert (config["run_us"], config["run_pr"], config["state_filter_us"]) == (False, True, [])
    nothing = office(tmp_path / "us", Size(100, ("04", "01"), 3, 2, 1))
    assert nothing.faults() == [] and not nothing.load().parameters.run_pr


@pytest.mark.parametrize(
    ("size", "field"),
    [
        (Size(persons=0), "--persons"),
        (Size(states=()), "--states"),
        (Size(states=("01", "1")), "--states: has '1', .* choose from 01, 02, "),
        (Size(states=("01", "01")), "--states"),
        (Size(tracts=2), "--tracts"),
        (Size(places=1), "--places"),
        (Size(places=10_000), "--places"),
        (Size(states=("72",), aiannh=1), "--aiannh"),
        (Size(seed=-1), "--seed"),
    ],
)
def test_sizes_that_are_not_possible(tmp_path: Path, size: Size, field: str) -> None:
    with pytest.raises(UsageError, match=field):
        generate(tmp_path / "p", tmp_path / "d", size)
    assert not (tmp_path / "p").exists()


def test_files_that_are_there_are_kept(made: Office, tmp_path: Path) -> None:
    own = Office(tmp_path / "parameters", tmp_path / "data")
    own.parameters.mkdir()
    (own.parameters / "config.json").write_text("mine")
    with pytest.raises(UsageError, match=r"config.json: exists"):
        generate(*own, Size(persons=300))
    assert [path.name for path in own.parameters.iterdir()] == ["config.json"]
    assert not own.data.exists()
    generate(*own, Size(persons=300), overwrite=True)
    assert digests(own) == digests(made)


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RunError, match="cannot be written"):
        generate(tmp_path / "file" / "p", tmp_path / "d", Size(persons=1))

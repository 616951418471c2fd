"""Names of compressed files, which are told apart without reading a file."""

import pytest

from dpstream.pipelines.project.file_kinds import is_packed_name, unpacked_name


@pytest.mark.parametrize("name", ["visits.csv.gz", "visits.csv.ZST", "visits.csv.zip"])
def test_the_name_below_the_compression_says_the_kind(name: str) -> None:
    assert is_packed_name(name) and unpacked_name(name) == "visits.csv"


def test_a_plain_name_stays_as_it_is() -> None:
    assert (
        not is_packed_name("visits.csv") and unpacked_name("a.gz/visits.csv") == "a.gz/visits.csv"
    )

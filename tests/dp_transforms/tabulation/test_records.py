"""A batch of records knows how many it holds."""

from tests.dp_transforms.tabulation.worlds import public_files, records


def test_length_is_the_number_of_records() -> None:
    for count in (0, 5):
        assert len(records(public_files(), count)) == count

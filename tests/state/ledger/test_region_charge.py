"""Boxes in an entry: packed, read again, and whatever else stands there is refused."""

import base64
import zlib

import numpy as np
import pytest

from dpstream.accounting.errors import PolicyError
from dpstream.state.ledger.charges import Charge
from dpstream.state.ledger.events import event_of, text_of
from dpstream.state.ledger.region_charge import RegionCharge, packed, unpacked

RUN = Charge("run", "plan", "unit", 1.0, 0.0, None, 0.0, "session")


@pytest.mark.parametrize("shape", [(1, 1, 2), (3, 8, 2), (4_096, 16, 2), (0, 2, 2)])
def test_there_and_back(shape: tuple[int, ...]) -> None:
    boxes = np.random.default_rng(0).integers(0, 1 << 40, shape)
    unpacked_boxes = unpacked(packed(boxes))
    assert (
        (unpacked_boxes == boxes).all()
        and unpacked_boxes.dtype == np.int64
        and unpacked_boxes.shape == shape
    )
    assert (unpacked(packed(unpacked_boxes[::-1])) == boxes[::-1]).all()  # the order is kept


def test_a_grid_of_thousands_is_short() -> None:
    grid = np.stack(np.meshgrid(np.arange(64), np.arange(64)), -1).reshape(-1, 2)
    assert len(packed(np.stack([grid, grid + 1], axis=2))) < 4_000


def test_an_entry_without_regions_names_none() -> None:
    assert "regions" not in text_of(RUN) and event_of(text_of(RUN)) == RUN


def test_an_entry_with_regions_is_read_again() -> None:
    boxes = np.array([[[0, 5], [2, 3]]])
    region = RegionCharge.of("rho", 7, boxes, boxes[:0], "ann", 42)
    charge = Charge("run", "plan", "unit", 1.0, 0.0, None, 0.0, "session", rho=7e-6, regions=region)
    again = event_of(text_of(charge))
    assert again == charge and isinstance(again, Charge)
    assert isinstance(again.regions, RegionCharge)
    assert again.regions.boxes.tolist() == boxes.tolist() and not len(again.regions.read)


ZEROS = base64.b64encode(zlib.compress(bytes(16))).decode()


@pytest.mark.parametrize(
    "text",
    [
        "", "1x1", "1x1 ", "x " + ZEROS, "1x2 " + ZEROS, "2x1 " + ZEROS, "-1x-1 " + ZEROS,
        "1x1 " + ZEROS[:-3], "1x1 !" + ZEROS, "1x99 " + ZEROS, "99999999999x16 " + ZEROS,
        "0x0 " + ZEROS, "1x1x1 " + ZEROS,
        "1x1 " + base64.b64encode(zlib.compress(bytes(1 << 20))).decode(),
    ],
)  # fmt: skip
def test_what_is_none(text: str) -> None:
    assert unpacked("1x1 " + ZEROS).tolist() == [[[0, 0]]]
    with pytest.raises(PolicyError, match="another form"):
        unpacked(text)


def test_a_program_that_knows_less_refuses_the_entry() -> None:
    text = text_of(Charge("r", "p", "u", 1.0, 0.0, None, 0.0, "session"))
    region = '{"amount":1,"analyst":"a","at":0,"budget":"epsilon","charged":"","reads":"","new":1}'
    with pytest.raises(PolicyError, match="another form"):
        event_of(text[:-1] + f',"regions":{region}}}')

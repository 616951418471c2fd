"""Requests are charged once, in the ledger or beside the output."""

from pathlib import Path

import pytest

from dpstream.accounting.errors import PolicyError
from dpstream.pipelines.tabulation.book import of_another_input, opened
from dpstream.pipelines.tabulation.draft import locked, of_run
from dpstream.state.ledger.charges import Charge
from tests.pipelines.tabulation.executing import charges, ledger_of
from tests.pipelines.tabulation.test_draft import manifest

A, B = "aa" * 16, "bb" * 16


def charge(run_id: str) -> Charge:
    return Charge(run_id, "plan", "person", 1.0, 1e-10, None, 0.0, kind="table", rho=0.01)


@pytest.mark.parametrize("kept", [True, False])
def test_a_request_is_charged_once_and_answered_by_its_receipt(kept: bool, tmp_path: Path) -> None:
    place = ledger_of(tmp_path) if kept else None
    receipt = manifest(run_id=A, request=of_run("first", A))
    with locked(tmp_path / "out") as draft, opened(place, draft, charge) as book:
        assert book.known("first") is None
        assert book.begin("first", A, False) == (A, True)
        for fresh in (False, True):  # one that was cut off goes on
            assert book.begin("first", B, fresh) == (A, False)
        assert book.known("first") == (A, None) and book.known("second") is None
        book.commit(A, receipt.encoded)
        if not kept:
            draft.path.joinpath("manifest.json").write_bytes(receipt.encoded)
        assert book.known("first") == (A, receipt)
        assert book.begin("first", B, False) == (A, False)
        assert book.begin("first", B, True) == (B, True)
        assert book.known("first") == (B, None)
    if kept:
        assert [entry.run_id for entry in charges(tmp_path)] == [A, B]


def test_the_limit_holds(tmp_path: Path) -> None:
    place = ledger_of(tmp_path, epsilon=0.1)
    with locked(tmp_path / "out") as draft, opened(place, draft, charge) as book:
        with pytest.raises(PolicyError, match=r"ledger\.limit"):
            book.begin("first", A, False)
        assert book.known("first") is None


def test_a_draft_of_other_input_says_what_to_do() -> None:
    assert "--fresh" in str(of_another_input())

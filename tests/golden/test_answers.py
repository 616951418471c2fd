"""Every kind of question releases the bytes that it released before, here and on a runner.

The secret and the run ids are fixed; one file a kind holds what is released.  ``REWRITE=1`` writes
the files anew (of this process), so that a change of released bytes is a diff that names its kinds.
"""

import os
from pathlib import Path

import pytest

from tests.golden.pinned import check, of_cases
from tests.golden.questions import KINDS, processor
from tests.runners.engines import without

ANSWERS = Path(__file__).with_name("answers")


@pytest.mark.parametrize("name", KINDS)
def test_in_this_process(name: str, tmp_path: Path) -> None:
    kind, path = KINDS[name], ANSWERS / f"{name}.txt"
    head = f"Written on a processor of digest {processor()}\n\n" if kind.solved else ""
    if head and not os.environ.get("REWRITE") and not path.read_text().startswith(head):
        without(f"The processor that wrote {path.name} is missing: other last bits of figures")
    check(path, head + of_cases(kind.ask(tmp_path, ())))


@pytest.mark.parametrize("name", [name for name, kind in KINDS.items() if kind.runners])
def test_on_the_direct_runner(name: str, tmp_path: Path) -> None:
    cases = KINDS[name].ask(tmp_path, ("--runner", "DirectRunner"))
    assert of_cases(cases) == (ANSWERS / f"{name}.txt").read_text()

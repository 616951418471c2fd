"""Runs with a fixed run id, so that their releases can be compared; on public data alone.

``python -m tests.fixed_runs ARGUMENTS`` is ``dpstream ARGUMENTS`` on the project of this folder.
"""

from pathlib import Path

from dpstream.pipelines.jobs.job import TEST_RUN_IDS
from dpstream.state.ledger.open import PROJECT_FILE

RUN_ID = "22" * 16


def fix_run_id(place: Path, run_id: str = RUN_ID) -> None:
    """All jobs of a project, given by its file or folder, begin with this run id from now on."""
    TEST_RUN_IDS[(place if place.suffix == ".toml" else place / PROJECT_FILE).absolute()] = run_id


if __name__ == "__main__":
    from dpstream.pipelines.cli.main import main

    fix_run_id(Path.cwd())
    main()

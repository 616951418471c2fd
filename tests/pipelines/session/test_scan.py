"""Scans against the same totals in numpy."""

import numpy as np

from dpstream.accounting.sessions.cells import Cells, totalled
from dpstream.pipelines.session.load import init
from dpstream.pipelines.session.scan import Scan
from tests.pipelines.session.tables import at_of, config_at, rides, write


def test_try(tmp_path):
    found = rides(5000)
    write(tmp_path / "rides-1.parquet", found)
    config = config_at(tmp_path)
    loaded = init(config)
    print(loaded)
    space = config.table.space
    at = at_of(found)
    for held in (False, True):
        with Scan(config.folder, config.table, held=held) as scan:
            cells = Cells(space, (0, 1), (np.arange(0, 25, 6), np.array([0, 3, 10, 21])))
            got = scan.totals(space.whole, cells, (2, 1))
            want = totalled(at, space.whole, cells, space, (2, 1))
            for a, b in zip(got, want):
                assert (a == b).all()

"""Standing queries over records that keep arriving, and ranges of arrival that are closed.

A standing query asks the same question again and again, of a window of arrival.  As long as every
point of the window has enough budget the window stays; when its budget is gone it slides on to
the earliest later window that has.  Which one that is follows from the ledger alone, and is
decided in the transaction that charges, so that two programs that run the same standing query
share its windows and never overspend them.

**Ticks.**  Each asking is named by a public tick (the instant at which it is due, for instance): the
same tick asked twice is answered once, the next tick is a new charge.  Windows end at or before
``until``: a window over arrivals to come would pay for records that are not there yet.
"""

from typing import NamedTuple

import numpy as np

from dpstream.accounting.arrays import Int64
from dpstream.accounting.errors import PolicyError, UsageError
from dpstream.accounting.regions.boxes import overlapped, cut, taken
from dpstream.accounting.regions.dimensions import Integer, Timestamp
from dpstream.accounting.sessions.aggregates import Question
from dpstream.pipelines.session.ask import Wish, ask
from dpstream.pipelines.session.desk import Desk
from dpstream.pipelines.session.predicates import Views
from dpstream.pipelines.session.receipt import Answer
from dpstream.pipelines.session.selection import Selection

"""A limit on everything, in one place, each with its reason."""

MICROS_PER_SECOND = 1_000_000

#: A unit id or one key component in bytes; longer ones go to the dead letter.
MAX_KEY_BYTES = 1024
#: Columns of a key: each is a column in every batch and every release.
MAX_KEY_COLUMNS = 8
#: Value streams of one job: each takes a share of the budget and a noise path per key.
MAX_AGGREGATES = 16
#: Public triggers of one window for the tree strategy (levels of the path state = 21).
MAX_TRIGGERS = 1 << 20
#: Triggers of a window whose cells share noise: the bound of its error takes a T x T matrix.
MAX_MIXED_TRIGGERS = 4096
#: Beyond this the dense strategy's committed numbers (19 a trigger) and its decoder, looked at as a
#: whole matrix, cost more than the 4% of error that it saves over ``blt``.
MAX_DENSE_TRIGGERS = 2048
#: Beyond this the mixed rows of the geometric strategy (T / 31 of them) are too many to keep beside
#: each key; Gaussian noise is smaller there for all but the largest epsilons.
MAX_GEOMETRIC_TRIGGERS = 2048
#: Most triggers of a window, by the strategy; others take ``MAX_TRIGGERS``.
MAX_TRIGGERS_OF = {"dense": MAX_DENSE_TRIGGERS, "geometric": MAX_GEOMETRIC_TRIGGERS}
#: Cells whose noise is mixed, and rows of one factor of the mixing: every worker holds the factors
#: and the noise of all components of an open window (about 100 bytes each).
MAX_MIXED_CELLS = 1 << 22
MAX_FACTOR = 8192
#: Mixed cells are integers in units of 2^-MIXED_BITS of the grid: sums of many are read from them.
MIXED_BITS = 16
#: Windows one record may belong to (sliding): each costs one of the C contributions.
MAX_WINDOWS_PER_RECORD = 64
#: A larger epsilon is a typing error: it protects nobody.
MAX_EPSILON = 1_000.0
#: A smaller delta has no share, of a threshold and a group, that is a number.
MIN_DELTA = 1e-300
#: C: admitted (record, window) pairs of a unit; the accounting checks every n up to it.
MAX_CONTRIBUTIONS = 100_000
#: Contributions, and windows of a record, where pairs on published keys are skipped: their numbers
#: share 31 bits (`dp_transforms.skipping`).
MAX_SKIPPING = 1023
MAX_SKIPPING_WINDOWS = 11
#: Distance of the windows of a stream without end in which they are skipped unasked (micros): its
#: clock stops at each of a window's tests until all stages have passed it (up to a second on Flink
#: 1.19), and must not fall further and further behind.
LEAST_SKIPPING_SLIDE = 30 * MICROS_PER_SECOND
#: m: values of one unit in a histogram that bounds are chosen from; each multiplies the noise.
MAX_VALUES_PER_UNIT = 64
#: Noise sd of one node in grid units: the sampler's table has about 27 sd entries.
MAX_SIGMA = 60_000.0
#: C up to which weights are used unasked: computing them is linear in C.
MAX_WEIGHTED = 10_000
#: Noise sd of one node where noise is real (no table); the decoder's range is checked apart.
MAX_REAL_SIGMA = 2.0**40
#: Draws a real-noise prefix may cost beyond floats on average: the share of prefixes whose
#: rounding floats leave open times T (one such prefix is settled in about T times 20 us).
MAX_OPEN_DRAWS = 10.0
#: Sizes of bounds, grids and norms other than 0: their squares, also of many steps, are floats.
LEAST_SIZE, MOST_SIZE = 1e-60, 1e60
#: |value| on the grid: prefix sums times 2^DECODE_BITS must stay far from 2^63.
MAX_GRID_VALUE = 1 << 32
#: Admitted pairs the integer bounds are checked for (decode must not wrap).
MAX_PAIRS = 1 << 22
#: Decoded prefixes are integers in units of 2^-DECODE_BITS of the grid.
DECODE_BITS = 8
#: Rows of an Arrow batch at ingest; 20,000 was measured as the knee.
BATCH_ROWS = 20_000
#: Bytes of a text file without a line break, after which it is read no further: a line of a
#: megabyte is refused already, and whoever reads some rows of a file must come to an end.
MAX_UNBROKEN_BYTES = 1 << 28
#: Rows gathered over all shards before a split, so that pieces do not shrink.
SPLIT_BUFFER_ROWS = 400_000
#: Their bytes, where rows are large: what is gathered is there twice while it is split.
SPLIT_BUFFER_BYTES = 64 << 20
#: Threads of a run in one process: each works on a shard of its own, and holds it in memory.
MAX_THREADS = 64
#: Key shards of a store, and how many there are by default: one for each of the two threads of a
#: run in process.  Each shard takes its own steps, and an empty one costs CPU milliseconds too.
MAX_SHARDS, DEFAULT_SHARDS = 1 << 15, 2
#: Steps (windows x triggers) one bounded job may take.
MAX_STEPS = 10_000_000
#: Numbers of triggers are 32 bits wide: a stream without end has one as well, 68 years after its
#: start with triggers every second.  It must be able to live for a year at least (micros).
MAX_TRIGGER_TIME = (1 << 31) - 2
LEAST_LIFE = 366 * 86_400 * MICROS_PER_SECOND
#: Steps, and rows of their input, that share one commit: each commit waits for the disk, a crash
#: repeats the steps of the last one.
COMMIT_STEPS = 64
COMMIT_ROWS = 250_000
#: Rows of one part of a release: what one worker sorts, and a sink writes, at a time.
RELEASE_ROWS = 1 << 20
#: Rows of a sorted run that are read at once while runs of ``RELEASE_ROWS`` rows are merged.
MERGED_ROWS = 1 << 13
#: Releases, and rows of them, that a sink writes together; files that are open at once; threads
#: that encode large ones and wait for the disk.
SINK_RELEASES = 64
SINK_ROWS = 1_000_000
SINK_FILES = 16
SINK_THREADS = 8
#: How long a client goes on trying to hand a release to a broker or a service that is down.
SINK_SECONDS = 600.0
#: Noise draws that a path holds in memory at once: as many as a processor's second-level cache.
MAX_DRAWS_AT_ONCE = 1 << 17
#: Times a step is begun because another worker was faster; each time that one made progress.
STEP_ATTEMPTS = 100
#: Mutations of one Spanner commit (its own limit): a row counts once for each of its columns.
COMMIT_MUTATIONS = 80_000
#: Bytes of one Spanner commit (its limit is 100 MiB) and of one of its cells (10 MiB).
COMMIT_BYTES = 48 << 20
CELL_BYTES = 4 << 20
#: Characters of one cell of text (Spanner's limit is 2,621,440).
CELL_CHARACTERS = 2_000_000
#: Unit ids kept in a key's own row; that many at a time move to rows of their own.
INLINE_PAIRS = 4_096
#: Keys of one read call.
READ_KEYS = 10_000
#: How long a commit of unknown outcome, or an aborted one, is tried again.
COMMIT_RETRY_SECONDS = 120.0
#: How long a file that another process has locked is waited for.
BUSY_SECONDS = 120.0
#: After this a call to the database counts as lost; at least two fit into the time above.
CALL_SECONDS = 50.0
#: Key and unit states of a process that stay in memory between steps where a store can reload.
CACHED_STATES = 4_000_000
#: Attributes of a workload's domain: beyond a histogram of all cells, only marginals are planned.
MAX_WORKLOAD_ATTRIBUTES = 100
#: Cells of one attribute: a factor's strategy is a matrix of that many rows, solved up to the next.
MAX_ATTRIBUTE_CELLS = 1 << 16
#: Cells of a strategy that is solved as one matrix (512 MiB each, minutes of a core).
MAX_SOLVED_CELLS = 8192
#: Cells of a histogram that is held as one array, as for 64^4.
MAX_HISTOGRAM_CELLS = 1 << 25
#: Products of one workload: all 3-way marginals of 100 attributes are 161,700.
MAX_WORKLOAD_PRODUCTS = 1_000_000
#: Queries of a workload: their summed errors stay in a float's range.
MAX_QUERIES = 10**100
#: Numbers of an explicit query matrix: held in memory, and hashed.
MAX_EXPLICIT_NUMBERS = 1 << 26
#: Bytes of a workload's arrays once unpacked, and of its file where it is text, whose numbers take
#: many times their bytes.
MAX_WORKLOAD_BYTES = (8 * MAX_EXPLICIT_NUMBERS) + (1 << 24)
MAX_WORKLOAD_TEXT_BYTES = 1 << 26
#: |coefficient| of a query: answers must stay far from what floats can add exactly.
MAX_COEFFICIENT = 1e9
#: Pairs of a product and a subset of its attributes, over which residual spaces are summed.
MAX_RESIDUAL_PARTS = 1 << 24
#: Residual spaces of a workload, each of which is named and measured: 2^20 for 20 attributes.
MAX_RESIDUAL_SPACES = 1 << 20
#: Dimensions of a table with record budgets: splitting a box makes up to two pieces for each.
MAX_DIMENSIONS = 16
#: Coordinates of one dimension: volumes of boxes stay in a float's range, edges far from 2^63.
MAX_COORDINATES = 1 << 40
#: Largest number of boxes in one query: each is compared with all regions.
MAX_QUERY_BOXES = 4_096
#: Regions of a table's spent budget; beyond it they are joined at the larger amount.
MAX_REGIONS = 100_000
#: Cells of one batch: a row of the answer each, held in memory with their sums.
MAX_CELLS = 1 << 20
#: Coordinates of an aggregated column: sums of 2^31 records stay far from 2^63.
MAX_SUMMED = 1 << 31
#: Leaves of the trees of all cells of a batch: they and their nodes are held in memory at once.
MAX_LEAVES = 1 << 24
#: Chances of the coins of truncated noise are whole numbers of 2^-COIN_BITS.
COIN_BITS = 32


def has_usable_size(number: float) -> bool:
    """Return whether a bound or a norm is 0 or of a size that can be computed with."""
    return number == 0 or LEAST_SIZE <= abs(number) <= MOST_SIZE

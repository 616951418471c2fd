"""Versions of the rules by which a plan's settings become a mechanism.

A run keeps the rules it was begun with: their number is committed with its calibration
(``accounting.calibration``), so that a plan's hash, and what an old store goes on to publish, do
not move when a later program would choose otherwise.

| rules | what they changed |
| --- | --- |
| 1 | runs from before the number was kept |
| 2 | the default share of weighted selection is the knee; shared windows are refused |
| 3 | a repeat of a key beyond ``per_key_bound`` takes nothing of C; a sum beside a mean of one \
column is made from the mean's sums; a mean is not clipped |
| 4 | pairs on published keys take no selection weight where a plan allows it and does not say; \
keys are remembered over windows |
"""

#: Of runs from before the version was kept, and of runs that begin now.
FIRST_RULES = 1
RULES = 4
#: The first rules by which a bound per key is kept where pairs are admitted, sums are derived and
#: means are not clipped.
REPEATS_FREE = 3
#: The first rules by which plans that do not say skip what is published, where they can; and by
#: which they remember keys over windows.
SKIPS_USUALLY = 4
REMEMBERS = 4

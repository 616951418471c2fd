"""The flow: records -> BOUND -> AGGREGATE -> SELECT -> PERTURB -> RELEASE, columnar."""

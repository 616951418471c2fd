"""The papers' experiments: ``python -m tests.bench.paper table1 | figure10 | table2 | workloads``.

Data is generated (or loaded), every mode runs the product's own pipeline, the paper's two
baselines run as code on the same records, and all are held against the raw histogram.  Truth
and differences are exact, so this is for public or generated data only.
"""

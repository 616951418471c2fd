"""Linear workloads: public attributes, and the queries that are asked of their cells."""

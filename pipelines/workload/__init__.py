"""Linear workloads: files, the plan of one, answers from records and from what was released."""

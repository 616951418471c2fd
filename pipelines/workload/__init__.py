"""Linear workloads: their files, their plans, and answers from records or from a release."""

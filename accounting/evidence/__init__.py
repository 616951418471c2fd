"""What an observer can learn: distinguishability, bounds from trials, the design of an audit."""

"""Evidence about privacy: distinguishability, bounds from trials, the design of an audit."""

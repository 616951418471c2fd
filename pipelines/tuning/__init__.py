"""`dpstream choose`: contribution bounds and bounds of values by a charged mechanism."""

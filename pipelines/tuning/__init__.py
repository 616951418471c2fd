"""`dpstream choose`: contribution bounds and clamps by a charged mechanism."""

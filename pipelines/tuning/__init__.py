"""`dpstream choose`: chooses contribution bounds and bounds of values by a charged mechanism."""

"""`dpstream choose`: C and clamps by a charged mechanism."""

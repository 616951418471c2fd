"""Rivals of the program, each written from its paper, none from the program.

Nothing here imports ``dpstream``: an oracle that shares code with what it judges proves nothing.
Every rival is taken at the best of its public parameters.  ``laws`` has noise, ``totals`` counts
that are given once, ``prefixes`` counts that are given again and again, ``keys`` the selection of
keys at one test, ``arrivals`` at several, ``planner`` tables of a large domain.
"""

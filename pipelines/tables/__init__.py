"""Tables of a data set: what is declared, read and checked of them, for every way to ask."""

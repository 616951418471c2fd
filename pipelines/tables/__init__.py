"""Tables of a data set: declaration, reading and checks, for every kind of question."""

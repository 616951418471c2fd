"""Statistical tests of the whole flow, each of which must also reject a sabotage."""

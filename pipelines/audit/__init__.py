"""`dpstream audit`: the mechanism as a black box."""

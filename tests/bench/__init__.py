"""One file per performance or utility claim: a command, a JSON result, a baseline in one run."""

"""Tables of population groups with adaptive detail: their public mathematics, without a file."""

"""Systems that records come from and releases go to: a room each, with source and sink."""

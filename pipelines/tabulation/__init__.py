"""Census tables of an office's own files: reading, checking, running and reporting them."""

"""Everything that must survive a process: the Store contract, the SQLite store, the account."""

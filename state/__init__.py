"""What must survive a process: the Store contract, the embedded SQLite store, the account."""

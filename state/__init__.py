"""What must survive: the Store contract, the embedded SQLite store, the ledger."""

"""What an operator sees and does: metrics, state, ledger, this machine."""

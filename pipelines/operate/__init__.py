"""Tools for an operator: metrics, state, accounts, and checks of this machine."""

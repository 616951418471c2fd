"""The store in Cloud Spanner."""

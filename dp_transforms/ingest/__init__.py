"""Ingest of records: columns in canonical form, keyed ids, refused rows."""

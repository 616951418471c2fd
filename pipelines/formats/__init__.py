"""Bytes of files and messages: Parquet, CSV, JSON Lines, compression, receipts."""

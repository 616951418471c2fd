-- The tables of an account in Cloud Spanner, as `dpstream account create` makes them.
-- In a database of its own: a store's tables are in schema.sql.

CREATE TABLE LedgerCommits (
  Number INT64 NOT NULL,
  Writer STRING(32) NOT NULL,
  Sealed STRING(MAX) NOT NULL,
) PRIMARY KEY (Number);

CREATE TABLE LedgerEntries (
  Seq INT64 NOT NULL,
  Name STRING(1024),
  Entry STRING(MAX) NOT NULL,
  Digest STRING(32) NOT NULL,
) PRIMARY KEY (Seq);

CREATE UNIQUE NULL_FILTERED INDEX LedgerEntriesByName ON LedgerEntries (Name);

CREATE TABLE LedgerTokens (
  RunId STRING(1024) NOT NULL,
  Token STRING(1024) NOT NULL,
  Previous STRING(1024),
) PRIMARY KEY (RunId, Token);

CREATE TABLE LedgerRequests (
  RunId STRING(1024) NOT NULL,
  Request STRING(1024) NOT NULL,
  Digest STRING(32),
  ViewDigest STRING(32),
  Number INT64 NOT NULL,
) PRIMARY KEY (RunId);

CREATE TABLE LedgerBlobs (
  RunId STRING(1024) NOT NULL,
  Kind STRING(16) NOT NULL,
  Piece INT64 NOT NULL,
  Bytes BYTES(MAX) NOT NULL,
) PRIMARY KEY (RunId, Kind, Piece);

-- The tables of a ledger in Cloud Spanner, as `dpstream ledger init` makes them.
-- In a database of its own: a store's tables are in schema.sql.

CREATE TABLE LedgerCommits (
  Number INT64 NOT NULL,
  Writer STRING(32) NOT NULL,
  Sealed STRING(MAX) NOT NULL,
) PRIMARY KEY (Number);

CREATE TABLE LedgerEntries (
  Seq INT64 NOT NULL,
  DataSet STRING(1024) NOT NULL,
  RunId STRING(1024) NOT NULL,
  Entry STRING(MAX) NOT NULL,
  Digest STRING(32) NOT NULL,
) PRIMARY KEY (Seq);

CREATE UNIQUE INDEX LedgerEntriesByRun ON LedgerEntries (DataSet, RunId);

CREATE TABLE LedgerTokens (
  RunId STRING(1024) NOT NULL,
  Token STRING(1024) NOT NULL,
  Previous STRING(1024),
) PRIMARY KEY (RunId, Token);

CREATE TABLE LedgerAnswers (
  RunId STRING(1024) NOT NULL,
  DataSet STRING(1024) NOT NULL,
  Request STRING(1024) NOT NULL,
  Digest STRING(32),
  Pieces INT64 NOT NULL,
  Number INT64 NOT NULL,
) PRIMARY KEY (RunId);

CREATE TABLE LedgerReceipts (
  RunId STRING(1024) NOT NULL,
  Piece INT64 NOT NULL,
  Bytes BYTES(MAX) NOT NULL,
) PRIMARY KEY (RunId, Piece);

-- The tables of an account in Cloud Spanner, as `dpstream account create` makes them.
-- In a database of its own: a store's tables are in schema.sql.

CREATE TABLE LedgerLog (
  Number INT64 NOT NULL,
  Piece INT64 NOT NULL,
  Writer STRING(32) NOT NULL,
  Changes BYTES(MAX) NOT NULL,
  Digest STRING(32) NOT NULL,
) PRIMARY KEY (Number, Piece);

CREATE TABLE LedgerBlobs (
  Name STRING(32) NOT NULL,
  Piece INT64 NOT NULL,
  Content BYTES(MAX) NOT NULL,
) PRIMARY KEY (Name, Piece);

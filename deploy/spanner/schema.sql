-- Tables of the Spanner store; `dpstream state init` creates them.
-- state/spanner/schema.py says what each is for.

CREATE TABLE Meta (
  Name STRING(64) NOT NULL,
  Value STRING(MAX) NOT NULL,
) PRIMARY KEY (Name);

CREATE TABLE Progress (
  Part INT64 NOT NULL,
  WindowIndex INT64 NOT NULL,
  Reached INT64 NOT NULL,
) PRIMARY KEY (Part, WindowIndex);

CREATE TABLE Steps (
  Part INT64 NOT NULL,
  WindowIndex INT64 NOT NULL,
  Step INT64 NOT NULL,
  Piece INT64 NOT NULL,
  Writer STRING(32) NOT NULL,
  Releases BYTES(MAX),
) PRIMARY KEY (Part, WindowIndex, Step, Piece);

CREATE TABLE Keys (
  Part INT64 NOT NULL,
  WindowIndex INT64 NOT NULL,
  KeyId BYTES(16) NOT NULL,
  Columns BYTES(MAX),
  State BYTES(MAX),
  UnitIds BYTES(MAX),
) PRIMARY KEY (Part, WindowIndex, KeyId);

CREATE TABLE KeyUnits (
  Part INT64 NOT NULL,
  WindowIndex INT64 NOT NULL,
  KeyId BYTES(16) NOT NULL,
  Chunk INT64 NOT NULL,
  UnitIds BYTES(MAX) NOT NULL,
) PRIMARY KEY (Part, WindowIndex, KeyId, Chunk),
  INTERLEAVE IN PARENT Keys ON DELETE CASCADE;

CREATE TABLE KeysByDue (
  Part INT64 NOT NULL,
  WindowIndex INT64 NOT NULL,
  Due INT64 NOT NULL,
  Step INT64 NOT NULL,
  Piece INT64 NOT NULL,
  KeyIds BYTES(MAX) NOT NULL,
) PRIMARY KEY (Part, WindowIndex, Due, Step, Piece);

CREATE TABLE Units (
  Part INT64 NOT NULL,
  UnitId BYTES(16) NOT NULL,
  Records BYTES(MAX) NOT NULL,
) PRIMARY KEY (Part, UnitId);

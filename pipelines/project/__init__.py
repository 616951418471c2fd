"""The project file dpstream.toml: finding, decoding and naming what it describes."""

"""Recordings in place of a stream: read at a speed, or published again."""

"""Questions about tables in memory, and rows of a Beam pipeline as input of a stream.

``one_shot`` answers a question about a DataFrame, without Beam; `rows` and `stream` bring rows,
dicts and DataFrames of a pipeline into a differentially private stream.
"""

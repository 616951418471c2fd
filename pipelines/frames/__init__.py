"""Tables in memory, and rows of a pipeline: what a program of one's own has in its hands.

``one_shot`` answers a question about a DataFrame, without Beam; `rows` and `stream` bring rows,
dicts and DataFrames of a pipeline into a differentially private stream.
"""

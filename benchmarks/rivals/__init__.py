"""Other planners, predicting the published runs that docs/accuracy.md predicts.

Each predictor is a program of its own, which imports the rival as it ships and nothing of this
repository: it reads cases from standard input and writes a prediction for each, one JSON object a
line. `cases.py` says what a case is.
"""

"""Evaluation: quality, task scores, decode speed and outliers of models, and the report page about them.

The package runs models and reads receipts. It imports `engine` and the packages below it, not `cli` or `server`. Start
reading in `report`; `summary` makes the page of `attar report`, and `decode_speed` is `attar bench`.
"""

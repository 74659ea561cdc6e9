"""Rates of one machine and the time of a step by them, which plan, the lab and reports share.

`profile` is the measured rates and their file, `store` keeps that file between commands, `step_time` is the model.
Measuring is not here: it needs torch (`evaluation/planning/machine_rates.py`).
"""

"""Drafters: each guesses the next tokens of a sequence, in one file with its paper. `drafter.py` says what one is.

A drafter changes what a step costs and never a text: every draft is run behind the sequence and kept only if the token
sampled in its place is the same (`sampling/verify.py`). So a drafter may guess by any means. It reads sequences and
samplers and changes neither. An exception in it costs the drafts of that step.
"""

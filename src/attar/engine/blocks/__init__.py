"""Blocks of the KV cache that an engine saves, and fetches from elsewhere.

`moves.py` joins the scheduler's fetches and loans with the threads that copy bytes. `handover.py` takes blocks over
from another replica. `opening.py` makes what they need of an engine's settings.
"""

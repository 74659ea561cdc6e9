"""Blocks of the KV cache that an engine saves, and fetches from elsewhere.

`moves.py` joins the scheduler's fetches and loans with the threads that copy bytes. `opening.py` makes what it needs
of an engine's settings.
"""

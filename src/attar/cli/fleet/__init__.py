"""The command `route`, and options of HTTP that it shares with `serve`.

Imports: as `cli`. Start with `route.py`.
"""

"""The tables of `bench/real.py`, and the programs that measure their cells.

`framework` knows tables, runs and the file of finished runs; `tables` says which tables there are; `texts` cuts texts
into tokens. Each of `divergence`, `beside`, `start`, `exact`, `greedy`, `chat` and `compression` is one measurement: a
program that is run in a process of its own (`python -m reals.divergence`, with `bench` on PYTHONPATH) and prints one
JSON object last, as the programs of `bench/engines` do.
"""

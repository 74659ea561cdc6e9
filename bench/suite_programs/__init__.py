"""Harnesses of other servers' tests, which start attar and do nothing else: `bench/suites.py` runs them."""

"""Parts of `bench/speculation_real.py`."""

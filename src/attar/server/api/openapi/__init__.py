"""The OpenAPI document of a server: `document.py` makes it, with the `rules.py` between fields and `examples.py`."""

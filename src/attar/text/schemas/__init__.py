"""JSON schemas, before a grammar is made of them: `equivalent.py` says the same in fewer keywords."""

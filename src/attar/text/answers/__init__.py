"""A model's answer as events: text, reasoning, and calls of tools, whatever markers the model writes around them.

`events.py` has the events and the protocol of the parsers that make them. Parsers of tool calls are in `text/tools/`.
"""

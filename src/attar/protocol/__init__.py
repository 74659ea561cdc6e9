"""The vocabulary of server and engine: messages, request parameters, constraints, settings of scheduler and engine.

The package knows plain values only. It imports msgspec and the standard library alone. Server and engine meet nowhere
else. Start reading in `messages`, then `request`.
"""

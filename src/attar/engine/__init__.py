"""One process around a model: the step loop, from requests to events.

`engine.py` is the step (plan, launch, commit), `inflight.py` a launched step, `requests/` the intake of requests
and their texts. `loader.py`, `memory_profile.py`, `fitting.py` and `startup.py` load a model and size its KV cache.
`identity.py` says what engines compare.
`main.py` is the process behind a server, `llm.py` the facade in Python, `deployment.py` the arithmetic of `attar plan`.

Imports: `sampling`, `execution`, `scheduling`, `checkpoints`, `plan`, `model` and below; never `server` or
`compression`. Start with `engine.py`.
"""

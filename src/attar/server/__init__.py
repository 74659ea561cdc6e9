"""The HTTP server: OpenAI's, Anthropic's and Ollama's APIs, in front of an engine process.

`http/` has connections and middleware, `admission/` the limits of requests and keys, `api/` routes, schemas and
answers, and `engine_client/` the connection to the engine. `dispatcher.py` hands requests to the engine,
`grammars.py` has constraints proven, `request_handler.py` reads what comes back, and `supervisor.py` starts and
restarts the engine process.

Imports: `protocol`, `text` and the leaf modules; never `engine`, `scheduling`, `execution` or torch. Start with
`serve.py`, then `dispatcher.py` and `request_handler.py`.
"""

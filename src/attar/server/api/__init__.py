"""The routes, and the shapes of requests and answers.

`app.py` assembles routes (`routes.py`, `status.py`) and the OpenAPI document (`openapi.py`). `schemas.py` and
`anthropic_schemas.py` are the request bodies, read by `validation.py`; `openai.py`, `anthropic.py` and `embeddings.py`
write answers, described by `response_types.py`.

Imports: the rest of `server`, `protocol`, `text` and the leaf modules. Start with `routes.py`, then `schemas.py`.
"""

"""The routes, and the shapes of requests and answers.

`app.py` assembles routes (`routes.py`, `status.py`) and the OpenAPI document (`openapi/`). `schemas.py` has the
request bodies, those of `anthropic.py` apart, and `constraints.py` the fields that constrain an answer. `validation.py`
reads them, and `sampling_params.py` checks and converts them. `openai.py` and `anthropic.py` write answers, described
by `response_types/`.

Imports: the rest of `server`, `protocol`, `text` and the leaf modules. Start with `routes.py`, then `schemas.py`.
"""

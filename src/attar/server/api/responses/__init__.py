"""OpenAI's Responses API: `/v1/responses`.

`items.py` has the items of a conversation, and turns them into messages for chat templates. `schemas.py` has the
request's body. `output.py` turns events of an answer into output items and events of a stream, `answer.py` writes both.
`types.py` describes them. `store.py` keeps answers for `previous_response_id`, where the server has a store;
`input_items.py` lists what they answer. `tools.py` has the fields of tools, `custom.py` those whose input is text.

Requests of the engine are made as for the other APIs (`api/routes.py`). Start with `routes.py`.
"""

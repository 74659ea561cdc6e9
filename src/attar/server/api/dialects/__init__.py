"""APIs beside OpenAI's and Anthropic's, as clients of other servers speak them: vLLM's, llama.cpp's (in `llamacpp/`),
Jina's, Ollama's.

Each reads its own bodies and writes its own answers; requests of the engine are made as for the other APIs
(`api/routes.py`). Start with `routes.py`.
"""

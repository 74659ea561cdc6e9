"""`LLM`: a checkpoint that generates text, by an engine in this process.

`llm.py` is what users call. `chats.py` makes prompts of conversations and reads what answers say. `running.py` has the
engine, and the requests of all calls that are under way; `answer.py` is one of these.
"""

"""Text to token ids and back, chat templates, and grammars.

`tokenizer.py` encodes and decodes; `convert.py` and `gguf.py` build tokenizers from older files and from GGUF metadata.
`template.py` renders chat templates in a limited child process (`_render_child.py`); `literal.py` keeps special tokens
out of messages. `grammars.py` compiles grammars, which `grammar_proof.py` proves in such a process first
(`limited_child.py`). `answers/` splits an answer into text, reasoning and calls; `tools/` knows the syntax of calls.
Everything that comes with a model is treated as untrusted.

Imports: the leaf modules, and no torch.
Start with `tokenizer.py`, then `template.py`.
"""

"""Examples of bodies, by the names of their types."""

from __future__ import annotations

from attar.server.api.openapi.rules import Schema

_SAID = [{"role": "user", "content": "Why is the sky blue?"}]
_TOOL: Schema = {"type": "function", "function": {"name": "now", "parameters": {"type": "object", "properties": {}}}}
_CALLED: list[Schema] = [
    {
        "role": "assistant", "content": None,
        "tool_calls": [{"id": "call_1", "type": "function", "function": {"name": "now", "arguments": "{}"}}],
    },
    {"role": "tool", "tool_call_id": "call_1", "content": "12:00"},
]  # fmt: skip
_TOLD: Schema = {"stream": True, "stream_options": {"include_usage": True}, "logprobs": True, "top_logprobs": 2}
EXAMPLES: dict[str, list[Schema]] = {
    "ChatBody": [
        {"messages": _SAID},
        {"messages": _SAID, "temperature": 0.7, "seed": 1, **_TOLD},
        {"messages": [*_SAID, *_CALLED], "tools": [_TOOL]},
    ],
    "CompletionBody": [{"prompt": "Once upon a time"}, {"prompt": ["One", "Two"], "max_tokens": 8, "logprobs": 2}],
    "AnthropicPrompt": [{"messages": _SAID, "system": "Be brief."}],
    "AnthropicBody": [
        {"messages": _SAID, "max_tokens": 64, "system": "Be brief."},
        {"messages": _SAID, "max_tokens": 64, "tools": [{"name": "now", "input_schema": {"type": "object"}}]},
    ],
    "ResponsesBody": [{"input": "Why is the sky blue?"}, {"input": _SAID, "instructions": "Be brief.", "stream": True}],
    "EmbeddingBody": [{"input": ["One text", "another"], "pooling": "last"}],
    "TokenizeBody": [{"prompt": "Once upon a time"}, {"messages": _SAID}],
    "TemplateBody": [{"messages": _SAID}, {"messages": _SAID, "tools": [_TOOL], "add_generation_prompt": False}],
    "DetokenizeBody": [{"tokens": [1, 2, 3]}],
    "InfillBody": [{"input_prefix": "def add(a, b):\n    ", "input_suffix": "\n", "n_predict": 8}],
    "NativeCompletionBody": [
        {"prompt": "Once upon a time", "n_predict": 8},
        {"prompt": ["One", [1, 2, "two"]], "n_predict": 2, "n_probs": 2},
    ],
    "NativeEmbeddingBody": [{"content": "One text"}, {"input": ["One", {"prompt_string": "two"}, [1, "three"]]}],
    "OllamaShowBody": [{}],
    "OllamaChatBody": [{"messages": _SAID}, {"messages": _SAID, "stream": False, "options": {"num_predict": 8}}],
    "OllamaGenerateBody": [{"prompt": "Once upon a time", "raw": True}, {"prompt": "Hello", "stream": False}],
    "OllamaEmbedBody": [{"input": ["One text", "another"]}],
    "OllamaEmbeddingsBody": [{"prompt": "One text"}],
    "RerankBody": [{"query": "a pet", "documents": ["a cat", "a car"], "top_n": 1}],
}

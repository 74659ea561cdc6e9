"""Templates of the families of models, cut to their calls, and a tokenizer that has the markers of all."""

from __future__ import annotations

from typing import Any, NamedTuple

from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend

from attar.text.template import render_chat
from attar.text.tokenizer import Tokenizer

DSML = "\uff5cDSML\uff5c"
SPECIAL = ("<|im_start|>", "<|im_end|>", "<|python_tag|>", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", DSML)
ADDED = ("<tool_call>", "</tool_call>", "<think>", "</think>", "<tool_response>")

_HEAD = """{%- for message in messages %}
{%- if message.role == 'assistant' and message.tool_calls %}
    {{- '<|im_start|>assistant\\n' }}"""
_FOOT = """{{- '<|im_end|>\\n' }}
{%- else %}
    {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""
_TOOLS = "{%- if tools %}{{- '<|im_start|>system\\n' + (tools | tojson) + '<|im_end|>\\n' }}{%- endif %}"
_PYTHON = """{%- for call in message.tool_calls %}
    {{- call.function.name + '(' }}
    {%- for name, value in call.function.arguments | items %}
        {{- name + '=' + (value | tojson) }}{{- ', ' if not loop.last }}
    {%- endfor %}
    {{- ')' }}{{- ', ' if not loop.last }}
{%- endfor %}"""
_NINE = "{%- if call.id | length != 9 %}{{- raise_exception('ids have 9 characters') }}{%- endif %}"

CHATML = _HEAD.replace("and message.tool_calls", "and false") + _FOOT
HERMES = f"""{_TOOLS}{_HEAD}{{{{- message.content }}}}
{{%- for call in message.tool_calls %}}
    {{{{- '\\n' if message.content or not loop.first }}}}
    {{{{- '<tool_call>\\n{{"name": "' + call.function.name + '", "arguments": ' }}}}
    {{{{- (call.function.arguments | tojson) }}}}
    {{{{- '}}\\n</tool_call>' }}}}
{{%- endfor %}}{_FOOT}"""
LLAMA3 = f"""{_TOOLS}{_HEAD}
{{%- if message.tool_calls | length != 1 %}}{{{{- raise_exception('one call') }}}}{{%- endif %}}
{{%- set call = message.tool_calls[0].function %}}
{{{{- '{{"name": "' + call.name + '", "parameters": ' + (call.arguments | tojson) + '}}' }}}}{_FOOT}"""
PYTHONIC = f"{_TOOLS}{_HEAD}{{{{- '[' }}}}{_PYTHON}{{{{- ']' }}}}{_FOOT}"
LIQUID = f"{_TOOLS}{_HEAD}{{{{- '<|tool_call_start|>[' }}}}{_PYTHON}{{{{- ']<|tool_call_end|>' }}}}{_FOOT}"
MISTRAL = f"""{_TOOLS}{_HEAD}{{{{- '[TOOL_CALLS] [' }}}}
{{%- for call in message.tool_calls %}}{_NINE}
    {{{{- (call.function | tojson)[:-1] + ', "id": "' + call.id + '"}}' }}}}{{{{- ', ' if not loop.last }}}}
{{%- endfor %}}
{{{{- ']' }}}}{_FOOT}"""
MISTRAL_ARGS = f"""{_TOOLS}{_HEAD}
{{%- for call in message.tool_calls %}}
    {{{{- '[TOOL_CALLS]' + call.function.name + '[ARGS]' + (call.function.arguments | tojson) }}}}
{{%- endfor %}}{_FOOT}"""
MISTRAL_IDS = MISTRAL_ARGS.replace("name + '[ARGS]'", "name + '[CALL_ID]' + call.id + '[ARGS]'")
AS_TEXT = HERMES.replace("call.function.arguments | tojson", "call.function.arguments")
_PRINTED = "(value if value is string else value | tojson if value is mapping or value is sequence else value | string)"
QWEN3_CODER = f"""{_TOOLS}{_HEAD}{{{{- message.content }}}}
{{%- for call in message.tool_calls %}}
    {{{{- '\\n' if message.content or not loop.first }}}}
    {{{{- '<tool_call>\\n<function=' + call.function.name + '>\\n' }}}}
    {{%- for name, value in call.function.arguments | items %}}
        {{{{- '<parameter=' + name + '>\\n' + {_PRINTED} + '\\n</parameter>\\n' }}}}
    {{%- endfor %}}
    {{{{- '</function>\\n</tool_call>' }}}}
{{%- endfor %}}{_FOOT}"""
GLM = f"""{_TOOLS}{_HEAD}
{{%- for call in message.tool_calls %}}
    {{{{- '<tool_call>' + call.function.name + '\\n' }}}}
    {{%- for name, value in call.function.arguments | items %}}
        {{{{- '<arg_key>' + name + '</arg_key>\\n<arg_value>' + {_PRINTED} + '</arg_value>\\n' }}}}
    {{%- endfor %}}
    {{{{- '</tool_call>' }}}}
{{%- endfor %}}{_FOOT}"""
DEEPSEEK = f"""{_TOOLS}{_HEAD}{{{{- '<DSMLfunction_calls>\\n' }}}}
{{%- for call in message.tool_calls %}}
    {{{{- '<DSMLinvoke name="' + call.function.name + '">\\n' }}}}
    {{%- for name, value in call.function.arguments | items %}}
        {{{{- '<DSMLparameter name="' + name + '" string="' + ('true' if value is string else 'false') + '">' }}}}
        {{{{- (value if value is string else value | tojson) + '</DSMLparameter>\\n' }}}}
    {{%- endfor %}}
    {{{{- '</DSMLinvoke>\\n' }}}}
{{%- endfor %}}
{{{{- '</DSMLfunction_calls>' }}}}{_FOOT}""".replace("DSML", DSML)
XML = f"{_TOOLS}{_HEAD}<function={{{{ message.tool_calls[0].function.name }}}}>{_FOOT}"


class Family(NamedTuple):
    """A template, and the name of its format."""

    template: str
    format: str
    parallel: bool = True


FAMILIES = {
    "hermes": Family(HERMES, "hermes"),
    "llama3": Family(LLAMA3, "llama3_json", parallel=False),
    "pythonic": Family(PYTHONIC, "pythonic"),
    "liquid": Family(LIQUID, "pythonic"),
    "mistral": Family(MISTRAL, "mistral"),
    "mistral_args": Family(MISTRAL_ARGS, "mistral_args"),
    "mistral_ids": Family(MISTRAL_IDS, "mistral_args"),
    "qwen3_coder": Family(QWEN3_CODER, "xml"),
    "glm": Family(GLM, "xml"),
    "deepseek": Family(DEEPSEEK, "xml"),
    "repr": Family(QWEN3_CODER.replace("value | tojson if", "value | string if"), "generic"),
    "as_text": Family(AS_TEXT, "hermes"),
    "chatml": Family(CHATML, "generic"),
    "xml": Family(XML, "generic"),
}


def with_markers(plain: Tokenizer) -> Tokenizer:
    """Return a tokenizer with the markers of all families: some special, others words."""
    backend = Backend.from_str(plain._backend.to_str())
    backend.add_special_tokens(list(SPECIAL))
    backend.add_tokens([AddedToken(each, normalized=False) for each in ADDED])
    return Tokenizer(backend, plain.bos_token, plain.eos_token, plain.chat_templates)


def answer(template: str, calls: list[dict[str, Any]], content: str = "") -> str:
    """Return what the template renders as an answer with these calls."""
    messages: list[dict[str, Any]] = [{"role": "user", "content": "Hello."}]
    options: dict[str, Any] = {"bos_token": None, "eos_token": None, "tools": [{"type": "function"}]}
    opened = render_chat(template, messages, **options)
    messages.append({"role": "assistant", "content": content, "tool_calls": calls})
    text = render_chat(template, messages, add_generation_prompt=False, **options)
    assert text.startswith(opened)
    return text.removeprefix(opened).removesuffix("<|im_end|>\n")


def call(name: str, arguments: Any, id: str = "a1b2c3d4e") -> dict[str, Any]:
    """Return a call as templates get it."""
    return {"type": "function", "id": id, "function": {"name": name, "arguments": arguments}}

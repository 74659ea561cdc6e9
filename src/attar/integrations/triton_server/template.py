r"""Filling in the `config.pbtxt` templates of TensorRT-LLM's backend, as its own tool does.

A template has `${name}` where a value belongs; what is to stand there is given as `name:value,name:value`. A backslash
keeps what follows from being a separator: `gpu_device_ids:0\,1`. NVIDIA's tool takes such lists apart twice, at commas
and then at colons, and takes one backslash away each time; so does this one, and what it writes, that one reads. It is
more lenient in one thing: a colon behind the first belongs to the value, escaped or not.

Values go in as text, so one with a brace or a quotation mark could become more than a value. The text with all of them
in it is read, and must have the very fields that the template had; where it has not, each is tried alone to say whose
fault that is.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from string import Template

from attar.integrations.triton_server import pbtxt
from attar.integrations.triton_server.config import KV_FRACTION, MICROSECONDS, SPELT
from attar.integrations.triton_server.pbtxt import Message
from attar.protocol.scheduler_config import Limits

USUAL = {"max_queue_size": "0", "max_queue_delay_microseconds": "0"}
"""What NVIDIA's tool fills in where nobody says anything else."""
TEMPLATE = """\
backend: "tensorrtllm"
max_batch_size: ${triton_max_batch_size}
model_transaction_policy {
  decoupled: ${decoupled_mode}
}
dynamic_batching {
  max_queue_delay_microseconds: ${max_queue_delay_microseconds}
  default_queue_policy {
    max_queue_size: ${max_queue_size}
  }
}
"""
"""What an export without a template begins with; parameters follow."""
PARAMETERS = (
    "gpt_model_type", "max_tokens_in_paged_kv_cache", "kv_cache_free_gpu_mem_fraction", "batch_scheduler_policy",
    "enable_chunked_context", "enable_kv_cache_reuse", "max_num_tokens", "gpu_device_ids",
)  # fmt: skip
"""Those that an export sets."""


def parse_values(text: str) -> dict[str, str]:
    """Values by name, of `name:value,...`. Raises ValueError for what has no colon or no name, or a name twice."""
    found: dict[str, str] = {}
    for each in _split(text, ","):
        name, *rest = _split(each, ":")
        if not rest or not name.isidentifier():
            raise ValueError(f"{each[:80]!r} is not NAME:VALUE; a comma within a value is written \\,")
        if name in found:
            raise ValueError(f"{name} is given twice")
        found[name] = ":".join(rest)
    return found


def fill(template: str, values: Mapping[str, str]) -> str:
    """A template with these values in it, and with `USUAL` where it asks for them; other holes stay.

    Raises ValueError for a template that is no text of protobuf, for values that it has no hole for, and for those that
    would change more than the value they stand for.
    """
    holes = set(_holes(template))
    if strange := [name for name in values if name not in holes]:
        raise ValueError(f"the template has no ${{{strange[0]}}}: it has {', '.join(sorted(holes)) or 'none'}")
    shape = list(pbtxt.paths(pbtxt.parse(template)))
    filled = Template(template).safe_substitute({**USUAL, **values})
    if (wrong := _against(filled, shape)) is not None:
        for name, value in values.items():
            if (alone := _against(Template(template).safe_substitute({name: value}), shape)) is not None:
                raise ValueError(f"with {name}:{value[:80]} {alone}")
        raise ValueError(f"with these values together {wrong}")
    return filled


def _against(filled: str, shape: list[str]) -> str | None:
    """What is wrong with a filled template whose fields were these, or None."""
    try:
        same = list(pbtxt.paths(pbtxt.parse(filled))) == shape
    except ValueError as error:
        return f"the template cannot be read: {error}"
    return None if same else "the template has other fields than without"


def left(text: str) -> list[str]:
    """Names of the holes that are still in a text, each once."""
    return list(dict.fromkeys(_holes(text)))


def values(limits: Limits, *, tokens: int | None, fraction: float | None, device: str, shared: int) -> dict[str, str]:
    """What a template's holes are filled with to serve as `attar serve` does with these: the way back of `read`.

    tokens, fraction: of --max-tokens-in-cache and --kv-fraction. shared: GPUs that share the model, from `device` on.
    Raises ValueError for a device that is none.
    """
    named = re.fullmatch(r"cpu|cuda(?::([0-9]{1,4}))?", device)
    if named is None:
        raise ValueError(f"attar computes on cpu and cuda, not on {device[:80]}")
    first = int(named[1] or 0)
    return {
        "triton_backend": "tensorrtllm",
        "triton_max_batch_size": str(limits.together),
        "decoupled_mode": "true",
        "max_queue_delay_microseconds": str(
            round(limits.max_delay * MICROSECONDS) if limits.policy == "dynamic" else 0
        ),
        "max_queue_size": str(limits.max_waiting),
        "batching_strategy": "inflight_fused_batching" if limits.policy == "continuous" else "V1",
        "batch_scheduler_policy": "max_utilization" if limits.max_preemptions else "guaranteed_no_evict",
        "max_num_tokens": str(limits.max_step_tokens),
        "max_tokens_in_paged_kv_cache": "" if tokens is None else str(tokens),
        "cross_kv_cache_fraction": "",  # of models with an encoder
        "kv_cache_free_gpu_mem_fraction": f"{KV_FRACTION if fraction is None else fraction:.10g}",
        "enable_chunked_context": "true",
        "enable_kv_cache_reuse": "true",
        "exclude_input_in_output": "true",
        "max_beam_width": "1",
        "gpu_device_ids": ",".join(str(first + at) for at in range(shared)) if device != "cpu" else "",
    }


def export(filled: Mapping[str, str], template: str | None = None) -> str:
    """A configuration with these values: a template's holes filled in as far as they are known, or one of these
    settings alone. Raises ValueError as `fill`, and for a template that has no hole for any of them."""
    text = _template() if template is None else template
    holes = left(text)
    if not (known := {name: filled[name] for name in holes if name in filled}):
        raise ValueError(f"the template has no ${{...}} to fill in: it asks for {', '.join(holes) or 'nothing'}")
    return fill(text, known)


def _template() -> str:
    """Of our own: the settings alone, without the tensors that Triton wants described."""
    back = {key: name for name, key in SPELT.items()}
    written = TEMPLATE
    for key in PARAMETERS:
        value = Message((("string_value", f"${{{back.get(key, key)}}}"),))
        written += pbtxt.write(Message((("parameters", Message((("key", key), ("value", value)))),)))
    return written


def _holes(text: str) -> list[str]:
    found = []
    for match in Template.pattern.finditer(text):
        name = match["named"] or match["braced"]
        if name is not None:
            found.append(name)
    return found


def _split(text: str, mark: str) -> list[str]:
    """Pieces between marks; a backslash is taken away, and what follows it is no mark."""
    pieces, escaped = [""], False
    for character in text:
        if escaped or character not in ("\\", mark):
            pieces[-1] += character
            escaped = False
        elif character == mark:
            pieces.append("")
        else:
            escaped = True
    return pieces

r"""Filling of `config.pbtxt` templates of TensorRT-LLM's backend, compatible with NVIDIA's own tool.

A template has `${name}` in the place of a value; the values are given as `name:value,name:value`. A backslash keeps the
next character from being a separator: `gpu_device_ids:0\,1`. NVIDIA's tool splits such lists twice, at commas and then
at colons, and removes one backslash each time. This module does the same, and NVIDIA's tool reads what it writes. It is
more lenient in one point: a colon after the first belongs to the value, escaped or not.

Values go in as text, so one with a brace or a quotation mark could become more than a value. The filled text is
therefore parsed, and must have exactly the fields of the template. Where it has not, each value is tried alone to name
the wrong one.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from string import Template

from attar.errors import UserError
from attar.integrations.triton_server import pbtxt
from attar.integrations.triton_server.config import KV_FRACTION, MICROSECONDS, SPELT
from attar.integrations.triton_server.pbtxt import Message
from attar.protocol.scheduler_config import SchedulerConfig

USUAL = {"max_queue_size": "0", "max_queue_delay_microseconds": "0"}
"""Defaults of NVIDIA's tool."""
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
"""Beginning of an export without a template; parameters follow."""
PARAMETERS = (
    "gpt_model_type", "max_tokens_in_paged_kv_cache", "kv_cache_free_gpu_mem_fraction", "batch_scheduler_policy",
    "enable_chunked_context", "enable_kv_cache_reuse", "max_num_tokens", "gpu_device_ids",
)  # fmt: skip
"""Parameters that an export sets."""


def parse_values(text: str) -> dict[str, str]:
    """Parse `name:value,...` into values by name. Raises ValueError for an item without colon or name, and for a
    repeated name."""
    found: dict[str, str] = {}
    for each in _split(text, ","):
        name, *rest = _split(each, ":")
        if not rest or not name.isidentifier():
            message = f"{each[:80]!r} is not NAME:VALUE; a comma within a value is written \\,"
            raise UserError("option_malformed", message)
        if name in found:
            raise UserError("option_conflict", f"{name} is given twice")
        found[name] = ":".join(rest)
    return found


def fill(template: str, values: Mapping[str, str]) -> str:
    """Fill a template with these values, and with `USUAL` where it asks for them; other holes stay.

    Raises ValueError for a template that is not protobuf text, for values that it has no hole for, and for values that
    would change more than the value they stand for.
    """
    holes = set(_holes(template))
    if strange := [name for name in values if name not in holes]:
        message = f"the template has no ${{{strange[0]}}}: it has {', '.join(sorted(holes)) or 'none'}"
        raise UserError("name_unknown", message)
    shape = list(pbtxt.paths(pbtxt.parse(template)))
    filled = Template(template).safe_substitute({**USUAL, **values})
    if (wrong := _against(filled, shape)) is not None:
        for name, value in values.items():
            if (alone := _against(Template(template).safe_substitute({name: value}), shape)) is not None:
                raise UserError("option_malformed", f"with {name}:{value[:80]} {alone}")
        raise UserError("option_malformed", f"with these values together {wrong}")
    return filled


def _against(filled: str, shape: list[str]) -> str | None:
    """Return the error of a filled template whose fields should have this `shape`, or None."""
    try:
        same = list(pbtxt.paths(pbtxt.parse(filled))) == shape
    except ValueError as error:
        return f"the template cannot be read: {error}"
    return None if same else "the template has other fields than without"


def left(text: str) -> list[str]:
    """Return the names of the holes that are still in a text, each once."""
    return list(dict.fromkeys(_holes(text)))


def values(
    limits: SchedulerConfig, *, tokens: int | None, fraction: float | None, device: str, shared: int
) -> dict[str, str]:
    """Return the values of a template's holes for the settings of `attar serve`: the inverse of `config.read`.

    tokens, fraction: of --max-tokens-in-cache and --kv-fraction. shared: number of GPUs that share the model, from
    `device` on. Raises ValueError for an unknown device.
    """
    named = re.fullmatch(r"cpu|cuda(?::([0-9]{1,4}))?", device)
    if named is None:
        raise UserError("device_unsupported", f"attar computes on cpu and cuda, not on {device[:80]}")
    first = int(named[1] or 0)
    delay = round(limits.max_delay * MICROSECONDS) if limits.policy == "dynamic" else 0
    return {
        "triton_backend": "tensorrtllm",
        "triton_max_batch_size": str(limits.together),
        "decoupled_mode": "true",
        "max_queue_delay_microseconds": str(delay),
        "max_queue_size": str(limits.max_waiting),
        "batching_strategy": "inflight_fused_batching" if limits.policy == "continuous" else "V1",
        "batch_scheduler_policy": "max_utilization" if limits.max_preemptions else "guaranteed_no_evict",
        "max_num_tokens": str(limits.max_step_tokens),
        "max_tokens_in_paged_kv_cache": "" if tokens is None else str(tokens),
        "cross_kv_cache_fraction": "",  # for models with an encoder
        "kv_cache_free_gpu_mem_fraction": f"{KV_FRACTION if fraction is None else fraction:.10g}",
        "enable_chunked_context": "true",
        "enable_kv_cache_reuse": "true",
        "exclude_input_in_output": "true",
        "max_beam_width": "1",
        "gpu_device_ids": ",".join(str(first + at) for at in range(shared)) if device != "cpu" else "",
    }


def export(filled: Mapping[str, str], template: str | None = None) -> str:
    """Return a configuration with these values: a template with the known holes filled in, or the settings alone.

    Raises ValueError as `fill`, and for a template that has no hole for any of them.
    """
    text = _template() if template is None else template
    holes = left(text)
    if not (known := {name: filled[name] for name in holes if name in filled}):
        message = f"the template has no ${{...}} to fill in: it asks for {', '.join(holes) or 'nothing'}"
        raise UserError("file_wrong_kind", message)
    return fill(text, known)


def _template() -> str:
    """Return a template with the settings alone, without the tensors that Triton wants described."""
    back = {key: name for name, key in SPELT.items()}
    written = TEMPLATE
    for key in PARAMETERS:
        value = Message((("string_value", f"${{{back.get(key, key)}}}"),))
        written += pbtxt.write(Message((("parameters", Message((("key", key), ("value", value)))),)))
    return written


def _holes(text: str) -> list[str]:
    found = (match["named"] or match["braced"] for match in Template.pattern.finditer(text))
    return [name for name in found if name is not None]


def _split(text: str, mark: str) -> list[str]:
    """Split at marks. A backslash is removed, and the character after it is no mark."""
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

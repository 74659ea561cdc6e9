"""Conversion between the settings of an NVIDIA Triton Inference Server with TensorRT-LLM's backend and those of
`attar serve`. (The Triton language, in which the GPU kernels of `kernels/triton` are written, only shares the name.)

    max_batch_size                             --max-running; 0, no batching, is 1; a warning where it is not given
    dynamic_batching:
      max_queue_delay_microseconds             --scheduler max-delay, of policy=dynamic
      default_queue_policy: max_queue_size     --scheduler max-waiting: one more is refused, with 429
    model_transaction_policy: decoupled        nothing: every request may ask for a stream
    gpt_model_type, the batching strategy      --scheduler policy: inflight is continuous; V1 dynamic or static
    batch_scheduler_policy                     --scheduler max-preemptions: 0 for guaranteed_no_evict, and if unset
    max_tokens_in_paged_kv_cache               --max-tokens-in-cache
    kv_cache_free_gpu_mem_fraction             --kv-fraction, default 0.9: of both the smaller holds (`plan/fit.py`)
    max_num_tokens                             --scheduler max-step-tokens; usually fixed when an engine is built
    gpu_device_ids                             --device, where it is one
    draft models, lookahead                    --draft and --draft-tokens (`speculation.py`)

Each field has one of four outcomes. It becomes an option. It is what attar does anyhow: a note. It is unknown, or not
supported without harm to the answers: a warning. It would change the answers, as beams, another sampler or an encoder
do: the file is refused, naming the field. Values that a template left open, `"${...}"`, count as unset, as for the
backend.

Defaults and names follow `docs/model_config.md` in triton-inference-server/tensorrtllm_backend, and
`model_config.proto` in triton-inference-server/common.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from attar.errors import UserError, code_of
from attar.integrations.triton_server import pbtxt, speculation
from attar.integrations.triton_server.pbtxt import Message
from attar.protocol.scheduler_config import SchedulerConfig

KV_FRACTION = 0.9  # of the free memory after the model is loaded
CROSS_KV_FRACTION = 0.5  # of that, in models with an encoder
MICROSECONDS = 1e6

SPELT = {
    "batching_strategy": "gpt_model_type",
    "engine_dir": "gpt_model_path",
    "encoder_engine_dir": "encoder_model_path",
}
"""Parameters that templates name differently: the template's name by the backend's."""

FIELDS = frozenset({
    "name", "platform", "backend", "runtime", "version_policy", "max_batch_size", "input", "output", "batch_input",
    "batch_output", "optimization", "dynamic_batching", "sequence_batching", "ensemble_scheduling", "instance_group",
    "default_model_filename", "cc_model_filenames", "metric_tags", "parameters", "model_warmup", "model_operations",
    "model_transaction_policy", "model_repository_agents", "response_cache", "model_metrics",
})  # fmt: skip
"""Fields of a model's configuration. Fields that are not read here have no meaning for a server of one language model.
"""
INSIDE: dict[str, frozenset[str]] = {
    "dynamic_batching": frozenset({
        "preferred_batch_size", "max_queue_delay_microseconds", "preserve_ordering", "priority_levels",
        "default_priority_level", "default_queue_policy", "priority_queue_policy",
    }),
    "dynamic_batching.default_queue_policy": frozenset({
        "timeout_action", "default_timeout_microseconds", "allow_timeout_override", "max_queue_size",
    }),
    "model_transaction_policy": frozenset({"decoupled"}),
    "instance_group": frozenset({
        "name", "kind", "count", "rate_limiter", "gpus", "secondary_devices", "profile", "passive", "host_policy",
    }),
    "response_cache": frozenset({"enable"}),
    "parameters": frozenset({"key", "value"}),
    "parameters.value": frozenset({"string_value"}),
}  # fmt: skip
"""Fields of the messages that are read here, by the message's path."""
INERT = frozenset({
    "FORCE_CPU_ONLY_INPUT_TENSORS", "executor_worker_path", "worker_path", "gpt_model_path",
    "kv_cache_onboard_blocks", "cancellation_check_period_ms", "stats_check_period_ms", "recv_poll_period_ms",
    "iter_stats_max_iterations", "request_stats_max_iterations", "normalize_log_probs", "multi_block_mode",
    "enable_context_fmha_fp32_acc", "cuda_graph_mode", "cuda_graph_cache_size", "speculative_decoding_fast_logits",
    "tokenizer_dir", "tokenizer_type", "participant_ids", "xgrammar_tokenizer_info_path", "lora_prefetch_dir",
    "logits_datatype", "cross_kv_cache_fraction",
})  # fmt: skip
"""Parameters of TensorRT-LLM's internals, which attar does not have or finds out by itself."""
WARNED = {
    "enable_trt_overlap": "was removed from the backend: nothing overlaps two halves of a batch, there or here",
    "kv_cache_host_memory_bytes": "keys and values are not moved to the host: what is evicted is computed again",
    "max_attention_window_size": "attention looks back as far as the model's own configuration says",
    "sink_token_length": "attention looks back as far as the model's own configuration says; sinks and a window are "
    "--kv-eviction sink:SINKS+WINDOW",
    "gpu_weights_percent": "all weights stay in memory",
    **dict.fromkeys((
        "lora_cache_optimal_adapter_size", "lora_cache_max_adapter_size", "lora_cache_gpu_memory_fraction",
        "lora_cache_host_memory_bytes",
    ), "adapters are not cached: --adapter NAME=FOLDER keeps each in memory"),
}  # fmt: skip
HARMLESS = ("0", "1.0", "1")
"""Values of most parameters in `WARNED` that request nothing."""
REFUSED = {
    "encoder_model_path": "models with an encoder are not served",
}  # fmt: skip
READ = frozenset({
    "max_num_sequences", "max_num_tokens", "gpt_model_type", "batch_scheduler_policy", "max_tokens_in_paged_kv_cache",
    "kv_cache_free_gpu_mem_fraction", "max_beam_width", "decoding_mode", "num_nodes", "enable_chunked_context",
    "enable_kv_cache_reuse", "exclude_input_in_output", "gpu_device_ids", "guided_decoding_backend",
})  # fmt: skip
KNOWN = INERT | READ | WARNED.keys() | REFUSED.keys() | speculation.PARAMETERS
SAMPLERS = ("", "auto", "top_k", "top_p", "top_k_top_p")
NUMBER = re.compile(r"(?:[0-9]{1,32}\.?[0-9]{0,32}|\.[0-9]{1,32})(?:[eE][+-]?[0-9]{1,3})?")
INFLIGHT = ("inflight_fused_batching", "inflight_batching")

Option = int | float | str
_FIELD = {"max-tokens-in-cache": "max_cached_tokens"}
_SCHEDULER = frozenset({"policy", "max-step-tokens", "max-waiting", "max-delay", "max-preemptions"})
"""Options that are keys of `--scheduler`."""


@dataclass(frozen=True)
class Imported:
    """Result of reading a configuration for `attar serve`.

    options: by name without leading dashes, in the form of the command line's values. kv: the three fields that divide
    the memory, with their defaults. notes: requests that attar fulfils anyhow. warnings: requests that it does not
    fulfil.
    """

    options: dict[str, Option]
    kv: dict[str, int | float | None]
    notes: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()

    def command(self, model: str = "MODEL") -> str:
        """Return the equivalent command line."""
        spelled = {name: f"{value:.10g}" if isinstance(value, float) else value for name, value in self.options.items()}
        options = (
            f"--scheduler {name}={value}" if name in _SCHEDULER else f"--{name} {value}"
            for name, value in spelled.items()
        )
        return " ".join(["attar serve", model, *options])

    def settings(self) -> dict[str, Any]:
        """Return the options as fields of the engine's settings."""
        return {_FIELD.get(name, name.replace("-", "_")): value for name, value in self.options.items()}

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as JSON-compatible values."""
        told = {"notes": list(self.notes), "warnings": list(self.warnings)}
        return {"options": self.options, "kv": self.kv, "command": self.command(), **told}


def load(path: Path) -> Imported:
    """Read a file. Raises ValueError as `read`, naming the file, and OSError where it cannot be opened."""
    text = pbtxt.load(path)
    try:
        return read(text)
    except ValueError as error:
        raise UserError(code_of(error), f"{path}: {error}") from None


def read(text: str) -> Imported:
    """Read the text of a `config.pbtxt`. Raises ValueError where it does not parse, has an invalid value, or asks for
    behaviour that would change the answers."""
    return _Reading(pbtxt.parse(text)).result()


@dataclass
class _Reading:
    root: Message
    options: dict[str, Option] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)

    def result(self) -> Imported:
        self._refuse()
        parameters = self._parameters()
        self._sequences(parameters)
        self._queue()
        self._policy(parameters)
        kv = self._cache(parameters)
        self._others(parameters)
        return Imported(self.options, kv, tuple(self.notes), tuple(self.warnings))

    def _refuse(self) -> None:
        for name in ("ensemble_scheduling", "sequence_batching"):
            if self.root.all(name):
                message = f"{name}: this is no model of TensorRT-LLM: give the config.pbtxt of tensorrt_llm"
                raise UserError("file_wrong_kind", message)
        for name, known in (("backend", ("tensorrtllm", "python")), ("platform", ())):
            if (value := self.root.text(name)) and value not in known:
                message = f"{name}: {value[:80]!r} is not TensorRT-LLM's backend, the only one that is read"
                raise UserError("file_wrong_kind", message)
        for name in dict.fromkeys(_strange(self.root, "", FIELDS)):
            self.warnings.append(f"{name}: no field of a model's configuration that is known here; left out")

    def _parameters(self) -> dict[str, str]:
        """Return the parameters that are set, by the backend's names."""
        found: dict[str, str] = {}
        for each in self.root.messages("parameters"):
            key = each.text("key")
            if not key:
                raise UserError("file_malformed", "parameters: one has no key")
            name = SPELT.get(key, key)
            if name in found:
                raise UserError("file_malformed", f"parameters: {key[:80]!r} is given twice")
            found[name] = each.message("value").text("string_value").strip()
        return found

    def _sequences(self, parameters: Mapping[str, str]) -> None:
        batch, runtime = self.root.count("max_batch_size", 2**31 - 1), _integer(parameters, "max_num_sequences")
        most = batch if runtime is None else runtime
        if most is None:
            self.warnings.append(
                "max_batch_size: not given, which Triton takes for 0, no batching; the usual number of sequences run "
                "together unless --max-running says how many"
            )
        if most == 0:
            self.notes.append("max_batch_size: 0 means no batching: one sequence at a time")
        if most is not None:
            self.options["max-running"] = max(1, most)
        tokens = _integer(parameters, "max_num_tokens")
        if tokens is not None:
            self.options["max-step-tokens"] = tokens
        elif most is not None and most > (usual := SchedulerConfig().max_step_tokens):
            self.options["max-step-tokens"] = most
            self.notes.append(
                f"max_batch_size: {most} sequences take as many tokens a step, more than the usual {usual}"
            )

    def _queue(self) -> None:
        batching = self.root.message("dynamic_batching")
        policy = batching.message("default_queue_policy")
        if size := policy.count("max_queue_size", 2**32 - 1):
            self.options["max-waiting"] = size
        elif size == 0:
            usual = SchedulerConfig().max_waiting
            self.notes.append(f"max_queue_size: 0 means no limit; attar's queue has one, {usual}")
        if policy.count("default_timeout_microseconds", 2**64 - 1):
            self.warnings.append(
                "default_timeout_microseconds: time in the queue has no limit of its own; --deadline is of the whole"
            )
        for name, reason in (
            ("priority_levels", "a request's `priority` is any number, lower first"),
            ("default_priority_level", "a request's `priority` is any number, lower first"),
            ("priority_queue_policy", "all priorities share one queue"),
            ("preserve_ordering", "each answer goes out as it is made"),
            ("preferred_batch_size", "steps take whatever is there, up to --max-running"),
        ):
            if batching.all(name):
                self.notes.append(f"{name}: {reason}")

    def _policy(self, parameters: Mapping[str, str]) -> None:
        delay = self.root.message("dynamic_batching").count("max_queue_delay_microseconds", 2**63) or 0
        strategy = parameters.get("gpt_model_type", "")
        if strategy and strategy.lower() not in (*INFLIGHT, "v1"):
            message = f"gpt_model_type: {strategy[:80]!r} is neither inflight_fused_batching nor V1"
            raise UserError("name_unknown", message)
        if strategy.lower() == "v1":
            self.options["policy"] = "dynamic" if delay else "static"
            if delay:
                self.options["max-delay"] = delay / MICROSECONDS
        else:
            if strategy:
                self.options["policy"] = "continuous"
            if delay:
                self.notes.append(
                    f"max_queue_delay_microseconds: {delay} delays no request: sequences join a running batch at every "
                    "step"
                )
        scheduler = parameters.get("batch_scheduler_policy", "")
        if scheduler.lower() not in ("", "max_utilization", "guaranteed_no_evict"):
            message = f"batch_scheduler_policy: {scheduler[:80]!r} is neither max_utilization nor guaranteed_no_evict"
            raise UserError("name_unknown", message)
        pauses = scheduler.lower() == "max_utilization"
        self.options["max-preemptions"] = SchedulerConfig().max_preemptions if pauses else 0
        if not scheduler:
            self.notes.append(
                "batch_scheduler_policy: unset it is guaranteed_no_evict: no sequence that has begun is paused; with "
                "--scheduler max-preemptions above 0 more run together, and where blocks run out no token is lost"
            )

    def _cache(self, parameters: Mapping[str, str]) -> dict[str, int | float | None]:
        tokens = _integer(parameters, "max_tokens_in_paged_kv_cache")
        share = _share(parameters, "kv_cache_free_gpu_mem_fraction")
        cross = _share(parameters, "cross_kv_cache_fraction")
        if share == 0:
            message = "kv_cache_free_gpu_mem_fraction: 0 leaves no room for keys and values"
            raise UserError("option_out_of_range", message)
        if cross is not None:
            self.notes.append("cross_kv_cache_fraction: of models with an encoder, which are not served")
        if tokens is not None:
            self.options["max-tokens-in-cache"] = tokens
        self.options["kv-fraction"] = fraction = KV_FRACTION if share is None else share
        return {
            "max_tokens_in_paged_kv_cache": tokens,
            "kv_cache_free_gpu_mem_fraction": fraction,
            "cross_kv_cache_fraction": CROSS_KV_FRACTION if cross is None else cross,
        }

    def _others(self, parameters: Mapping[str, str]) -> None:
        if self.root.message("model_transaction_policy").flag("decoupled") is not None:
            self.notes.append("decoupled: every request may ask for a stream")
        if (beams := _integer(parameters, "max_beam_width")) is not None and beams > 1:
            raise UserError("feature_unsupported", f"max_beam_width: {beams} asks for beam search, which is not built")
        drafts = speculation.Speculation(self.root, parameters)
        self.options.update(drafts.options)
        self.notes += drafts.notes
        self.warnings += drafts.warnings
        if (sampler := parameters.get("decoding_mode", "")) not in (*SAMPLERS, *speculation.MODES):
            message = f"decoding_mode: {sampler[:80]} is not built: tokens are sampled, one at a time"
            raise UserError("feature_unsupported", message)
        if (nodes := _integer(parameters, "num_nodes")) is not None and nodes > 1:
            raise UserError("feature_unsupported", f"num_nodes: {nodes}: a model is served by one machine")
        for name, reason in REFUSED.items():
            if parameters.get(name):
                raise UserError("feature_unsupported", f"{name}: {reason}")
        for name, says in (
            ("enable_chunked_context", "prompts are run in chunks of what a step has room for, to the same bits"),
            ("enable_kv_cache_reuse", "what prompts have in common is computed once, to the same bits"),
        ):
            if _truth(parameters, name) is not None:
                self.notes.append(f"{name}: {says}")
        if parameters.get("guided_decoding_backend"):
            self.notes.append("guided_decoding_backend: llguidance holds answers to the constraint of a request")
        if _truth(parameters, "exclude_input_in_output") is False:
            self.warnings.append("exclude_input_in_output: a prompt is repeated where a request says so, by `echo`")
        for name, value in parameters.items():
            if name == "enable_trt_overlap" or (name in WARNED and value not in ("", *HARMLESS)):
                self.warnings.append(f"{name}: {WARNED[name]}")
            elif name not in KNOWN:
                self.warnings.append(f"parameters: {name[:80]!r} is not known here; left out")
        self._devices(parameters.get("gpu_device_ids", ""))
        self._instances()

    def _devices(self, ids: str) -> None:
        if not ids:
            return
        listed = re.split("[,;]", ids)
        if not all(re.fullmatch("[0-9]{1,4}", each) for each in listed):
            raise UserError("option_malformed", f"gpu_device_ids: {ids[:80]!r} is no list of numbers")
        if len(listed) == 1:
            self.options["device"] = f"cuda:{int(ids)}"
        else:
            self.warnings.append(
                f"gpu_device_ids: {ids[:80]}: how {len(listed)} GPUs share a model is in the engine, not in this file: "
                "give --device cuda with --tp or --pp"
            )

    def _instances(self) -> None:
        groups = self.root.messages("instance_group")
        count = sum(1 if (given := group.count("count", 2**31 - 1)) is None else given for group in groups)
        if any(group.all("gpus") or group.all("secondary_devices") for group in groups):
            self.warnings.append("instance_group: gpus: where a model is computed is --device's to say")
        if count > 1:
            self.warnings.append(
                f"instance_group: {count} instances: one engine takes requests together; on CPUs "
                f"--replicas {count} starts as many"
            )
        if self.root.message("response_cache").flag("enable"):
            self.warnings.append("response_cache: whole answers are not kept")


def _strange(message: Message, path: str, known: frozenset[str]) -> Iterator[str]:
    """Yield the paths of unknown fields, below `path`."""
    for name, value in message.fields:
        where = f"{path}.{name}" if path else name
        if name not in known:
            yield where[:80]
        elif isinstance(value, Message) and where in INSIDE:
            yield from _strange(value, where, INSIDE[where])


def _truth(parameters: Mapping[str, str], name: str) -> bool | None:
    """Return the truth value of a parameter, which is a string; None where it is unset. Raises ValueError for
    others."""
    if not (text := parameters.get(name, "")):
        return None
    if text.lower() not in ("true", "false", "1", "0"):
        raise UserError("option_malformed", f"{name}: expected true or false, not {text[:80]!r}")
    return text.lower() in ("true", "1")


def _integer(parameters: Mapping[str, str], name: str) -> int | None:
    """Return the integer of a parameter, at least 1; None where it is unset. Raises ValueError for others."""
    if not (text := parameters.get(name, "")):
        return None
    if not re.fullmatch("[0-9]{1,18}", text) or int(text) < 1:
        raise UserError("option_malformed", f"{name}: expected a number above 0, not {text[:80]!r}")
    return int(text)


def _share(parameters: Mapping[str, str], name: str) -> float | None:
    """Return the fraction of a parameter, from 0 to 1; None where it is unset. Raises ValueError for others."""
    if not (text := parameters.get(name, "")):
        return None
    if not NUMBER.fullmatch(text) or not 0 <= (value := float(text)) <= 1:
        raise UserError("option_malformed", f"{name}: expected a number from 0 to 1, not {text[:80]!r}")
    return value

"""Arguments and options that several commands take, each written once."""

from __future__ import annotations

import datetime
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from attar.cli.commands import flag, option
from attar.cli.terminal import parse_bytes
from attar.errors import UserError
from attar.protocol.image_limits import MAX_PIXELS

FOLDER = "A local folder, a Hub id such as org/name[@revision], or `demo`, the embedded model."
MODEL = FOLDER.replace("folder,", "folder, a GGUF file,")


def parse_size(text: str) -> int:
    """Parse a size as `parse_bytes` does. Raises ValueError also for 0, which does not stand for the default."""
    if not (size := parse_bytes(text)):
        raise UserError("option_out_of_range", f"{text!r} is nothing: leave the option out for its default")
    return size


def parse_time(text: str) -> float:
    """Parse a time such as 90s, 15m or 2h to seconds. Raises ValueError for other text, and for less than 10 seconds
    or more than 30 days."""
    units = {"s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86400.0}
    number = text.rstrip("abcdefghijklmnopqrstuvwxyz")
    unit = text[len(number) :]
    if unit not in units or not number.replace(".", "", 1).isdecimal() or len(number) > 12:
        raise UserError("option_malformed", f"{text[:32]!r} is no time: write it like 90s, 15m or 2h")
    seconds = float(number) * units[unit]
    if not 10 <= seconds <= 30 * 86400:
        raise UserError("option_out_of_range", f"{text}: a time is 10 s to 30 days")
    return seconds


def parse_pixels(text: str) -> tuple[int, int]:
    """Parse a size of images such as 1024x768 to height and width. Raises ValueError for other text, and for more
    pixels than one image may have."""
    wide, _, high = text.partition("x")
    if not (wide.isdecimal() and high.isdecimal() and len(text) <= 12):
        raise UserError("option_malformed", f"{text[:32]!r} is no size of images: write it like 1024x768")
    if not 1 <= int(wide) * int(high) <= MAX_PIXELS:
        raise UserError("option_out_of_range", f"{text}: an image has 1 to {MAX_PIXELS:,} pixels")
    return int(high), int(wide)


SHORT = {"bf16": "bfloat16", "fp16": "float16", "f16": "float16", "fp32": "float32", "f32": "float32"}
"""Usual short names of dtypes."""


def one_of(dtypes: type[StrEnum]) -> Callable[[str], str]:
    """Return a parser of dtypes by their names in PyTorch or their short ones. It raises UserError for others."""

    def parse_dtype(text: str) -> str:
        name = SHORT.get(text, text)
        if name not in dtypes.__members__:
            raise UserError("name_unknown", f"{text[:32]!r} is no dtype here: known are {', '.join(dtypes)}")
        return dtypes[name]

    return parse_dtype


def parse_draft_tokens(text: str) -> int | None:
    """Parse a number of drafts; None for `auto`. Raises ValueError for anything else."""
    if text == "auto":
        return None
    if not text.isdecimal():
        raise UserError("option_malformed", f"draft-tokens is auto or a number, not {text!r}")
    return int(text)


class Dtype(StrEnum):
    """A number format that products are computed in."""

    float32 = "float32"
    bfloat16 = "bfloat16"


class Precision(StrEnum):
    """A precision of activations for weight-only schemes."""

    int8 = "int8"
    int8g128 = "int8g128"
    int8g32 = "int8g32"
    exact = "exact"


Model = Annotated[str, typer.Argument(metavar="MODEL", help=MODEL)]
OptionalModel = Annotated[str | None, typer.Argument(metavar="MODEL", help=MODEL)]
Folder = Annotated[str, typer.Argument(metavar="MODEL", help=FOLDER)]

Json = Annotated[bool, flag("Output", "Print one JSON object as the last line of stdout.", "--json")]
Quiet = Annotated[bool, flag("Output", "Show no progress on stderr.", "--quiet", "-q")]
Overwrite = Annotated[bool, flag("Output", "Replace the output if it exists.", "--overwrite")]
Restart = Annotated[bool, flag("Output", "Discard an interrupted run instead of resuming it.", "--restart")]

MaxShard = Annotated[int | None, option(
    "Output", "SIZE", "Size of an output file at most. OUT.gguf becomes parts: OUT-00001-of-00003.gguf and so on.",
    "--max-shard", parser=parse_size, default="5GB, or one file for OUT.gguf",
)]  # fmt: skip

DEVICE = "cpu, or cuda for an NVIDIA GPU; cuda:1 is the second one."
Device = Annotated[str, option("Device", "DEVICE", DEVICE, "--device")]
ComputeDtype = Annotated[Dtype | None, option(
    "Device", "DTYPE", "Compute in float32 or bfloat16.", "--dtype", parser=one_of(Dtype),
    default="float32 on a CPU, bfloat16 on a GPU",
)]  # fmt: skip
Activations = Annotated[Precision, option(
    "Device", "MODE", "Activation precision for weight-only schemes: exact, int8 (one scale a row), int8g128 or "
    "int8g32 (one scale for 128 or 32 columns).", "--activations",
)]  # fmt: skip
Tp = Annotated[int, option("Device", "N", "Tensor-parallel size; on a CPU, processes.", "--tp", min=1)]
Pp = Annotated[int, option("Device", "N", "Pipeline-parallel size; on a CPU, processes.", "--pp", min=1)]
Threads = Annotated[int | None, option("Device", "N", "CPU threads.", "--threads", min=1, default="one a core")]

Draft = Annotated[str | None, option(
    "Speculation", "DRAFT", "Source of drafts for speculative decoding: suffix copies from prompt and text, lookahead "
    "guesses by the model's own n-grams. Others are the path of a draft head or of a smaller model with the same "
    "tokenizer, or suffix,PATH for both. On a CPU no text changes.", "--draft", default="none",
)]  # fmt: skip
DraftTokens = Annotated[int | None, option(
    "Speculation", "N", "Drafts of a sequence in each step: auto, or 0 to 16.", "--draft-tokens",
    parser=parse_draft_tokens, default="auto, what pays",
)]  # fmt: skip
DraftTree = Annotated[int | None, option(
    "Speculation", "N", "Nodes of a tree of drafts in each step, 2 to 16, by a head of Medusa or EAGLE. So far "
    "chains were faster.", "--draft-tree", default="none, a chain",
)]  # fmt: skip

Kv = Annotated[str | None, option(
    "Cache", "FORMAT", "KV cache format: float32, bfloat16, int8, fp8, kivi4, klt4, nuq4, int4, nuq3, kivi2 or klt2.",
    "--kv", default="as computed",
)]  # fmt: skip


def parse_sparse_attention(text: str) -> str:
    """Check the settings of sparse attention, such as topk:1/16. Raises ValueError for others."""
    from attar.kv.sparse import SparseAttention

    return str(SparseAttention.parse(text))


SparseAttention = Annotated[str | None, option(
    "Cache", "BUDGET", "What answers read of a long context: topk:512, the 512 tokens that matter most, or topk:1/16, "
    "a sixteenth. Prompts read all. CPUs only.", "--sparse-attention", parser=parse_sparse_attention, default="all",
)]  # fmt: skip


def parse_sparse_prefill(text: str) -> str:
    """Check the settings of sparse prefill, such as tri-shape. Raises ValueError for others."""
    from attar.kv.sparse_prefill import SparsePrefill

    return str(SparsePrefill.parse(text))


SparsePrefill = Annotated[str | None, option(
    "Cache", "METHOD", "What prompts read of a long context, but for their last tokens: tri-shape, the first and the "
    "newest tokens, or skip, all but values of small weight. CPUs only.", "--sparse-prefill",
    parser=parse_sparse_prefill, default="all",
)]  # fmt: skip


def parse_kv_eviction(text: str) -> str:
    """Check a policy of KV eviction, such as sink:4+2044. Raises ValueError for others."""
    from attar.kv.eviction import Eviction

    return str(Eviction.parse(text))


KvEviction = Annotated[str | None, option(
    "Cache", "POLICY", "Drop keys of long texts: sink:4+2044 keeps the first 4 tokens and the newest 2,044, and texts "
    "run past the context. snapkv:2048, h2o:2048 and expected:2048 keep so many of a prompt. CPUs only.",
    "--kv-eviction", parser=parse_kv_eviction, default="none are dropped",
)]  # fmt: skip
Memory = Annotated[int | None, option(
    "Cache", "SIZE", "Memory to use, such as 16GB.", "--memory", parser=parse_size, default="90 % of free",
)]  # fmt: skip
MaxTokensInCache = Annotated[int | None, option(
    "Cache", "N", "KV cache size in tokens; with --kv-fraction, its upper limit.", "--max-tokens-in-cache", min=1,
    default="what memory leaves, at most 4 times what concurrent sequences can use",
)]  # fmt: skip
KvFraction = Annotated[float | None, option(
    "Cache", "FRACTION", "Fraction of the memory left after loading the model to use for the KV cache, such as 0.9.",
    "--kv-fraction", min=0, max=1,
)]  # fmt: skip

Adapter = Annotated[Path | None, option("Model", "DIR", "Compute with this LoRA adapter (PEFT folder).", "--adapter")]
NoVerify = Annotated[bool, flag("Model", "Skip the receipt's probe when the model loads.", "--no-verify")]

CALIBRATION_TEXT = "Calibration text (.txt, .jsonl), or `self`: sampled from the model."


def parse_date(text: str) -> datetime.date:
    """Parse a date such as 2026-01-31. Raises ValueError for anything else."""
    try:
        return datetime.date.fromisoformat(text)
    except ValueError:
        raise UserError("option_malformed", f"{text!r} is no date: write it as 2026-01-31") from None


SAMPLED: dict[str, Callable[[str], float]] = {
    "temperature": float, "top_k": int, "top_p": float, "min_p": float, "repetition_penalty": float,
    "presence_penalty": float, "frequency_penalty": float, "seed": int,
}  # fmt: skip
"""Sampling parameters that a server may have defaults of."""


def parse_sampling(given: Sequence[str]) -> dict[str, Any]:
    """Parse NAME=VALUE pairs into sampling parameters. Raises UserError for an unknown name, and for a value that is
    no number or out of range."""
    from attar.protocol.request import SamplingParams

    found: dict[str, Any] = {}
    for pair in given:
        name, equals, value = pair.partition("=")
        if not equals or name not in SAMPLED:
            known = ", ".join(SAMPLED)
            raise UserError("option_malformed", f"--sampling {pair!r} is not NAME=VALUE with one of {known}")
        try:
            found[name] = SAMPLED[name](value)
        except ValueError:
            raise UserError("option_malformed", f"--sampling {name}: {value!r} is no number") from None
    SamplingParams(**found)
    return found


class Defaults(StrEnum):
    """Where sampling parameters come from that are not given."""

    attar = "attar"
    model = "model"


class Role(StrEnum):
    """What a server does: it computes prompts for others, has them computed, or neither."""

    both = "both"
    prefill = "prefill"
    decode = "decode"


class Switch(StrEnum):
    """Whether a model reasons: `auto` leaves it to the model and to requests."""

    auto = "auto"
    on = "on"
    off = "off"


TemplateDate = Annotated[datetime.date | None, option(
    "Model", "DATE", "Date that the chat template prints, such as 2026-01-31.", "--template-date", parser=parse_date,
    default="today",
)]  # fmt: skip
Reasoning = Annotated[Switch, option(
    "Model", "SWITCH", "Let the model reason where a request does not say: auto (its own way), on or off.",
    "--reasoning",
)]  # fmt: skip
GenerationConfig = Annotated[Defaults, option(
    "Model", "SOURCE", "Take sampling parameters that are not given from `attar`, or from `model`: its "
    "generation_config.json.", "--generation-config",
)]  # fmt: skip

Samples = Annotated[int, option("Calibration", "N", "Calibration sequences.", "--samples", min=1)]
Length = Annotated[int, option("Calibration", "N", "Tokens of each calibration sequence.", "--length", min=2)]
Seed = Annotated[int, option("Calibration", "N", "Seed of all random numbers.", "--seed", min=0)]
CalibrationMemory = Annotated[int, option(
    "Calibration", "SIZE", "Memory for calibration activations; the rest stays on disk.", "--calib-memory",
    parser=parse_bytes, default="2GiB",
)]  # fmt: skip
CALIBRATION_MEMORY = 2 << 30

MaxTokens = Annotated[int, option("Prompt", "N", "Tokens to generate at most.", "--max-tokens", min=1)]
TEMPERATURE = "Temperature; 0: take the most probable token."
TOP_P = "Nucleus sampling: smallest set of tokens with cumulative probability P."
SamplingSeed = Annotated[int | None, option("Sampling", "N", "Seed that makes sampling repeatable.", "--seed", min=0)]


@dataclass(frozen=True, kw_only=True)
class OutputConfig:
    """Options of commands that report progress and a result."""

    as_json: Json = False
    quiet: Quiet = False


@dataclass(frozen=True, kw_only=True)
class RunConfig(OutputConfig):
    """Options of commands that load a model and run it in this process."""

    model: Model
    device: Device = "cpu"
    dtype: ComputeDtype = None
    activations: Activations = Precision.int8g128
    adapter: Adapter = None
    draft: Draft = None
    draft_tokens: DraftTokens = None
    draft_tree: DraftTree = None
    sparse_attention: SparseAttention = None
    sparse_prefill: SparsePrefill = None
    kv_eviction: KvEviction = None
    tp: Tp = 1
    pp: Pp = 1
    no_verify: NoVerify = False

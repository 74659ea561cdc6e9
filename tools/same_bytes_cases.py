"""The table of what `same_bytes.py` runs: each case is a list of steps, spelt as `same_bytes_driver.py` reads them.

Steps run in a folder of the case's own, in which `models`, `recipes`, `calib.txt` and `eval.txt` are the inputs. What
they leave there is compared. Where a commit renamed an option, `Spelling(old, new)` holds both spellings of a step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

FAMILIES = (
    "llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3", "phi3", "mixtral", "qwen2moe", "qwen3moe", "gpt2", "opt",
)  # fmt: skip
TEXT = "--calib calib.txt --samples 8 --length 64 --quiet"
SERVED = "--memory 1GB --max-tokens-in-cache 2048 --no-verify"
REAL = {
    "smollm2": "SmolLM2-135M-Instruct-Q4_1.gguf",
    "qwen2.5-coder-0.5b": "Qwen2.5-Coder-0.5B-Instruct-Q4_K_M.gguf",
}
"""Files of trained models, by the case's name behind `real-`."""


@dataclass(frozen=True)
class Spelling:
    """One step as the old commit's command line has it, and as the new one's does."""

    old: str
    new: str


@dataclass(frozen=True)
class Case:
    """A name and the steps to run in turn."""

    name: str
    steps: tuple[str | Spelling, ...]

    def spelt(self, side: str) -> list[str]:
        """Return the steps of the `old` or the `new` side."""
        return [step if isinstance(step, str) else getattr(step, side) for step in self.steps]


def compress(recipe: str, model: str = "models/llama", options: str = TEXT, out: str = "out") -> str:
    """Spell one compression."""
    return f"attar compress {model} {out} --recipe {recipe} {options}"


RECIPES = (
    Case("rtn", (
        compress("rtn-w4g128", "demo", "--quiet"),
        "attar verify out --json --quiet > verify.json", "attar inspect out --json > inspect.json",
        "generate out > text.json",
    )),
    Case("gptq", (
        compress("gptq-w4g128", "demo", f"{TEXT} --eval eval.txt --eval-tokens 512"), "generate out > text.json",
        "attar report out --page page.html --json --quiet > page.json",
    )),
    Case("gptq-facade", ("facade models/qwen2 out",)),
    Case("gptq-options", (compress("recipes/mixed.yaml"), "generate out > text.json")),
    Case("gptq-asym", (compress("gptq-w3g64-asym", "models/phi3"),)),
    Case("gptq-drawn", (Spelling(
            compress("gptq-w4g64", "models/qwen3", f"{TEXT} --drawn 4 --head int4"),
            compress("gptq-w4g64", "models/qwen3", f"{TEXT} --self-samples 4 --head int4"),
        ),
    )),
    Case("gptq-self", (compress("gptq-w4g128", "models/qwen2", "--calib self --samples 4 --length 48 --quiet"),)),
    Case("gptq-experts", (compress("gptq-w4g128", "models/mixtral"), "generate out > text.json")),
    Case("gptq-shared-expert", (compress("gptq-w4g128", "models/qwen2moe"),)),
    Case("qronos", (compress("qronos-w3g64", "models/mistral"),)),
    Case("guided", (compress("guided-w3g64", "models/qwen2"),)),
    Case("awq", (compress("awq-w4g128", "models/gemma2"), "generate out > text.json")),
    Case("awq+gptq", (compress("awq+gptq-w4g64", "models/qwen3"),)),
    Case("clip", (compress("clip+rtn-w3g64", "models/llama"),)),
    Case("hqq", (compress("hqq-w4g64", "models/phi3", "--quiet"),)),
    Case("autoround", (compress("recipes/autoround.yaml"),)),
    Case("smoothquant", (compress("smoothquant+gptq-w8a8", "models/opt"), "generate out > text.json")),
    Case("smoothquant-o3", (compress("smoothquant-w8a8-o3", "models/llama"), "generate out > text.json")),
    Case("rotate", (compress("rotate+gptq-w8a8"),)),
    Case("rotate-keep", (compress("rotate-keep", options="--quiet"),)),
    Case("quarot", (compress("quarot+gptq-w4a4"), "generate out > text.json")),
    Case("spinquant", (compress("recipes/spinquant.yaml"),)),
    Case("qserve", (compress("smoothattention+guided-qserve-g128", "models/llama"), "generate out > text.json")),
    Case("fp8", (compress("rtn-fp8", "models/qwen3", "--quiet"), "generate out > text.json")),
    Case("fp8-e5m2", (compress("gptq-fp8-e5m2", "models/gemma3"),)),
    Case("nf4", (compress("rtn-nf4", "demo", "--quiet"), "generate out > text.json")),
    Case("nvfp4", (compress("gptq-nvfp4"), "generate out > text.json")),
    Case("mxfp4", (compress("rtn-mxfp4", options="--quiet"),)),
    Case("llm-int8", (compress("rtn-llm-int8", "demo", "--quiet"), "generate out > text.json")),
    Case("squeezellm", (compress("squeezellm-lut3-s45"), "generate out > text.json")),
    Case("prune-2:4", (compress("prune-2:4"), "generate out > text.json")),
    Case("prune-2:4-w4", (compress("prune-2:4-w4g128"), "generate out > text.json")),
    Case("sparsegpt", (compress("sparsegpt-s50-w4g128", "models/mistral"),)),
    Case("wanda", (compress("wanda-s50", "models/qwen2"),)),
    Case("structured", (compress("structured-p25"), "generate out > text.json")),
    Case("tune", (compress("gptq+tune-w3g64", "models/llama"),)),
    Case("distill", (compress("recipes/distill.yaml"),)),
    Case("target-bits", (compress("gptq-w4g128", options=f"{TEXT} --target-bits 3.5"),)),
    Case("target-kl", (Spelling(
            compress("rtn-w4g64", options=f"{TEXT} --target-kl 0.2 --ladder w2g64,w4g64,w8"),
            compress("rtn-w4g64", options=f"{TEXT} --target-kl 0.2 --candidates w2g64,w4g64,w8"),
        ),
    )),
    Case("best", (compress("rtn-w4g128,gptq-w4g128"),)),
    Case("ablate", (compress("ablate-awq+gptq-w4g128"),)),
    Case("head", (compress("rtn-w8", options="--quiet --head int8"), "generate out > text.json")),
    Case("shards", (compress("rtn-w4g128", options="--quiet --max-shard 1MB"),)),
)  # fmt: skip

GGUF = (
    Case("gguf-q4_k_m", (
        compress("q4_k_m", "demo", TEXT, "out.gguf"), "attar verify out.gguf --json --quiet > verify.json",
        "generate out.gguf > text.json",
    )),
    Case("gguf-gptq", (compress("gptq-q4_k_m", "models/qwen3", TEXT, "out.gguf"), "generate out.gguf > text.json")),
    Case("gguf-rotated", (compress("rotate+gptq-q4_k_s", "models/llama", TEXT, "out.gguf"),)),
    Case("gguf-target", (compress("q4_k_m", "models/llama", f"{TEXT} --target-bits 5", "out.gguf"),)),
    *(
        Case(f"gguf-{mix}", (compress(mix, "models/llama", "--quiet", "out.gguf"), "generate out.gguf > text.json"))
        for mix in ("q2_k", "q3_k_m", "q5_k_m", "q6_k", "q4_0", "q5_1", "q8_0", "iq4_xs", "iq4_nl", "f16")
    ),
)  # fmt: skip

FILES = (
    Case("convert-gguf", (
        compress("rtn-q4_0", "demo", "--quiet", "first.gguf"),
        "attar convert first.gguf second --to compressed-tensors --quiet",
        "attar convert second third.gguf --to gguf --quiet", "generate second > text.json",
    )),
    Case("convert-folder", (
        compress("rtn-w4g128", options="--quiet"), "attar convert out gptq --to gptq --quiet",
        "attar convert gptq back --to compressed-tensors --quiet", "generate gptq > text.json",
    )),
    Case("convert-awq", (compress("awq-w4g128-asym"), "attar convert out awq --to awq --quiet")),
    Case("convert-dense", ("attar convert demo out.gguf --to gguf --quiet",)),
    Case("imatrix", (
        f"attar imatrix demo weights.gguf {TEXT}", f"attar imatrix demo weights.dat {TEXT}",
        compress("iq4_xs", "demo", f"{TEXT} --imatrix weights.gguf", "out.gguf"),
    )),
    Case("adapter", (
        compress("rtn-nf4", "demo", "--quiet"),
        "attar finetune out adapter --text calib.txt --samples 8 --length 64 --batch 256 --rank 4 --quiet",
        "attar merge demo adapter merged", "generate merged > merged.json",
        "attar generate out --adapter adapter --prompt Once --max-tokens 64 --seed 3 --json -q > text.json",
    )),
    Case("tritonserver", (
        Spelling(
            "attar triton export --preset throughput --json > config.json",
            "attar tritonserver export --preset throughput --json > config.json",
        ),
    )),
    Case("plan", (
        Spelling(
            "attar plan --shape llama-3.1-8b --card h100 --users 8 --json > h100.json",
            "attar plan --shape llama-3.1-8b --gpu h100 --users 8 --json > h100.json",
        ),
        "attar plan demo --memory 2GB --bandwidth 10GB --threads 2 --json > cpu.json",
    )),
)  # fmt: skip

GENERATION = (
    *(
        Case(f"text-{name}", (
            f"generate models/{name} > text.json",
            *(f"serve models/{name} --kv {kv} {SERVED} > {kv}.json" for kv in ("int8", "klt4")),
        ))
        for name in FAMILIES
    ),
    Case("text-demo", (
        "generate demo > text.json", f"serve demo {SERVED} > served.json",
        *(f"serve demo --kv {kv} {SERVED} > {kv}.json" for kv in ("int8", "fp8", "klt4", "klt2", "int4")),
        *(f"serve demo --kv {kv} {SERVED} > {kv}.json" for kv in ("bfloat16", "kivi2", "nuq4")),
    )),
    Case("text-command", ("attar generate demo --prompt Once --max-tokens 64 --seed 3 --json --quiet > text.json",)),
    *(
        Case(f"eval-{kv}", (
            f"attar eval demo --kv {kv} --text eval.txt --context 256 --max-tokens 1024 --greedy 2 -q --json > it.json",
        ))
        for kv in ("klt4", "nuq3")
    ),
)  # fmt: skip


def cases(real: Path | None) -> Sequence[Case]:
    """Return every case; those of trained models where their folder is given."""
    trained = [] if real is None else [
        Case(f"real-{name}", (f"generate {real / file} > text.json",)) for name, file in REAL.items()
    ]  # fmt: skip
    return [*RECIPES, *GGUF, *FILES, *GENERATION, *trained]


BENCHES: dict[str, str | Spelling] = {
    "embedded": "attar bench demo --prompt 64 --gen 400 --json",
    "1B shape": "attar bench --shape llama-3.2-1b --scheme w4g128 --prompt 256 --gen 64 --json",
}
"""How speed is measured, by the model's name."""

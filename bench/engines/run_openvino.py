"""One measurement of OpenVINO GenAI. Runs in OpenVINO's environment; `contract.py` says what it prints.

    .venv-openvino/bin/python bench/engines/run_openvino.py --shape llama-3.2-1b --batch 1 --cache FOLDER
        [--group 128] [--precision f32] [--kernels]

The continuous-batching pipeline is stepped by hand, for one sequence as for sixteen: `LLMPipeline` runs the same paged
attention underneath, and steps can be timed. A step takes as many tokens as all prompts together have, so the first one
is the whole prefill and every later one a decode step of all sequences.

Which setting is best depends on the machine. `--group` is the property DYNAMIC_QUANTIZATION_GROUP_SIZE: how many int8
activations share a scale (32 by default). Where OpenVINO multiplies in bf16, its choice on CPUs with AMX, it quantizes
no activations; `--precision f32` (INFERENCE_PRECISION_HINT) takes it back to int8. `--kernels` names what really ran,
by the precision that comes in: int8 activations are made inside.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import numpy as np
import openvino
import openvino_genai as genai
from contract import SEED, SHAPES, WARM_UP, arguments, peak_mb, report, resident

BLOCK = 32  # tokens of a block of its KV cache on a CPU


def scheduler(tokens: int, sequences: int, prompt: int) -> genai.SchedulerConfig:
    config = genai.SchedulerConfig()
    config.max_num_batched_tokens = max(sequences * prompt, 256)
    config.max_num_seqs = sequences
    config.num_kv_blocks = sequences * (tokens // BLOCK + 2)
    config.enable_prefix_caching = False
    return config


def generate(
    pipe: genai.ContinuousBatchingPipeline, prompts: list[openvino.Tensor], generated: int
) -> tuple[float, float]:
    """Seconds until every sequence has its first token, and of the `generated` - 1 steps after that."""
    options = genai.GenerationConfig(max_new_tokens=generated, ignore_eos=True)
    began = time.perf_counter()
    handles = [pipe.add_request(i, ids, options) for i, ids in enumerate(prompts)]
    pipe.step()
    first = time.perf_counter()
    steps = 1
    while pipe.has_non_finished_requests():
        pipe.step()
        steps += 1
    last = time.perf_counter()
    lengths = [len(handle.read_all()[0].generated_ids) for handle in handles]
    assert steps == generated, "prefill and decode steps were mixed"
    assert lengths == [generated] * len(prompts), "a sequence ended early"
    return first - began, last - first


def kernels(folder: Path, properties: dict[str, Any]) -> str:
    """What multiplies by the weights with many rows and with one. Compiles the model once more, so not while timing."""
    model = openvino.Core().compile_model(folder / "openvino_model.xml", "CPU", properties)
    request, used = model.create_infer_request(), []
    for start, rows in ((0, 64), (64, 1)):
        request.infer(
            {
                "input_ids": np.ones((1, rows), np.int64),
                "attention_mask": np.ones((1, start + rows), np.int64),
                "position_ids": np.arange(start, start + rows)[None],
                "beam_idx": np.zeros(1, np.int32),
            }
        )
        facts = (op.get_rt_info() for op in model.get_runtime_model().get_ops())
        linears = (fact for fact in facts if fact["layerType"].astype(str) == "FullyConnected")
        names = {fact["primitiveType"].astype(str) for fact in linears}
        used.append(f"{rows} at once: {', '.join(sorted(names))}")
    return "; ".join(used)


def main() -> None:
    parser = arguments(__doc__, ("int4",))
    parser.add_argument("--group", type=int, help="activations that share a scale")
    parser.add_argument("--precision", choices=("f32", "bf16"), help="instead of OpenVINO's choice")
    parser.add_argument("--kernels", action="store_true", help="name the kernels in `isa`")
    args = parser.parse_args()
    folder = args.cache / f"{args.shape}-int4"
    baseline = resident()
    began = time.perf_counter()
    properties: dict[str, Any] = {"INFERENCE_NUM_THREADS": args.threads}
    if args.group is not None:
        properties["DYNAMIC_QUANTIZATION_GROUP_SIZE"] = args.group
    if args.precision is not None:
        properties["INFERENCE_PRECISION_HINT"] = args.precision
    config = scheduler(args.prompt + args.gen + 1, args.batch, args.prompt)
    pipe = genai.ContinuousBatchingPipeline(folder, config, "CPU", properties)
    loaded = time.perf_counter()

    rng = np.random.default_rng(SEED)
    draw = lambda n: openvino.Tensor(rng.integers(1, SHAPES[args.shape].vocab, (1, n), dtype=np.int64))  # noqa: E731
    warm_up, _ = generate(pipe, [draw(WARM_UP)], 2)
    prefill, decode = generate(pipe, [draw(args.prompt) for _ in range(args.batch)], args.gen + 1)
    report(
        {
            "prefill_tok_s": args.batch * args.prompt / prefill,
            "decode_tok_s": args.batch * args.gen / decode,
            "load_s": loaded - began,
            "first_token_s": loaded - began + warm_up,
            "peak_rss_mb": peak_mb(baseline),
            "bytes_per_token": (folder / "openvino_model.bin").stat().st_size,
            "version": f"openvino-genai {genai.__version__}",
            "isa": kernels(folder, properties) if args.kernels else None,
        }
    )


if __name__ == "__main__":
    main()

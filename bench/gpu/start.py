"""From the start of a process to its first token: what `attar serve` does before it answers, measured from outside.

A folder of the model's shape with 4-bit weights is written first, random codes, one layer's for all: its pages are
then in the page cache. Two processes load it, one after another, the first with an empty Triton cache, the second with
what the first has left there. Each measures its memory, records its graphs and runs one prompt, as the engine does;
the engine itself and the tokenizer are left out, for the packages that those want are not on every machine.

    python -m gpu.start FOLDER SINCE      is one of these processes; SINCE is when it was begun (`time.time`)
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

Row = dict[str, Any]
PROMPT, CONTEXT = 16, 2048  # tokens


def first_token(name: str) -> Iterator[Row]:
    """Both processes, for a shape. Raises RuntimeError where one fails, with the end of what it said."""
    import torch
    from gpu.timing import DEVICE

    with TemporaryDirectory(prefix="attar-start-") as parent:
        folder = Path(parent) / "model"
        began = time.perf_counter()
        size = write(name, folder)
        if DEVICE == "cuda":
            torch.cuda.empty_cache()
        written = time.perf_counter() - began
        for state in ("empty", "filled") if DEVICE == "cuda" else ("filled",):
            found = begun(folder, Path(parent) / "triton")
            yield {
                "work": f"first token, {state} Triton cache, w4g128", "us": found["token"] * 1e6,
                "seconds": found["token"], "stages": found, "gb": {"model": size / 1e9}, "written_s": written,
            }  # fmt: skip


def begun(folder: Path, cache: Path) -> dict[str, float]:
    """Seconds from the beginning of a process to the end of each of its stages."""
    environment = os.environ | {"TRITON_CACHE_DIR": str(cache), "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, "-m", "gpu.start", str(folder), repr(time.time())]
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if ran.returncode:
        raise RuntimeError(f"a process that loads the model ended with {ran.returncode}: {ran.stderr[-1500:]}")
    found: dict[str, float] = json.loads(ran.stdout.splitlines()[-1])
    return found


def write(name: str, folder: Path) -> int:
    """A model of a shape as a folder, its linears w4g128, the rest bfloat16; returns its bytes."""
    import torch
    from gpu.models import dense, packed

    from attar.checkpoints.layouts import own_format
    from attar.checkpoints.writer import ShardWriter, plan_files, require_free
    from attar.formats.scheme import Part, Scheme
    from attar.model.shapes import SHAPES, shape
    from attar.plan import costs

    config, names = shape(name), shape(name).names
    scheme = Scheme.parse("w4g128").with_scale_dtype("float16")
    linears = {m.name: (m.rows, m.columns) for m in costs.matrices(config) if m.part == "linears"}
    vocabulary = (config.vocab_size, config.hidden)
    tables = [names.embed] if config.tied else [names.embed, names.head]
    plain: dict[str, tuple[int, ...]] = {f"{table}.weight": vocabulary for table in tables}
    layers = [names.layer.format(i=layer) for layer in range(config.layers)]
    norms = [f"{at}.{norm}" for at in layers for norm in (names.attention_norm, names.feed_forward_norm)]
    plain |= {f"{norm}.weight": (config.hidden,) for norm in (*norms, names.final_norm)}
    parts = {tensor: Part("bfloat16", size) for tensor, size in plain.items()}
    for module, size in linears.items():
        for part, wanted in scheme.parts(size).items():
            parts[f"{module}.{own_format.stored_part(part, scheme)}"] = wanted
    plans = plan_files(parts, max_shard_bytes=sys.maxsize)
    total = sum(plan.size for plan in plans)
    require_free(folder, total)
    folder.mkdir()
    quantization = own_format.quantization_config(dict.fromkeys(linears, scheme), [], (), linears)
    settings = dict(SHAPES[name]) | {"torch_dtype": "bfloat16", "quantization_config": quantization}
    (folder / "config.json").write_text(json.dumps(settings), encoding="utf-8")
    made = {size: packed(size, scheme).parts for size in set(linears.values())}
    made = {size: {part: numbers.cpu() for part, numbers in each.items()} for size, each in made.items()}
    table = dense(vocabulary).bfloat16().cpu()
    with ShardWriter(folder, plans) as writer:  # never finished: that would wait for the disk
        for tensor, whole in plain.items():
            writer.write(tensor, table if whole == vocabulary else torch.ones(whole, dtype=torch.bfloat16))
        for module, size in linears.items():
            for part, numbers in made[size].items():
                writer.write(f"{module}.{own_format.stored_part(part, scheme)}", numbers)
    return total


def run(folder: Path, since: float) -> dict[str, float]:
    """Load, measure, record, and run a prompt: seconds since `since` at the end of each."""
    import torch
    from gpu.engine import recorder
    from gpu.timing import DEVICE, HALF

    from attar.checkpoints.sources import hf
    from attar.engine import memory_profile
    from attar.execution.model_runner import Runner
    from attar.kernels import dispatch
    from attar.protocol.request import SamplingParams
    from attar.protocol.scheduler_config import SchedulerConfig
    from attar.sampling import device_sampler
    from attar.sampling.sampler import BadLogits, Sampler
    from attar.scheduling.sequence import Sequence
    from attar.scheduling.step_plan import ScheduledTokens, StepPlan

    ended: dict[str, float] = {}

    def end(stage: str) -> None:
        if DEVICE == "cuda":
            torch.cuda.synchronize()
        ended[stage] = time.time() - since

    store, limits = dispatch.store(device=DEVICE, dtype=HALF), SchedulerConfig()
    memory = memory_profile.GpuMemory(torch.device(DEVICE)) if DEVICE == "cuda" else None
    available = 0 if memory is None else memory.free()
    end("imported")
    decoder = hf.load(folder, HALF, None, store)
    end("loaded")
    if memory is not None:
        trial = memory_profile.ProfileRun(decoder, decoder.lossless, limits, CONTEXT)
        memory_profile.measure(memory, available, trial)
        del trial
        memory.settle()
    end("measured")
    sequences = limits.together if DEVICE == "cuda" else 1
    runner = Runner(decoder, CONTEXT // 64, CONTEXT, None, sequences, None, recorder())
    runner.record_all()
    end("recorded")
    sequence = Sequence(id="first", prompt_ids=range(PROMPT), max_tokens=1)
    sequence.blocks = [0]
    logits = runner.run(StepPlan([ScheduledTokens(sequence, 0, PROMPT, True)]))
    sampler = Sampler(SamplingParams(temperature=0, seed=0), (0,), decoder.config.vocab_size)
    (draw,) = device_sampler.sample(logits, [sampler])
    assert not isinstance(draw, BadLogits)
    end("token")
    return ended


if __name__ == "__main__":
    print(json.dumps(run(Path(sys.argv[1]), float(sys.argv[2]))))

"""llama.cpp's logits of GGUF files against ours, and where the difference between them comes from.

    python bench/llamacpp_logits.py --text HELDOUT [--model demo] [--recipes q8_0 q4_k_m ...] [--tokens N] [--calib F]

Both read the same file and the same token ids. Our float32 forward multiplies float rows by the file's values;
llama.cpp first rounds the rows to 8 bits, in blocks of 32 with an fp16 scale (Q8_0) or of 256 with a float32 one
(Q8_K), as goes with the weight's type, and keeps keys and values in fp16. So every file is looked at in six ways, each
a KL of the second from the first and a share of tokens whose likeliest next token is the same:

* `floats`: ours, and llama.cpp as it comes.
* `as f32`: ours, and llama.cpp on the same values, which its own quantizer wrote as an F32 file, with attention in
  float32: neither rounds anything. A file that either side reads wrongly shows here.
* `rounding`: ours, and ours with every linear's rows rounded as llama.cpp rounds them: what that alone costs.
* `rounded`: ours with rows so rounded, and llama.cpp with attention in float32.
* `one ulp`: ours with rows so rounded, and the same from embeddings whose every number is the next float32. It is how
  far two programs come apart that round alike and add in different orders: the smallest difference tips a code here and
  there by 1 / 127 of its block, and that tips more of them in the next product.
* `itself`: llama.cpp as it comes, and llama.cpp without the kernels for which it lays weights out anew.

`products` is the proof that this does not blur: of all products in the first window, each computed anew from the rows
that llama.cpp's graph holds, the largest |ours - theirs| / |theirs| (Frobenius), with the rows as they are and rounded.

`sure` counts only tokens whose two likeliest differ by more than `--margin` in the first one's logits. Intervals are
95 % bootstraps over windows. llama.cpp is that of `.venv-llamacpp` (`make bench-peers`), on one thread.

Not modelled: Q4_1 and Q5_1 take their blocks' sums rounded to fp16 (Q8_1), whose codes are Q8_0's; files with plain
16-bit matrices, beside which rows are rounded or not as the machine has it.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from attar.checkpoints.gguf import checkpoint as gguf_checkpoint
from attar.checkpoints.gguf.checkpoint import GgufCheckpoint
from attar.checkpoints.sources import hub
from attar.compression.request.request import CompressionRequest
from attar.compression.runs.pipeline import compress_request
from attar.formats.codecs import ggml_blocks
from attar.formats.codecs.ggml import GgmlType
from attar.kernels import ops
from attar.kernels.operands import ActivationHook, Linear
from attar.metrics import bootstrap
from attar.metrics.bootstrap import Interval
from attar.metrics.divergence import compare
from attar.metrics.perplexity import plan_windows
from attar.model.cache import ForwardBatch
from attar.model.decoder import Decoder, soft_capped
from attar.text.files import read_text
from attar.text.tokenizer import Tokenizer

ROOT = Path(__file__).resolve().parents[1]
PYTHON = ROOT / ".venv-llamacpp" / "bin" / "python"
SAMPLES = 16  # of calibration text: what llama.cpp computes of a file does not depend on how good it is
RECIPES = ("f32", "q8_0", "q4_0", "q4_k_m", "q6_k", "iq4_xs")


def rounded(x: Tensor, kind: GgmlType) -> Tensor:
    """Rows x [N, I], float32, as llama.cpp's CPU kernels read them beside weights of a type.

    Raises ValueError for plain 16-bit numbers: what llama.cpp does beside those differs from machine to machine.
    """
    if kind.name == "F32":
        return x
    if kind.elements == 1:
        raise ValueError(f"whether llama.cpp rounds rows beside {kind.name} depends on the machine")
    blocks = x.view(len(x), -1, 256 if kind.elements == 256 else 32)
    largest = blocks.gather(-1, blocks.abs().argmax(-1, keepdim=True))
    most, one = torch.tensor(127.0), torch.tensor(1.0)  # tensors: `127 / x` is 127 times a reciprocal, rounded twice
    if kind.elements == 256:  # Q8_K: the largest number, with its sign, becomes -127
        inverse = -most / largest
        scale = one / inverse
    else:  # Q8_0: codes are by the scale before it is rounded to fp16
        inverse = most / largest.abs()
        scale = (largest.abs() / most).half().float()
    found = (blocks * inverse).round() * scale
    return torch.where(largest == 0, 0, found).view(x.shape)


def rounding_tap(file: GgufCheckpoint) -> ActivationHook:
    """A tap that writes over the rows that a linear is about to read, so that what is multiplied is rounded."""
    last: list[tuple[Tensor, int]] = []

    def hook(linear: Linear, x: Tensor) -> None:
        kind = file.kind_of(linear.name)
        if last and last[0][0] is x:  # the first of the linears that read the same rows has rounded them
            assert last[0][1] == kind.elements, f"{linear.name} shares its rows with a linear of another rounding"
            return
        x.copy_(rounded(x, kind))
        last[:] = [(x, kind.elements)]

    return hook


@torch.inference_mode()
def logits(model: Decoder, ids: Sequence[int], hook: ActivationHook | None = None, nudged: bool = False) -> Tensor:
    """Logits [T, vocab] at every position, with `hook` at every linear, the output matrix among them. `nudged`: every
    number of the embeddings is the next larger float32."""
    step = ForwardBatch((len(ids),), len(ids))
    stream, delta = model.enter(torch.tensor(ids), step)
    if nudged:
        stream = stream.nextafter(torch.tensor(torch.inf))
    for block in model.blocks:
        stream, delta = block.forward(stream, delta, step, hook)
    _, x = ops.norm(stream, delta, model.final_norm)
    return soft_capped(model.config, ops.linear(x, (model.head,), hook))


def llama_cpp(path: Path, windows: Sequence[Sequence[int]], *options: str, python: Path = PYTHON) -> Tensor:
    """llama.cpp's logits of a file at every position of windows [W] of token ids, one after another: [N, vocab]."""
    ids, out = path.with_suffix(".json"), path.with_suffix(".npy")
    ids.write_text(json.dumps([list(each) for each in windows]))
    _run(python, "llama_logits.py", str(path), str(ids), str(out), *options)
    return torch.from_numpy(np.load(out))


def as_f32(path: Path, folder: Path | None = None, python: Path = PYTHON) -> Path:
    """The file's values as an F32 file, decoded by llama.cpp, in the folder or beside the file."""
    out = (folder or path.parent) / f"f32-of-{path.name}"
    _run(python, "llama_quantize.py", str(path), str(out), "--type", "0")
    return out


def _run(python: Path, program: str, *arguments: str) -> None:
    done = subprocess.run([python, ROOT / "bench/peers" / program, *arguments], capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{program}: {done.stderr[-2000:]}")


def product_errors(file: GgufCheckpoint, products: Path) -> dict[str, float]:
    """The largest relative difference of a product of llama.cpp's from that of its rows, as they are and rounded."""
    found = {"floats": 0.0, "rounded": 0.0}
    with np.load(products) as arrays:
        for name in arrays.files:
            if name.endswith("="):
                continue
            kind, x = file.file.info(name).kind, torch.from_numpy(arrays[name])
            weight = ggml_blocks.decode(kind, file.file.read(name)).double()
            theirs = torch.from_numpy(arrays[f"{name}="]).double()
            for way, rows in (("floats", x), ("rounded", rounded(x, kind))):
                error = (rows.double() @ weight.T - theirs).norm() / theirs.norm()
                found[way] = max(found[way], float(error))
    return found


def difference(first: Tensor, second: Tensor, window: NDArray[np.int64], margin: float) -> dict[str, Interval]:
    """Figures of logits [N, vocab] and others at the same positions, whose windows are numbered in `window` [N]."""
    found = compare(first, second, torch.zeros(len(first), dtype=torch.int64))
    pair = first.topk(2).values
    sure = (pair[:, 0] - pair[:, 1] > margin).double().numpy()
    agree = found.agree.double().numpy()
    return {
        "kl": bootstrap.mean(found.kl.numpy(), window),
        "top1": bootstrap.mean(agree, window),
        "sure": bootstrap.ratio(bootstrap.per_window(agree * sure, window), bootstrap.per_window(sure, window)),
        "share_sure": bootstrap.mean(sure, window),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--text", type=Path, required=True, help="held-out text")
    parser.add_argument("--tokens", type=int, default=4096, help="of --text")
    parser.add_argument("--recipes", nargs="+", default=RECIPES)
    parser.add_argument("--calib", type=Path, help="calibration text, for recipes that read one")
    parser.add_argument("--margin", type=float, default=0.1, help="between the two largest logits, in nats")
    args = parser.parse_args()
    source = hub.resolve(args.model)
    tokenizer = Tokenizer.load(source)
    ids = tokenizer.encode(read_text(args.text), add_special_tokens=False)[: args.tokens]
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as name:
        print(f"{'recipe':<8}{'way':<10}{'KL':>9}{'top-1':>10}{'':<18}{'sure':>9}")
        for recipe in args.recipes:
            path = compress_request(
                CompressionRequest(
                    source, Path(name) / f"{recipe}.gguf", recipe=recipe, calibration=args.calib, samples=SAMPLES
                )
            ).path
            file, model = GgufCheckpoint.open(path), gguf_checkpoint.load(path, torch.float32)
            cut = [each.inputs for each in plan_windows(ids, min(512, model.config.context), bos=tokenizer.added_bos)]
            window = np.repeat(np.arange(len(cut), dtype=np.int64), [len(each) for each in cut])
            ours = torch.cat([logits(model, each) for each in cut])
            alike = torch.cat([logits(model, each, rounding_tap(file)) for each in cut])
            nudged = torch.cat([logits(model, each, rounding_tap(file), nudged=True) for each in cut])
            theirs = llama_cpp(path, cut, "--products", str(path.with_suffix(".npz")))
            ways = {
                "floats": (ours, theirs),
                "as f32": (ours, llama_cpp(as_f32(path), cut, "--exact-attention")),
                "rounding": (ours, alike),
                "rounded": (alike, llama_cpp(path, cut, "--exact-attention")),
                "one ulp": (alike, nudged),
                "itself": (theirs, llama_cpp(path, cut, "--plain-kernels")),
            }
            for way, pair in ways.items():
                found = difference(*pair, window, args.margin)
                kl, top1, sure, _ = found.values()
                rows.append({
                    "recipe": recipe, "way": way, **{name: each.value for name, each in found.items()},
                    "intervals": {name: [each.low, each.high] for name, each in found.items()},
                })  # fmt: skip
                span = "" if top1.low is None else f" [{top1.low:.2%}, {top1.high:.2%}]"
                shown = f"{kl.value:>9.1e}{top1.value:>10.2%}{span:<18}{sure.value:>9.2%}"
                print(f"{recipe:<8}{way:<10}{shown}", flush=True)
            errors = product_errors(file, path.with_suffix(".npz"))
            rows.append({"recipe": recipe, "way": "products", **errors})
            shown = f"{errors['floats']:>9.1e} of rows as they are, {errors['rounded']:.1e} of rounded ones"
            print(f"{recipe:<8}{'products':<10}{shown}", flush=True)
    print(json.dumps({"model": args.model, "tokens": len(ids), "margin": args.margin, "rows": rows}))


if __name__ == "__main__":
    main()

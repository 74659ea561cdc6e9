"""What each recipe costs, on a trained model as it is and with outlier channels injected, which change no output.

    python bench/quality.py [--model demo] [--text heldout.txt] [--recipes rtn-w4g128 gptq-w4g128 ...] [--json]

Calibration tokens are sampled from the model; the cost is measured on other samples, or on --text. The last column is
the KL against that of rounding to nearest in the same scheme on the same model, with its paired bootstrap interval.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path

import torch
from outliers import inject

from attar.checkpoints.sources import hf, hub
from attar.compression.calibration.amount import Amount
from attar.compression.calibration.texts import sample_from
from attar.compression.runs.pipeline import compress
from attar.metrics.bootstrap import paired_bootstrap_ratio
from attar.metrics.measure import Report, measure
from attar.text.files import read_text
from attar.text.tokenizer import Tokenizer

RECIPES = (
    "rtn-w4g128", "awq-w4g128", "gptq-w4g128", "awq+gptq-w4g128", "rtn-w3g128", "awq-w3g128", "gptq-w3g128",
    "rtn-w2g128", "gptq-w2g128", "rtn-w8a8", "smoothquant-w8a8", "smoothquant+gptq-w8a8", "rtn-fp8",
)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--text", type=Path, help="held-out text; default: samples of the model with another seed")
    parser.add_argument("--max-tokens", type=int, default=32768, help="of --text")
    parser.add_argument("--samples", type=int, default=128, help="calibration sequences of 512 tokens")
    parser.add_argument("--recipes", nargs="+", default=RECIPES)
    args = parser.parse_args()
    source = hub.resolve(args.model)
    base = hf.load(source, torch.float32)
    calibration = sample_from(base, Amount(args.samples, 512, seed=0)).tolist()
    bos = None
    if args.text is None:
        held_out = sample_from(base, Amount(args.max_tokens // 512, 512, seed=1)).tolist()
    else:
        tokenizer = Tokenizer.load(source)
        bos = tokenizer.added_bos
        held_out = tokenizer.encode(read_text(args.text), add_special_tokens=False)[: args.max_tokens]
    original = measure(base, held_out, bos=bos).figures["ppl"].value
    print(f"original: perplexity {original:.3f}")
    print(f"{'model':<9}{'recipe':<24}{'bits':>7}{'ppl':>9}{'KL mean':>11}{'KL 99.9%':>10}{'top-1':>8}  KL / RTN's")
    found = []
    with tempfile.TemporaryDirectory() as folder:
        injected = inject(source, Path(folder) / "injected")
        for kind, model in (("clean", source), ("injected", injected)):
            plain: dict[str, Report] = {}
            for recipe in args.recipes:
                out = Path(folder) / f"{kind}-{recipe}"
                done = compress(model, out, recipe=recipe, calibration=calibration)
                report = measure(hf.load(out, torch.float32), held_out, base=base, bos=bos)
                method, scheme = recipe.split("-", 1)
                against = ""
                if method == "rtn":
                    plain[scheme] = report
                elif scheme in plain:
                    ratio = paired_bootstrap_ratio(report.measurement.kl_windows, plain[scheme].measurement.kl_windows)
                    against = f"{ratio.value:.3f} [{ratio.low:.3f}, {ratio.high:.3f}]"
                figures = {name: interval.value for name, interval in report.figures.items()}
                found.append({"model": kind, "recipe": recipe, "bits_per_weight": done.bits_per_weight, **figures})
                print(
                    f"{kind:<9}{recipe:<24}{done.bits_per_weight:>7.3f}{figures['ppl']:>9.3f}{figures['kl_mean']:>11.5f}"
                    f"{figures['kl_p999']:>10.4f}{figures['top1']:>8.2%}  {against}",
                    flush=True,
                )
    print(json.dumps({"perplexity": original, "rows": found}))


if __name__ == "__main__":
    main()

"""What rounding the rows that meet 4-bit weights costs, for each form in which the native kernels round them.

    python bench/activations.py [--model demo] [--text heldout.txt] [--recipes rtn-w4g128 gptq-w4g128] [--max-tokens N]

Each recipe's output is loaded once for every form; its KL against the original model is measured on --text, or on
samples of the model with another seed than those that it is calibrated on. `growth` is how much larger the KL is than
that of unrounded rows, with its paired bootstrap interval over windows. The bar is 5 %: the coarsest form that stays
below it is the default of `LLM`.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import get_args

import torch

from attar.checkpoints.sources import hf, hub
from attar.compression.calibration.amount import Amount
from attar.compression.calibration.texts import sample_from
from attar.compression.runs.pipeline import compress
from attar.kernels import dispatch
from attar.metrics.bootstrap import paired_bootstrap_ratio
from attar.metrics.measure import Report, measure
from attar.text.files import read_text
from attar.text.tokenizer import Tokenizer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--text", type=Path, help="held-out text; default: samples of the model with another seed")
    parser.add_argument("--max-tokens", type=int, default=65536)
    parser.add_argument("--samples", type=int, default=128, help="calibration sequences of 512 tokens")
    parser.add_argument("--recipes", nargs="+", default=["rtn-w4g128", "gptq-w4g128"])
    args = parser.parse_args()
    if dispatch.store() is None:
        raise SystemExit("there are no native kernels here")
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
    print(f"{'recipe':<16}{'rows':<11}{'ppl':>9}{'KL mean':>11}{'KL 99.9%':>10}{'top-1':>8}  growth of KL")
    found = []
    with tempfile.TemporaryDirectory() as folder:
        for recipe in args.recipes:
            out = Path(folder) / recipe
            compress(source, out, recipe=recipe, calibration=calibration)
            exact: Report | None = None
            for form in get_args(dispatch.Activations):
                report = measure(hf.load(out, torch.float32, store=dispatch.store(form)), held_out, base=base, bos=bos)
                exact = exact or report
                ratio = paired_bootstrap_ratio(report.measurement.kl_windows, exact.measurement.kl_windows)
                growth = [None if each is None else each - 1 for each in (ratio.value, ratio.low, ratio.high)]
                figures = {name: interval.value for name, interval in report.figures.items()}
                found.append({"recipe": recipe, "rows": form, "growth": growth, **figures})
                print(
                    f"{recipe:<16}{form:<11}{figures['ppl']:>9.3f}{figures['kl_mean']:>11.5f}{figures['kl_p999']:>10.4f}"
                    f"{figures['top1']:>8.2%}  {growth[0]:+.2%} [{growth[1]:+.2%}, {growth[2]:+.2%}]",
                    flush=True,
                )
    print(json.dumps({"model": args.model, "rows": found}))


if __name__ == "__main__":
    main()

"""Compress the embedded model with three recipes and print what each cost, on text that the model wrote itself."""

from pathlib import Path
from tempfile import TemporaryDirectory

import attar
from attar import CompressionRequest, SamplingParams
from attar.evaluation.table import Row, cost_table

MODEL = "demo"  # a folder or a Hub id does as well
RECIPES = ("rtn-w3g64", "rtn-w4g128", "gptq-w4g128")

llm = attar.LLM(MODEL)
held_out = [
    llm.generate("The", SamplingParams(max_tokens=64, seed=seed, ignore_eos=True))[0].token_ids for seed in range(4)
]
rows = []
with TemporaryDirectory() as folder:
    for recipe in RECIPES:
        out = Path(folder, recipe)
        request = CompressionRequest(MODEL, out, recipe=recipe, calibration="self", samples=16, length=64)
        attar.compress_request(request)
        report = attar.evaluate(out, against=MODEL, tokens=held_out)
        rows.append(Row.of(recipe, out, report))
print(cost_table(rows))

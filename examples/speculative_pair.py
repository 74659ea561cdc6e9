"""A model and a small copy that drafts for it: the same text in fewer steps. A clock must say whether it is faster."""

import time
from pathlib import Path
from tempfile import TemporaryDirectory

import attar
from attar import CompressionRequest, SamplingParams

PROMPT = "It was a dark"
params = SamplingParams(max_tokens=48, temperature=0, ignore_eos=True)
with TemporaryDirectory() as folder:
    draft = Path(folder, "draft")
    attar.compress_request(CompressionRequest("demo", draft, recipe="hqq-w4g64", as_draft=True))
    texts = {}
    for name, settings in (("alone", {}), ("pair", {"draft": str(draft), "draft_tokens": 3})):
        llm = attar.LLM("demo", **settings)
        llm.generate(PROMPT, params)  # warms up
        began = time.perf_counter()
        texts[name] = llm.generate(PROMPT, params)[0].text
        seconds = time.perf_counter() - began
        drafted, accepted = llm.drafts
        print(f"{name:<6} {seconds * 1e3:6.0f} ms   {drafted:3} drafts, {accepted:3} accepted")
assert texts["alone"] == texts["pair"], "drafts never change a text on a CPU"
print(f"both: {PROMPT}{texts['pair']}")

"""Sampling: a seeded text, the same one piece by piece, and what else the model considered for each token."""

import attar
from attar import SamplingParams

llm = attar.LLM("demo")
params = SamplingParams(max_tokens=32, temperature=0.8, top_p=0.95, seed=7, stop="\n\n", logprobs=2)

done = llm.generate("The captain looked at", params)[0]
print(f"The captain looked at{done.text}  ({done.finish_reason}, seed {done.seed})\n")

for piece in llm.stream("The captain looked at", params):
    print(piece, end="|", flush=True)
print("\n")

assert done.logprobs is not None
for token in done.logprobs[:5]:
    others = ", ".join(f"{llm.tokenizer.decode([i])!r} {logprob:.2f}" for i, logprob in token.top)
    print(f"{llm.tokenizer.decode([token.token_id])!r:<12} {token.logprob:6.2f}   likeliest: {others}")

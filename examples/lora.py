"""LoRA on a compressed model: train an adapter beside 4-bit weights, attach it, and merge it into a dense model."""

import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import attar
from attar import SamplingParams

TEXT = "The keeper said: aye, aye, the lamp is lit, and the sea is calm tonight. " * 60
PROMPT = "The keeper said:"
params = SamplingParams(max_tokens=16, temperature=0)


def command(*words: str | Path) -> None:
    subprocess.run([sys.executable, "-m", "attar", *map(str, words)], check=True, capture_output=True)


with TemporaryDirectory() as name:
    folder = Path(name)
    base, tone, merged, text = (folder / each for each in ("base", "tone", "merged", "text.txt"))
    text.write_text(TEXT)
    command("compress", "demo", base, "--recipe", "rtn-nf4")
    training = ("--length", "64", "--samples", "32", "--rate", "0.005", "--batch", "256", "--epochs", "3")
    command("finetune", base, tone, "--text", text, *training)
    command("merge", base, tone, merged)
    llm = attar.LLM(base)
    print(f"base:    {llm.generate(PROMPT, params)[0].text!r}")
    llm.attach(tone)
    print(f"adapter: {llm.generate(PROMPT, params)[0].text!r}")
    print(f"merged:  {attar.LLM(merged).generate(PROMPT, params)[0].text!r}")

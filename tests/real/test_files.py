"""Real files inspected and planned without running them, and a real model compressed, proven and loaded again."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
from dense import dense

import attar
from attar.checkpoints.inspect import inspect
from attar.checkpoints.receipts import receipt
from attar.checkpoints.sources import hf
from attar.checkpoints.sources.opening import stored
from attar.compression.recipe.recipe_file import load_recipe
from attar.engine.llm.llm import LLM
from attar.kernels.operands import Prepared
from attar.plan.costs import step_bytes, weight_bytes
from attar.protocol.request import SamplingParams

pytestmark = pytest.mark.real

PARAMETERS = {"smollm2-135m": 134_515_008, "qwen2.5-coder-0.5b": 630_167_424}
"""Numbers in the files. Qwen's holds its embedding twice, once as the output matrix."""

HELD = {"smollm2-135m": 1.0, "qwen2.5-coder-0.5b": 1.02}
"""Most bytes in memory over those of the file."""

RTN_KL = (0.2, 0.6)
"""SmolLM2 rounded to 4 bits in groups of 64, over little text; 0.41 over 8,192 tokens."""


def test_readme_compresses_the_model_that_it_names(real_model: Callable[[str], Path]) -> None:
    """README's first command had a group size that does not divide the model's 576 columns."""
    readme = (Path(__file__).parents[2] / "README.md").read_text()
    (recipe,) = re.findall(r"attar compress HuggingFaceTB/SmolLM2-135M-Instruct .*--recipe (\S+)", readme)
    config, _ = stored(real_model("smollm2-135m"))
    for columns in (config.hidden, config.intermediate):
        load_recipe(recipe).scheme.check(columns)


def test_inspect_counts_every_number(name: str, path: Path) -> None:
    found = inspect(path)
    assert found.parameters == PARAMETERS[name]
    assert found.bytes == path.stat().st_size


def test_plan_counts_the_bytes_that_are_read_and_held(name: str, path: Path, llm: LLM) -> None:
    config, storage = stored(path)
    decoder = llm.decoder
    linears = [decoder.head, *(linear for block in decoder.blocks for linear in block.linears())]
    read = sum(each.weight.read_bytes for each in linears if isinstance(each.weight, Prepared))
    assert step_bytes(config, storage) == pytest.approx(read, rel=0.01)
    assert 0.95 < weight_bytes(config, storage).total / path.stat().st_size < HELD[name]


def test_a_real_model_keeps_its_receipt(real_model: Callable[[str], Path], shared: Path, tmp_path: Path) -> None:
    original, out = dense(real_model("smollm2-135m"), tmp_path / "dense"), tmp_path / "out"
    text = shared / "data" / "text" / "wikitext2_test.txt"
    request = attar.CompressionRequest(original, out, recipe="rtn-w4g64", evaluation=text, eval_tokens=256)
    done = attar.compress_request(request)
    assert done.bits_per_weight == pytest.approx(4.25, abs=0.01)
    assert done.cost is not None
    assert RTN_KL[0] < done.cost["kl_mean"] < RTN_KL[1]
    verdict = receipt.verify(out, lambda: hf.load(out))
    assert verdict.ok, verdict
    question = [{"role": "user", "content": "How many days are in a week?"}]
    answer = LLM(out).chat(question, SamplingParams(max_tokens=12, temperature=0))
    assert "week" in answer.text

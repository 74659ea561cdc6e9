"""`compress --as-draft`: a compressed copy that drafts for the model itself."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from attar.checkpoints.receipts import receipt
from attar.checkpoints.sources.hf import Checkpoint
from attar.cli.main import app
from attar.compression.request.request import CompressionRequest
from attar.compression.runs.pipeline import DRAFT_SHARE, compress, compress_request
from attar.engine.llm.llm import LLM
from attar.protocol.request import SamplingParams


def attar(*args: str) -> int:
    return CliRunner().invoke(app, args).exit_code


def test_a_copy_drafts_for_its_source(tiny: Path, tmp_path: Path) -> None:
    assert attar("compress", str(tiny), str(tmp_path / "draft"), "--as-draft", "-q") == 0
    value = json.loads((tmp_path / "draft" / "receipt.json").read_text())
    assert value["drafts_for"] == receipt.combined_hash(Checkpoint.open(tiny).folder.source_hashes())
    assert {each["scheme"] for each in value["layers"]} == {"w4g64"}
    assert receipt.verify(tmp_path / "draft", None, probes="none").ok
    params = SamplingParams(max_tokens=16, temperature=0.8, seed=5, ignore_eos=True)
    llm = LLM(tiny, draft=str(tmp_path / "draft"), draft_tokens=3, verify=False)
    plain = LLM(tiny, verify=False).generate([[5, 6, 7]], params)
    assert [each.token_ids for each in llm.generate([[5, 6, 7]], params)] == [plain[0].token_ids]
    assert llm.running.engine is not None
    assert llm.running.engine.speculation is not None
    assert llm.running.engine.speculation.accepted > 5
    assert llm.running.engine.speculation.errors == 0


@pytest.mark.parametrize("name", ["draft", "draft.gguf"])
def test_a_compressed_model_has_one_too(tiny: Path, tmp_path: Path, name: str) -> None:
    compress(tiny, tmp_path / "small", recipe="rtn-w8")
    assert attar("compress", str(tmp_path / "small"), str(tmp_path / name), "--as-draft", "-q") == 0
    found = receipt.read_receipt(tmp_path / name)
    assert found is not None
    assert found.value["drafts_for"] == found.value["source"]["sha256"]


def test_a_recipe_that_is_named_is_taken(tiny: Path, tmp_path: Path) -> None:
    assert attar("compress", str(tiny), str(tmp_path / "draft"), "--as-draft", "--recipe", "rtn-w4g32", "-q") == 0
    value = json.loads((tmp_path / "draft" / "receipt.json").read_text())
    assert {each["scheme"] for each in value["layers"]} == {"w4g32"}


def test_a_copy_that_is_hardly_smaller_is_told(tiny: Path, tmp_path: Path) -> None:
    compress(tiny, tmp_path / "small", recipe="rtn-w4g32")
    shares = []
    for name in (str(tiny), str(tmp_path / "small")):
        asked = CompressionRequest(
            name, tmp_path / "draft", recipe="rtn-w4g32", as_draft=True, requantize=True, overwrite=True
        )
        made = compress_request(asked)
        shares.append(made.bytes / made.source_bytes)
        assert any(f"{DRAFT_SHARE:.0%}" in each for each in made.warnings) == (shares[-1] > DRAFT_SHARE)
    assert shares[1] > DRAFT_SHARE

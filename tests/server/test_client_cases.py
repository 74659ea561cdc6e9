"""Small requests that clients of the field send, one of each kind: programs from outside, unmodified."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from soaks.served import Served
from tokenizers import Tokenizer as Backend

from attar.server.options import ServerOptions
from attar.text.tokenizer import Tokenizer
from tests.server.conftest import Running
from tests.server.test_browser import CHROMIUM, PYTHON

CASES = {
    "01_health.sh": "demo", "03_continuous_usage_stats.sh": "demo", "05_tools_declared.sh": "qwen",
    "06_tools_auto.sh": "qwen", "09_json_object.py": "demo", "10_json_schema.py": "demo", "12_responses.sh": "demo",
    "14_anthropic_tools.sh": "qwen", "20_neutral_extras.py": "demo", "21_min_tokens.sh": "demo",
    "23_enable_thinking.sh": "qwen", "24_reasoning_effort.sh": "demo", "26_message_extras.sh": "demo",
    "27_max_tokens_minus_one.sh": "demo", "28_store_and_tier.sh": "demo", "29_continue_final_message.sh": "demo",
    "31_suffix.sh": "qwen", "32_embedding_dimensions.sh": "demo", "33_rerank.sh": "reranker",
    "34_tokenize_options.sh": "demo", "40_text_offset_sentencepiece.py": "llama2", "42_todays_date.py": "dated",
    "44_chunked_body.sh": "demo", "50_context_message.sh": "demo",
    "52_model_not_found_says_which.sh": "demo", "53_host_refusal_says_how.sh": "demo", "55_head.sh": "demo",
    "60_page_reload.py": "demo", "61_page_base_model.py": "base",
}  # fmt: skip
"""Each case with the model that it wants."""
ELSEWHERE = {
    "46_same_field_named.sh",  # imports modules that have moved: tests/server/api/test_validation.py
    "51_no_route_says_which.sh",  # asks for what is a route of llama.cpp's now: tests/server/api/test_app.py
}
RERANKS = ("<|im_start|>", "<|im_end|>", "<think>", "</think>", "yes", "no")


@pytest.fixture(scope="module")
def address(
    real: Served, demo: Path, shared: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[[str], str]]:
    """Finds the address of a server of a kind of model; each is started once."""
    running: dict[str, Running] = {}

    def of_template(template: str) -> Tokenizer:
        known = Tokenizer.load(demo)
        return Tokenizer(known._backend, known.bos_token, known.eos_token, {"default": template} if template else {})

    def reranker() -> Tokenizer:
        backend = Backend.from_file(str(demo / "tokenizer.json"))
        backend.add_tokens(list(RERANKS))
        known = Tokenizer.load(demo)
        return Tokenizer(backend, known.bos_token, known.eos_token, known.chat_templates)

    kinds: dict[str, Callable[[], Tokenizer]] = {
        "qwen": lambda: Tokenizer.load(shared / "tokenizers" / "qwen2.5"), "reranker": reranker,
        "llama2": lambda: Tokenizer.load(shared / "tokenizers" / "llama2"), "base": lambda: of_template(""),
        "dated": lambda: of_template("{{ strftime_now('%d %b %Y') }}"),
    }  # fmt: skip

    def find(kind: str) -> str:
        if kind == "demo":
            return f"http://127.0.0.1:{real.address.port}"
        if kind not in running:
            folder, name = tmp_path_factory.mktemp("engine"), "m" if kind == "qwen" else "demo"
            running[kind] = Running(folder, kinds[kind](), ServerOptions(port=0), name=name)
        return f"http://127.0.0.1:{running[kind].port}"

    yield find
    ended = [each.stop() for each in running.values()]
    assert all(ended)


def test_every_case_is_known(shared: Path) -> None:
    found = {file.name for file in (shared / "cases" / "clients").iterdir() if file.suffix in (".sh", ".py")}
    assert found == CASES.keys() | ELSEWHERE


@pytest.mark.parametrize("case", CASES)
def test_a_request_as_clients_send_it(address: Callable[[str], str], shared: Path, case: str) -> None:
    file, kind = shared / "cases" / "clients" / case, CASES[case]
    program = [shutil.which("bash") or "", str(file)]
    if file.suffix == ".py":
        program = [sys.executable, str(file)]
    elif shutil.which("curl") is None:
        pytest.skip("no curl on this machine")
    if "playwright" in file.read_text():
        if CHROMIUM is None or not PYTHON.exists():
            pytest.skip("no chromium or playwright on this machine")
        program = [str(PYTHON), str(file)]
    with tempfile.TemporaryDirectory() as folder:  # not pytest's: a browser's socket there may have too long a path
        environment = {**os.environ, "B": address(kind), "TMPDIR": folder}
        done = subprocess.run(program, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr

"""Completions of a Ray dataset, equal to those of a model in this process."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys

import pytest

from attar.engine.llm.llm import LLM
from attar.protocol.request import SamplingParams

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="Ray is not installed: see `make test-ray`"),
    pytest.mark.slow,
]

PROMPTS = [f"Once upon a time {number} little foxes" for number in range(6)]
PROGRAM = """
import json, os, sys, tempfile
from attar.integrations.ray import batch, exposure
with tempfile.TemporaryDirectory(prefix="attar-") as folder:
    token = os.path.join(folder, "token")
    with open(os.open(token, os.O_WRONLY | os.O_CREAT, 0o600), "w") as file:
        file.write("ab" * 32)
    os.environ.update(exposure.START_ENVIRONMENT, RAY_AUTH_TOKEN_PATH=token)
    import ray
    ray.init(include_dashboard=False, _node_ip_address="127.0.0.1", _temp_dir=folder + "/ray", num_cpus=2,
             object_store_memory=128 << 20, log_to_driver=False)
    rows = ray.data.from_items([{"at": at, "prompt": each} for at, each in enumerate(json.loads(sys.argv[1]))])
    found = batch.generate(rows, "demo", batch=2, max_tokens=30, ignore_eos=True, temperature=0.8, seed=4).take_all()
    ray.shutdown()
print(json.dumps([[each["at"], each["completion"], each["finish_reason"]] for each in found]))
"""


def test_rows_are_completed_as_by_one_model() -> None:
    command = [sys.executable, "-c", PROGRAM, json.dumps(PROMPTS)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=180)
    assert ended.returncode == 0, ended.stderr[-2000:]
    found = sorted(json.loads(ended.stdout.splitlines()[-1]))
    params = SamplingParams(max_tokens=30, ignore_eos=True, temperature=0.8, seed=4)
    expected = LLM("demo", verify=False).generate(PROMPTS, params)
    assert found == [[at, each.text, each.finish_reason] for at, each in enumerate(expected)]

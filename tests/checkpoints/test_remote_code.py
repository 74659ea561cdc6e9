"""A model folder that asks for code of its own to run: it loads as if it had not asked, and nothing of it runs.

Names in a configuration have picked modules to import in other programs: `auto_map`, an attention implementation, a
tokenizer's class, each in the main configuration or in one within it, and with a flag beside it that says to trust it.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

HOSTILE = {
    "auto_map": {"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model", "AutoTokenizer": ["evil.T", None]},
    "trust_remote_code": True,
    "_attn_implementation_internal": "stranger/kernels:evil",
    "_attn_implementation": "stranger/kernels",
    "custom_pipelines": {"text-generation": {"impl": "evil.Pipeline", "pt": ["AutoModelForCausalLM"]}},
    "tokenizer_class": "evil.Tokenizer",
    "processor_class": "evil.Processor",
    "quantizer": "evil:Quantizer",
}
LOAD = """
import json, sys

seen = []

def watch(event, arguments):
    if event == "import" and "evil" in str(arguments[0]):
        seen.append([event, arguments[0]])
    elif event in ("socket.connect", "socket.getaddrinfo", "subprocess.Popen", "os.system", "pickle.find_class"):
        seen.append([event, ""])
    elif event == "open" and str(arguments[0]).endswith("evil.py"):
        seen.append([event, str(arguments[0])])

from pathlib import Path
from attar.checkpoints.sources.opening import stored
from attar.text.tokenizer import Tokenizer

folder = Path(sys.argv[1])
sys.path.insert(0, str(folder))  # as if somebody stood in it
sys.addaudithook(watch)
config, _ = stored(folder)
ids = Tokenizer.load(folder).encode("Once upon a time")
print(json.dumps([config.vocab_size, len(ids), seen]))
"""


def test_code_that_a_configuration_names_never_runs(demo: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(demo, folder)
    ran = tmp_path / "ran"
    for name in ("evil.py", "modeling_evil.py", "configuration_evil.py", "tokenization_evil.py"):
        (folder / name).write_text(f"open({str(ran)!r}, 'w')\n")
    for name in ("config.json", "tokenizer_config.json", "generation_config.json"):
        content = json.loads((folder / name).read_text())
        (folder / name).write_text(json.dumps(content | HOSTILE))
    done = subprocess.run([sys.executable, "-c", LOAD, str(folder)], capture_output=True, text=True)
    assert not done.returncode, done.stderr
    vocab, ids, seen = json.loads(done.stdout)
    assert (vocab, seen) == (4096, [])
    assert ids
    assert not ran.exists()

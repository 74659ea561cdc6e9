"""The command line: the issue's walk-through, the JSON and exit statuses that scripts rely on, and every mistake a user
can make. Most of it runs in this process; what belongs to a process (imports, pipes, signals, locale) in a real one."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner, Result

from attar.cli.main import app
from attar.cli.terminal import BAD_INPUT, CHECK_FAILED, INTERRUPTED, NO_RECEIPT, PIPE_CLOSED
from attar.errors import CODES, UserError, code_of

ROOT = Path(__file__).resolve().parents[2]
COMMANDS = (
    "compress",
    "eval",
    "report",
    "lab",
    "generate",
    "chat",
    "serve",
    "route",
    "deploy",
    "bench-serve",
    "bench",
    "plan",
    "inspect",
    "verify",
    "convert",
    "imatrix",
    "finetune",
    "train-draft",
    "merge",
    "doctor",
    "demo",
    "tritonserver",
)
ATTAR = [sys.executable, "-m", "attar"]
TEXT = (ROOT / "LICENSE").read_text()


def attar(command: str, *more: str, stdin: str | bytes | None = None) -> Result:
    """Run a command line, as a shell would split it, and further arguments as they are."""
    return CliRunner().invoke(app, [*shlex.split(command), *more], input=stdin)


def last_json(result: Result) -> dict[str, Any]:
    """The object on the last line of stdout, read as strictly as JSON is written."""

    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is not JSON")

    assert result.exit_code in (0, CHECK_FAILED), result.output
    value = json.loads(result.stdout.splitlines()[-1], parse_constant=refuse)
    assert isinstance(value, dict)
    return value


def ended_with(error: BaseException | None) -> str | None:
    """The code of the error that a command ended with, from the chain of what was raised meanwhile."""
    while error is not None:
        if isinstance(error, UserError | OSError):
            return code_of(error)
        error = error.__context__
    return None


def refused(result: Result, status: int, *expected: str, as_json: bool = False) -> None:
    """One sentence on stderr, the same in JSON if that was asked for, no traceback. `expected`: the code of the error,
    and words of the sentence."""
    assert result.exit_code == status, result.output
    assert isinstance(result.exception, SystemExit)
    lines = [line for line in result.stderr.splitlines() if NO_RECEIPT not in line]
    assert len(lines) == 1 or lines[0].startswith("Usage:"), result.stderr
    assert lines[-1].startswith(("attar: ", "Error: "))
    if as_json:
        said = json.loads(result.stdout.splitlines()[-1])
        assert said.keys() == {"error", "code"}
        assert said["error"] in lines[-1]
        code = said["code"]
    else:
        assert "{" not in result.stdout
        code = ended_with(result.exception)
    for word in expected:
        if word in CODES:
            assert code == word, lines[-1]
        else:
            assert word in lines[-1]


@pytest.fixture(scope="module")
def place(demo: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder as the issue assumes it: ./model, text.txt, heldout.txt."""
    folder = tmp_path_factory.mktemp("place")
    shutil.copytree(demo, folder / "model")
    (folder / "text.txt").write_text(TEXT[1000:3000])
    (folder / "heldout.txt").write_text(TEXT[5000:7000])
    return folder


@pytest.fixture(autouse=True)
def _inside(place: Path) -> Iterator[None]:
    with contextlib.chdir(place):
        yield


@pytest.fixture(scope="module")
def compressed(place: Path) -> Result:
    """`out`, made word for word as in the issue."""
    with contextlib.chdir(place):
        return attar("compress ./model ./out --recipe gptq-w4g128 --calib text.txt --eval heldout.txt --json")


@pytest.fixture
def out(compressed: Result) -> str:
    assert compressed.exit_code == 0, compressed.output
    return "./out"


# The walk-through


def test_compress(compressed: Result, place: Path) -> None:
    done = last_json(compressed)
    assert 4 < done["bits_per_weight"] < 4.2
    assert done["bytes"] == (place / "out" / "model.safetensors").stat().st_size
    assert done["seconds"] > 0
    assert done["kl_mean"] > 0
    few, strange = compressed.stderr.splitlines()
    assert few.startswith("attar: the calibration text has 512 tokens and the widest linear 768 input columns")
    assert strange.startswith("attar: the calibration text surprises the model by 4.7")  # a licence is no novel
    assert done["texts"]["shared"] == 0
    assert compressed.stdout.splitlines()[0].split()[:2] == ["model", "size"]


def test_eval_gives_the_figures_that_compress_gave(compressed: Result, out: str) -> None:
    report = last_json(attar(f"eval {out} --against ./model --text heldout.txt --json"))
    assert {"ppl", "kl_mean", "kl_p999", "top1", "tokens"} <= report.keys()
    assert report == last_json(compressed)["evaluation"]


def test_eval_continues_prompts(out: str) -> None:
    report = last_json(attar(f"eval {out} --against ./model --text heldout.txt --max-tokens 130 --greedy 2 --json"))
    assert 0 <= report["greedy"] <= 64
    assert report["protocol"]["greedy"] == "2 prompts of 64 tokens, continued by 64"
    assert 0 < report["ear"] < 1


def test_eval_without_the_original(out: str) -> None:
    report = last_json(attar("eval", out, "--text", "heldout.txt", "--max-tokens", "50", "--json"))
    assert report["ppl"] > 1
    assert report["kl_mean"] is report["top1"] is None
    assert report["tokens"] == 49


def test_eval_of_keys_and_values_in_few_bits(out: str) -> None:
    args = ["eval", out, "--text", "heldout.txt", "--max-tokens", "50", "--json"]
    cost = {kv: last_json(attar(*args, "--kv", kv))["kl_mean"] for kv in ("int8", "int4")}
    assert 0 < cost["int8"] < cost["int4"]
    refused(attar(*args[:-1], "--kv", "int5"), BAD_INPUT, "kv_unknown")


def test_generate(out: str) -> None:
    args = ["generate", out, "--prompt", "Once upon a time", "--max-tokens", "8", "--temperature", "0"]
    result = attar(*args, "--json")
    done = last_json(result)
    assert {"text", "token_ids", "finish_reason"} <= done.keys()
    assert 1 <= len(done["token_ids"]) <= 8
    assert len(last_json(attar(*args, "--ignore-eos", "--json"))["token_ids"]) == 8
    refused(attar(*args, "--suffix", "the end"), BAD_INPUT, "feature_unsupported")
    few = [*args, "--stop", done["text"][:3], "--json"]
    assert len(last_json(attar(*few))["token_ids"]) < 8
    assert len(last_json(attar(*few, "--min-tokens", "8"))["token_ids"]) == 8
    assert result.stdout.startswith(done["text"] + "\n")
    assert result.stderr == ""
    piped = attar(*args[:2], *args[4:], stdin="Once upon a time\n")
    assert piped.stdout == done["text"] + "\n"


def test_a_seed_repeats_a_text_and_options_reach_the_sampler() -> None:
    args = ["generate", "./model", "--prompt", "The", "--max-tokens", "8", "--seed", "5", "--json"]
    drawn = last_json(attar(*args))
    assert last_json(attar(*args))["token_ids"] == drawn["token_ids"]
    assert drawn["seed"] == 5
    options = "--temperature 1.5 --top-k 1 --min-p 0.1 --logprobs 2 --repetition-penalty 1.1 --presence-penalty 0.5"
    shown = last_json(attar(*args, *options.split(), "--stop", "zzzz"))
    assert len(shown["logprobs"]) == len(shown["token_ids"])
    assert len(shown["logprobs"][0]["top"]) == 2


def test_chat(out: str) -> None:
    result = attar("chat", out, "--max-tokens", "6", "--system", "Be brief.", "--json", stdin="hello\nand then?\n")
    messages = last_json(result)["messages"]
    assert [m["role"] for m in messages] == ["system", "user", "assistant", "user", "assistant"]
    assert [m["content"] for m in messages[:2]] == ["Be brief.", "hello"]
    assert messages[2]["content"] in result.stdout


def test_an_empty_system_message_is_one(demo: Path) -> None:
    """Many templates have one of their own for conversations without any."""
    messages = last_json(attar("chat", str(demo), "--max-tokens", "1", "--system", "", "--json", stdin="hello\n"))
    assert messages["messages"][0] == {"role": "system", "content": ""}


def test_inspect(out: str, compressed: Result, place: Path) -> None:
    result = attar("inspect", out, "--json")
    found, done = last_json(result), last_json(compressed)
    assert found["architecture"] == "LlamaForCausalLM"
    assert found["bits_per_weight"] == pytest.approx(done["bits_per_weight"])
    assert found["bytes"] == done["bytes"]
    assert found["tensor_bytes"] == sum(tensor["bytes"] for tensor in found["tensors"])
    assert 0 < found["bytes"] - found["tensor_bytes"] < 200 * len(found["tensors"])  # the header
    assert found["receipt"] is True
    layers = found["layers"]
    assert found["schemes"] == {"w4g128": 7 * layers}
    original = last_json(attar("inspect", "./model", "--json"))
    assert original["parameters"] == found["parameters"]
    assert original["bits_per_weight"] == 16
    assert original["schemes"] == {"bfloat16": 7 * layers}


def test_inspect_orders_layers_as_numbers(tmp_path: Path) -> None:
    from attar.checkpoints.inspect import _natural

    names = ["a.10.w", "a.9.w", "a.b", "a.9.v.x"]
    assert sorted(names, key=_natural) == ["a.b", "a.9.v.x", "a.9.w", "a.10.w"]


def test_verify(out: str) -> None:
    result = attar("verify", out, "--json")
    found = last_json(result)
    assert found == {"ok": True, "first_divergence": None, "detail": found["detail"], "paths": found["paths"]}
    assert {path: verdict["ok"] for path, verdict in found["paths"].items()} == {
        "exact": True,
        "int8_activations": True,
    }
    assert result.stdout.startswith("ok: ")


def test_doctor() -> None:
    result = attar("doctor", "--json")
    assert {"versions", "cpu", "threads", "kernels"} <= last_json(result).keys()
    assert result.stdout.startswith("versions\n")


# Receipts


@pytest.fixture
def tampered(out: str, place: Path, tmp_path: Path) -> str:
    """`out` with the weights of its last block changed."""
    copy = tmp_path / "tampered"
    shutil.copytree(place / out, copy)
    from attar.checkpoints.safetensors import TensorFile

    data = bytearray((copy / "model.safetensors").read_bytes())
    with contextlib.closing(TensorFile(copy / "model.safetensors")) as file:
        last = max(int(name.split(".")[2]) for name in file.names() if name.startswith("model.layers."))
        name = f"model.layers.{last}.mlp.down_proj.weight_packed"
        stored = file.read(name).numpy().tobytes()
    at = data.index(stored)
    data[at : at + len(stored)] = bytes(255 - byte for byte in stored)
    (copy / "model.safetensors").write_bytes(data)
    return str(copy)


def test_what_computes_something_else_is_refused(tampered: str) -> None:
    for command in (["generate", tampered, "--prompt", "a"], ["chat", tampered]):
        refused(attar(*command, stdin="a\n"), CHECK_FAILED, "diverges at model.layers.", "--no-verify")
    loaded = attar("generate", tampered, "--prompt", "a", "--max-tokens", "1", "--no-verify")
    assert loaded.exit_code == 0, loaded.output


def test_verify_says_what_differs_first(tampered: str) -> None:
    result = attar("verify", tampered, "--json")
    assert last_json(result)["first_divergence"] == "model.safetensors"
    assert result.exit_code == CHECK_FAILED
    assert result.stderr.startswith("attar: failed: model.safetensors is not the file")
    replayed = last_json(attar("verify", tampered, "--no-hashes", "--json"))
    assert replayed["ok"] is False
    assert replayed["first_divergence"].startswith("model.layers.")


def test_a_foreign_checkpoint_has_no_receipt_and_loads() -> None:
    for command in ("generate ./model --prompt a --max-tokens 1", "chat ./model --max-tokens 1"):
        result = attar(command, stdin="a\n")
        assert result.exit_code == 0, result.output
        assert "no receipt" in result.stderr
    verified = attar("verify", "./model", "--json")
    assert verified.exit_code == CHECK_FAILED
    assert "no receipt" in verified.stderr
    assert last_json(verified)["ok"] is False


def test_inspect_says_once_that_there_is_no_receipt(tmp_path: Path) -> None:
    assert attar("convert", "./model", str(tmp_path / "foreign.gguf"), "--to", "gguf").exit_code == 0
    for name in ("./model", str(tmp_path / "foreign.gguf")):
        result = attar("inspect", name)
        lines = [line for line in result.output.splitlines() if "receipt" in line]  # stderr's, too
        assert len(lines) == 1
        assert lines[0].startswith("receipt          none: attar did not make this")


# Mistakes


@pytest.fixture(scope="module")
def wrong(place: Path, tiny: Path) -> None:
    """Everything that the table below names, beside the model."""
    (place / "empty.txt").touch()
    (place / "binary.txt").write_bytes(b"abc\xff\xfe")
    (place / "one.txt").write_text("a")
    (place / "bad.yaml").write_text("recipe: gptq-w4g128\ndampin: 0.1\n")
    (place / "broken.yaml").write_text("recipe: [\n")
    shutil.copytree(tiny, place / "tiny")
    shutil.copytree(tiny, place / "linked")
    (place / "linked" / "tokenizer.json").symlink_to("../model/tokenizer.json")
    for name in ("truncated", "pickle", "unknown", "json", "sharded", "dumb"):
        shutil.copytree(place / "model", place / name)
    with (place / "truncated" / "model.safetensors").open("r+b") as file:
        file.truncate(1_000_000)
    (place / "pickle" / "model.safetensors").unlink()
    (place / "pickle" / "pytorch_model.bin").touch()
    config = (place / "model" / "config.json").read_text()
    (place / "unknown" / "config.json").write_text(config.replace("LlamaForCausalLM", "LlammaForCausalLM"))
    (place / "json" / "config.json").write_text("{")
    index = {"weight_map": {"model.norm.weight": "model-00001-of-00002.safetensors"}}
    (place / "sharded" / "model.safetensors").unlink()
    (place / "sharded" / "model.safetensors.index.json").write_text(json.dumps(index))
    tokens = json.loads((place / "dumb" / "tokenizer_config.json").read_text())
    del tokens["chat_template"]
    (place / "dumb" / "tokenizer_config.json").write_text(json.dumps(tokens))


MISTAKES: list[tuple[str, tuple[str, ...]]] = [
    # commands and options
    ("compres", ("No such command", "compress")),
    ("compress", ("Missing argument",)),
    ("eval ./model --txt heldout.txt", ("No such option", "--text")),
    # models
    ("inspect ./mdel", ("file_not_found",)),
    ("inspect ''", ("option_missing",)),
    ("eval ./model --against '' --text heldout.txt", ("option_missing",)),
    ("inspect text.txt", ("file_wrong_kind",)),
    ("inspect .", ("file_wrong_kind",)),
    ("inspect truncated", ("checkpoint_incomplete", "truncated")),
    ("generate truncated --prompt a", ("checkpoint_incomplete", "truncated")),
    ("inspect pickle", ("file_unsafe", "pytorch_model.bin", "convert")),
    ("inspect unknown", ("architecture_unsupported", "LlamaForCausalLM")),
    ("inspect json", ("file_malformed", "config.json")),
    ("inspect sharded", ("checkpoint_incomplete", "model-00001-of-00002.safetensors")),
    # compress
    ("compress ./model ./out --recipe rtn-w4g128", ("output_exists", "--overwrite")),
    ("compress ./model ./model --recipe rtn-w4g128 --overwrite", ("output_is_source",)),
    ("compress ./model . --recipe rtn-w4g128 --overwrite", ("output_is_source",)),
    ("compress ./model '' --recipe rtn-w4g128 --overwrite", ("output_invalid",)),
    ("compress ./linked ./new --recipe rtn-w4g128", ("file_unsafe",)),
    ("compress ./tiny text.txt --recipe rtn-w4g128 --overwrite", ("output_invalid",)),
    ("compress ./model text.txt/new --recipe rtn-w4g128", ("file_failed",)),
    ("compress ./out ./new --recipe rtn-w4g128", ("source_compressed", "--requantize")),
    ("compress ./model ./new", ("calibration_missing", "self")),
    ("compress ./model ./new --recipe gtpq-w4g128", ("method_unknown",)),
    ("compress ./model ./new --recipe gptq-w4g128x", ("scheme_unknown", "w4g128")),
    ("compress ./model ./new --recipe gptq", ("recipe_malformed", "method[+method]-scheme")),
    ("compress ./model ./new --recipe fp8", ("recipe_unknown",)),
    ("compress ./model ./new --recipe rtn-w9", ("scheme_unsupported",)),
    ("compress ./model ./new --recipe rtn-w4g0", ("scheme_unknown",)),
    ("compress ./model ./new --recipe rtn-w4g96", ("group_size_indivisible", "128")),
    ("compress ./model ./new --recipe rtn-w4g128 --head int9", ("scheme_unknown", "int8")),
    ("compress ./model ./new --recipe rtn-w4g128 --head w4g96", ("group_size_indivisible", "128")),
    ("compress ./model ./new --recipe rtn-w4g128 --head w8a8", ("scheme_unsupported", "lm_head")),
    ("compress ./model ./new --recipe absent.yaml", ("file_not_found",)),
    ("compress ./model ./new --recipe baad.yaml", ("file_not_found",)),
    ("compress ./model ./new --recipe bad.yaml", ("method_option_unknown", "damping")),
    ("compress ./model ./new --recipe broken.yaml", ("file_malformed",)),
    ("compress ./model ./new --calib empty.txt", ("text_empty",)),
    ("compress ./model ./new --calib binary.txt", ("text_not_utf8",)),
    ("compress ./model ./new --calib absent.txt", ("file_not_found",)),
    ("compress ./model ./new --calib ''", ("option_missing",)),
    ("compress ./model ./new --calib texts.txt", ("file_not_found",)),
    ("compress ./model ./new --calib model", ("file_wrong_kind",)),
    ("compress ./model ./new --calib one.txt", ("at least 2",)),
    ("compress ./model ./new --calib text.txt --length 513", ("context_exceeded",)),
    ("compress ./model ./new --calib text.txt --samples 0", ("--samples",)),
    ("compress ./model ./new --calib text.txt --calib-memory 2XB", ("'2XB' is not a size", "2GiB")),
    ("compress ./model ./new --calib text.txt --eval absent.txt", ("file_not_found",)),
    ("compress ./model ./new --calib text.txt --eval one.txt", ("text_too_short",)),
    ("compress ./truncated ./new --calib text.txt", ("checkpoint_incomplete", "truncated")),
    # eval
    ("eval ./model", ("option_missing",)),
    ("eval ./model --text absent.txt", ("file_not_found",)),
    ("eval ./model --text binary.txt", ("text_not_utf8",)),
    ("eval ./model --text one.txt", ("at least 2",)),
    ("eval ./model --text heldout.txt --context 513", ("context_exceeded",)),
    ("eval ./model --text heldout.txt --stride 600", ("window_invalid", "stride")),
    ("eval ./model --text heldout.txt --dtype int4", ("float32", "bfloat16")),
    ("eval ./model --against ./tiny --text heldout.txt", ("vocabulary_mismatch",)),
    ("eval ./tiny --text heldout.txt", ("tokenizer_missing",)),
    # generate and chat
    ("generate ./model --prompt a --temperature -1", ("0",)),
    ("generate ./model --prompt a --temperature inf", ("option_malformed", "finite")),
    ("generate ./model --prompt a --top-p 2", ("option_out_of_range",)),
    ("generate ./model --prompt a --top-k -1", ("0",)),
    ("generate ./model --prompt a --min-p 1.5", ("option_out_of_range", "min_p")),
    ("generate ./model --prompt a --max-tokens 0", ("1",)),
    ("generate ./model --prompt a --max-tokens many", ("--max-tokens",)),
    ("generate ./model --prompt a --repetition-penalty 0", ("option_out_of_range", "repetition_penalty")),
    ("generate ./model --prompt a --presence-penalty 3", ("option_out_of_range", "presence_penalty")),
    ("generate ./model --prompt a --logprobs 21", ("option_out_of_range", "logprobs", "20")),
    ("generate ./model --prompt a --seed 18446744073709551616", ("option_out_of_range", "seed")),
    ("generate ./tiny --prompt a", ("tokenizer_missing",)),
    ("chat ./dumb", ("template_missing",)),
    ("verify ./mdel", ("file_not_found",)),
    # others
    ("plan ./model --memory 4", ("'--memory': '4' is a number of bytes", "such as 4GB")),
    ("convert ./model ./new --to exl2", ("'--to': 'exl2' is not one of 'gguf'",)),
    ("imatrix ./model new/m.dat", ("output_invalid",)),
]


@pytest.mark.usefixtures("wrong", "out")
@pytest.mark.parametrize("command, words", MISTAKES, ids=[command for command, _ in MISTAKES])
def test_a_mistake_gets_one_sentence(command: str, words: tuple[str, ...], place: Path) -> None:
    refused(attar(command, "--json"), BAD_INPUT, *words, as_json=True)
    assert not (place / "new").exists()
    assert not list(place.glob(".*")), "a run that never began leaves nothing behind"


def test_a_text_that_the_context_ends_says_so() -> None:
    command = 'generate ./model --prompt "word" --ignore-eos --temperature 0 --json --max-tokens'
    long, short = attar(f"{command} 600"), attar(f"{command} 4")
    count = len(last_json(long)["token_ids"])
    assert count < 512
    (said,) = last_json(long)["warnings"]
    assert said == f"the context of 512 tokens is full: {count} of 600 tokens were generated"
    assert said in long.stderr
    assert last_json(short)["warnings"] == []
    assert "context" not in short.stderr


def test_a_prompt_longer_than_the_context() -> None:
    refused(attar("generate", "./model", "--prompt", "word " * 600), BAD_INPUT, "context of 512")


def test_a_prompt_on_stdin_that_is_no_text() -> None:
    refused(attar("generate", "./model", stdin=b"abc\xff"), BAD_INPUT, "text_not_utf8")


def test_out_of_memory_is_no_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def hungry(*_: object, **__: object) -> None:
        torch.empty(2**60)

    monkeypatch.setattr("attar.checkpoints.sources.hf.load", hungry)
    refused(attar("eval", "./model", "--text", "heldout.txt"), BAD_INPUT, "out of memory")


def test_a_bug_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def buggy(*_: object, **__: object) -> None:
        raise RuntimeError("shapes differ")

    monkeypatch.setattr("attar.checkpoints.sources.hf.load", buggy)
    with pytest.raises(RuntimeError, match="shapes differ"):
        CliRunner().invoke(app, ["eval", "./model", "--text", "heldout.txt"], catch_exceptions=False)


@pytest.mark.parametrize("command", ["compress demo new --calib self", "eval demo --text heldout.txt"])
def test_ctrl_c(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("attar.compression.runs.pipeline.compress_request", interrupted)
    monkeypatch.setattr("attar.evaluation.report.evaluate", interrupted)
    result = attar(command, "--json")
    refused(result, INTERRUPTED, "interrupted", as_json=True)
    assert ("--restart" in result.stderr) == command.startswith("compress")


# What an output says about itself


def test_gpt2_outputs_say_that_only_attar_loads_them(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    hidden = 32
    norms = [f"{at}.{part}" for at in ("h.0.ln_1", "h.0.ln_2", "ln_f") for part in ("weight", "bias")]
    tensors = {"wte.weight": torch.randn(64, hidden), "wpe.weight": torch.randn(32, hidden)}
    tensors |= {name: torch.ones(hidden) for name in norms}
    for name, times in (("attn.c_attn", 3), ("attn.c_proj", 1), ("mlp.c_fc", 4)):
        tensors |= {f"h.0.{name}.weight": torch.randn(hidden, times * hidden)}
        tensors |= {f"h.0.{name}.bias": torch.zeros(times * hidden)}
    tensors |= {"h.0.mlp.c_proj.weight": torch.randn(4 * hidden, hidden), "h.0.mlp.c_proj.bias": torch.zeros(hidden)}
    config = {"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", "vocab_size": 64, "n_positions": 32,
              "n_embd": hidden, "n_layer": 1, "n_head": 2}  # fmt: skip
    (tmp_path / "gpt2").mkdir()
    (tmp_path / "gpt2" / "config.json").write_text(json.dumps(config))
    save_file(tensors, tmp_path / "gpt2" / "model.safetensors")
    result = attar("compress", str(tmp_path / "gpt2"), str(tmp_path / "out"), "--recipe", "rtn-w4g32", "--json")
    assert last_json(result)["notes"] != []
    assert "loads in attar only" in result.stderr
    card = (tmp_path / "out" / "README.md").read_text()
    assert "loads in attar only" in card
    assert "vLLM" not in card


def test_asymmetric_outputs_say_how_transformers_loads_them(tmp_path: Path) -> None:
    result = attar("compress", "./model", str(tmp_path / "out"), "--recipe", "rtn-w4g128-asym")
    assert "CompressedTensorsConfig(dequantize=True)" in result.stderr
    assert "CompressedTensorsConfig(dequantize=True)" in (tmp_path / "out" / "README.md").read_text()


def test_heads_are_in_the_table_and_the_notes(tmp_path: Path) -> None:
    out = str(tmp_path / "out")
    result = attar(
        "compress", "./model", out, "--recipe", "rtn-w4g128", "--head", "int8", "--eval", "heldout.txt", "--json"
    )
    done = last_json(result)
    assert "rtn-w4g128, head w8 " in result.stdout
    assert done["head"] == "w8"
    assert "packed embeddings of tied models" in result.stderr
    card = (tmp_path / "out" / "README.md").read_text()
    assert done["notes"][0] in card
    assert "the LM head in `w8`" in card
    assert (
        last_json(attar("eval", out, "--against", "./model", "--text", "heldout.txt", "--json")) == done["evaluation"]
    )
    assert "w8 x 1" in attar("inspect", out).stdout
    assert last_json(attar("verify", out, "--json"))["ok"] is True
    assert attar("generate", out, "--prompt", "It was", "--max-tokens", "4").exit_code == 0


def test_overwrite_replaces(tmp_path: Path) -> None:
    new = str(tmp_path / "new")
    first = last_json(attar("compress", "./model", new, "--recipe", "rtn-w4g128", "--json"))
    second = last_json(attar("compress", "./model", new, "--recipe", "rtn-w3g128", "--overwrite", "--json"))
    assert second["bytes"] < first["bytes"]
    assert last_json(attar("inspect", new, "--json"))["bytes"] == second["bytes"]


def test_a_terminal_that_cannot_show_a_character_shows_the_rest(tmp_path: Path) -> None:
    arguments = ["compress", "./model", str(tmp_path / "óut"), "--recipe", "rtn-w4g128", "--json"]
    result = CliRunner(charset="ascii").invoke(app, arguments)
    assert "?ut: " in result.stdout
    assert last_json(result)["path"] == arguments[2]


# Processes


def process(*args: str, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    command = [*ATTAR, *args]
    return subprocess.run(command, env={**os.environ, **(env or {})}, capture_output=True, text=True)


def test_help_and_version_load_no_torch() -> None:
    code = (
        "import sys\nfrom attar.cli.main import app\n"
        "for args in ['--help'], ['--version'], ['compress', '--help']:\n"
        "    app(args, standalone_mode=False)\n"
        "sys.exit(bool({'torch', 'numpy', 'rich', 'huggingface_hub', 'attar._native'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True).returncode == 0


@pytest.mark.parametrize("columns", ["20", "80"])
@pytest.mark.parametrize("command", COMMANDS)
def test_help(command: str, columns: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    result = attar(command, "--help")
    assert result.exit_code == 0
    assert "--json" in result.stdout


def test_help_says_which_commands_take_a_gguf_file() -> None:
    for command, taken in (("generate", True), ("plan", True), ("compress", True), ("finetune", False)):
        assert ("a GGUF file" in " ".join(attar(command, "--help").stdout.split())) is taken


def test_the_list_of_commands_is_whole_and_fits() -> None:
    listed = attar("--help").stdout.partition("Commands:")[2]
    assert [line.split()[0] for line in listed.splitlines() if line.strip()] == list(COMMANDS)
    assert "..." not in listed


def test_a_reader_of_stdout_that_leaves_ends_the_run_quietly() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "wb") as stdout:
        done = subprocess.run(
            [*ATTAR, "inspect", "demo"], stdout=stdout, stderr=subprocess.PIPE, text=True, check=False
        )
    assert done.returncode == PIPE_CLOSED
    assert done.stderr == ""


def test_an_interrupt_in_the_middle_of_a_text() -> None:
    command = [*ATTAR, "generate", "demo", "--prompt", "The", "--max-tokens", "500", "--ignore-eos", "--quiet"]
    slow = os.environ | {"ATTAR_KERNELS": "ref"}  # so that the text does not end before it is interrupted

    def interruptible() -> None:  # also where these tests run in the background, which shells keep interrupts from
        signal.signal(signal.SIGINT, signal.SIG_DFL)

    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, **pipes, env=slow, preexec_fn=interruptible) as running:
        assert running.stdout is not None
        assert running.stdout.read(1)
        running.send_signal(signal.SIGINT)
        _, stderr = running.communicate(timeout=60)
    assert running.returncode == INTERRUPTED
    assert stderr.decode().splitlines()[-1] == "attar: interrupted"


def test_bench_of_a_shape_and_of_a_model() -> None:
    small = ("--prompt", "16", "--gen", "3", "--json")
    of_shape = last_json(attar("bench", "--shape", "tiny", *small))
    assert of_shape["decode_tok_s"] > 0
    assert of_shape["scheme"] == "w4g128"
    assert last_json(attar("bench", "demo", *small))["bytes_per_token"] > 11_000_000
    assert attar("bench", *small).exit_code == 2
    assert attar("bench", "demo", "--shape", "tiny", *small).exit_code == 2

"""Make attar's checkpoint of random weights, with a tokenizer, for `bench/serving.py`. Runs in attar's environment.

    python bench/engines/make_attar.py --out FOLDER

The way a user takes: a bf16 model in the Llama-3.2-1B shape, compressed with `rtn-w4g128` and a head of int8, which is
nearest to the heads of the peers' files (llama.cpp's Q6_K has 6.56 bits a weight, OpenVINO's int8 has 8, this 8.125).

The tokenizer names all 128,256 tokens, each a short word, so that every token that the server sends is text and is
turned into text as it is for users. It cannot encode anything worth having: prompts go in as token ids.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from compress_memory import VOCAB, write_model
from contract import SHAPES

import attar

BOS, EOS = 128000, 128001  # those of the model's config


def save_tokenizer(folder: Path) -> None:
    spelled = {BOS: "<bos>", EOS: "<eos>"}
    tokenizer = Tokenizer(models.BPE(vocab={spelled.get(i, f"Ġw{i:x}"): i for i in range(VOCAB)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(spelled.values()))
    tokenizer.save(str(folder / "tokenizer.json"))
    special = {"bos_token": spelled[BOS], "eos_token": spelled[EOS]}
    (folder / "tokenizer_config.json").write_text(json.dumps(special))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=SHAPES["llama-3.2-1b"].layers, help="fewer, to try things out")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    args.out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=args.out.parent) as place:
        model, done = Path(place) / "model", Path(place) / "done"
        write_model(model, args.layers)
        save_tokenizer(model)
        attar.compress(model, done, recipe="rtn-w4g128", head="int8")
        shutil.rmtree(model)
        os.replace(done, args.out)


if __name__ == "__main__":
    main()

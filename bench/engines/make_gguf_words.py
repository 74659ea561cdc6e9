"""Copy a GGUF file and give it a vocabulary, for `bench/serving.py`. Runs in llama.cpp's environment.

    .venv-llamacpp/bin/python bench/engines/make_gguf_words.py --model FILE --out FILE

`make_gguf.py` writes files without one, which llama.cpp's server cannot answer from: it turns every token into text and
asks which tokens end a text. Here each token becomes a short word, as in the checkpoint that attar serves, and the two
that begin and end a text are control tokens. The tensors are the same bytes.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import gguf

BOS, EOS = 128000, 128001
REPLACED = ("GGUF.", "general.architecture", "tokenizer.")  # written by the writer itself, or below


def copy(source: gguf.GGUFReader, out: Path) -> None:
    architecture = source.fields["general.architecture"].contents()
    writer = gguf.GGUFWriter(out, architecture)
    for name, field in source.fields.items():
        if not name.startswith(REPLACED):
            writer.add_key_value(name, field.contents(), field.types[0])
    count = source.fields[f"{architecture}.vocab_size"].contents()
    words = [f"\u2581w{i:x}" for i in range(count)]
    kinds = [gguf.TokenType.NORMAL] * count
    for i, word in ((BOS, "<bos>"), (EOS, "<eos>")):
        words[i], kinds[i] = word, gguf.TokenType.CONTROL
    writer.add_tokenizer_model("llama")
    writer.add_token_list(words)
    writer.add_token_scores([0.0] * count)
    writer.add_token_types(kinds)
    writer.add_bos_token_id(BOS)
    writer.add_eos_token_id(EOS)
    writer.add_add_bos_token(False)
    for tensor in source.tensors:
        writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    partial = args.out.with_suffix(".partial")
    copy(gguf.GGUFReader(args.model), partial)
    os.replace(partial, args.out)


if __name__ == "__main__":
    main()

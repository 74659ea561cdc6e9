"""A GGUF file as a dense folder in bfloat16: what compressors start from where the original was never published here.

    python bench/dense.py FILE.gguf OUT

Every weight is the file's value, decoded and rounded to bfloat16. So a figure beside such a folder says what was lost
of the file, not of the model that the file was made from. Config, tokenizer and chat template come from the metadata.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

from attar.checkpoints.convert.from_gguf import config_json, write_tokenizer
from attar.checkpoints.folder import CONFIG, write_json
from attar.checkpoints.gguf import export
from attar.checkpoints.gguf.checkpoint import GgufCheckpoint
from attar.checkpoints.writer import ShardWriter, atomic_folder, plan_files
from attar.formats.scheme import Part


def dense(path: Path, out: Path) -> Path:
    """Write the values of a GGUF file to the folder `out`, and return it. A folder that is there already is kept.

    Raises ValueError where the file cannot be read.
    """
    if out.exists():
        return out
    out.parent.mkdir(parents=True, exist_ok=True)
    checkpoint = GgufCheckpoint.open(path, torch.bfloat16)
    names = list(export.tensor_names(checkpoint.config, checkpoint.has))
    layout = {name: Part("bfloat16", checkpoint.info(name).shape) for name in names}
    with atomic_folder(out, resumes=False) as work:
        with ShardWriter(work.out, plan_files(layout)) as writer:
            for name in names:
                writer.write(name, checkpoint.tensor(name))
            writer.finish()
        write_json(work.out / CONFIG, {**config_json(checkpoint), "dtype": "bfloat16"})
        write_tokenizer(checkpoint, work.out)
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("out", type=Path)
    args = parser.parse_args()
    print(dense(args.file, args.out))


if __name__ == "__main__":
    main()

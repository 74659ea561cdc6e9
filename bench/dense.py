"""A GGUF file as a dense folder in bfloat16: what compressors start from where the original was never published here.

    python bench/dense.py FILE.gguf OUT

Every weight is the file's value, decoded and rounded to bfloat16. So a figure beside such a folder says what was lost
of the file, not of the model that the file was made from. Config, tokenizer and chat template come from the metadata.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from torch import Tensor

from attar.checkpoints.convert.from_gguf import config_json, write_tokenizer
from attar.checkpoints.folder import CONFIG, write_json
from attar.checkpoints.gguf import export
from attar.checkpoints.gguf.checkpoint import GgufCheckpoint
from attar.checkpoints.writer import ShardWriter, atomic_folder, plan_files
from attar.formats.scheme import Part
from attar.model.families import read_config


def dense(path: Path, out: Path) -> Path:
    """Write the values of a GGUF file to the folder `out`, and return it. A folder that is there already is kept.

    Raises ValueError where the file cannot be read, and for a mixture of experts.
    """
    if out.exists():
        return out
    out.parent.mkdir(parents=True, exist_ok=True)
    checkpoint = GgufCheckpoint.open(path, torch.bfloat16)
    if checkpoint.config.experts is not None:
        raise ValueError(f"{path} is a mixture of experts, whose tensors are not taken apart here")
    exact, settings = GgufCheckpoint.open(path, torch.float32), config_json(checkpoint)
    folder = read_config(settings)
    names = list(export.tensor_names(checkpoint.config, checkpoint.has))

    def values(name: str) -> Tensor:
        """Return a tensor as the family's folders store it: Gemma's norms less one, GPT-2's matrices [in, out]."""
        module, _, part = name.rpartition(".")
        if part == "weight" and folder.norm_offset and export.is_norm(folder, module):
            return (exact.tensor(name) - folder.norm_offset).bfloat16()
        found = checkpoint.tensor(name)
        turned = part == "weight" and found.ndim == 2 and export.turned(folder, module)
        return found.T.contiguous() if turned else found

    shapes = {name: checkpoint.info(name).shape for name in names}
    layout = {
        name: Part("bfloat16", shape[::-1] if export.turned(folder, name.rpartition(".")[0]) else shape)
        for name, shape in shapes.items()
    }
    with atomic_folder(out, resumes=False) as work:
        with ShardWriter(work.out, plan_files(layout)) as writer:
            for name in names:
                writer.write(name, values(name))
            writer.finish()
        write_json(work.out / CONFIG, {**settings, "dtype": "bfloat16"})
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

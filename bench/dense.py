"""A GGUF file as a dense folder in bfloat16: what compressors start from where the original was never published here.

    python bench/dense.py FILE.gguf OUT

Every weight is the file's value, decoded and rounded to bfloat16. So a figure beside such a folder says what was lost
of the file, not of the model that the file was made from. It is `attar convert FILE.gguf OUT --to dense`, except that a
folder that is there already is kept.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from attar.checkpoints.convert.run import convert


def dense(path: Path, out: Path) -> Path:
    """Write the values of a GGUF file to the folder `out`, and return it. A folder that is there already is kept.

    Raises ValueError where the file cannot be read.
    """
    if not out.exists():
        out.parent.mkdir(parents=True, exist_ok=True)
        convert(path, out, to="dense", dtype="bfloat16")
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("out", type=Path)
    args = parser.parse_args()
    print(dense(args.file, args.out))


if __name__ == "__main__":
    main()

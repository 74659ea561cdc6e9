"""llama.cpp's rows of images against ours, from the same pairs of a GGUF model and its mmproj file.

    PYTHONPATH=src:. python bench/gguf_images.py [FOLDER ...] [--python .venv-llamacpp/bin/python]

attar writes each pair: of tiny random models of every family that has one, and of the folders given. Both sides take
the same pictures: `whole` is noise of a size that nothing resizes, `odd` is a smooth picture that each side resizes by
its own code. Printed are the numbers of rows and the relative difference |ours - theirs| / |theirs| (Frobenius). The
weights are fp16, and llama.cpp rounds the rows beside them to fp16 too, which `whole` shows.

`odd` differs where llama.cpp resizes otherwise than transformers, whom attar follows: it puts black margins around
pictures for Gemma 3 and Qwen-VL, where transformers stretches them, and it gives a picture of one Idefics3 tile a
second, equal one. LLaVA-1.5 has margins in both, here before and there after resizing.

For towers with a class token, llama.cpp at this version appends the class row behind the patches, but hands out
positions as if it came first, and leaves out the first patch's row in place of the class row (its issue 25814). `as
appended` compares with our rows computed in that wrong order, without the class row: where only this agrees, the file
is read alike, and the order is the difference. transformers has the class row first.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import tempfile
from pathlib import Path

import numpy as np
import torch
from llamacpp_logits import PYTHON, ROOT
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from attar.checkpoints.convert.run import convert
from attar.checkpoints.gguf import mmproj
from attar.checkpoints.gguf.file import GgufFile
from attar.checkpoints.sources import vision
from attar.formats.codecs import ggml_blocks
from attar.images.decoding import ImageSource, decode
from attar.images.settings import PixelSettings
from attar.model.vision.model import VisionModel
from tests.checkpoints.gguf.test_mmproj import KINDS, save


def tiny(kind: str, folder: Path) -> Path:
    """Write a tiny random model. llama.cpp's windows of Qwen2.5-VL have 112 pixels whatever a file says, so the model
    has them too, and pictures larger than one."""
    save(kind, folder)
    if kind == "qwen2_5_vl":
        for name, part, more in (("config.json", "vision_config", {"window_size": 112}),
                                 ("preprocessor_config.json", None, {"max_pixels": 1 << 16})):  # fmt: skip
            whole = json.loads((folder / name).read_text())
            (whole[part] if part else whole).update(more)
            (folder / name).write_text(json.dumps(whole))
    return folder


def pictures(settings: PixelSettings) -> dict[str, NDArray[np.uint8]]:
    """Noise of a size that is not resized, and a smooth picture of an odd one; uint8 [height, width, 3]."""
    area = settings.min_pixels and min(128 * 128, settings.max_pixels // 2)
    side = settings.edge or (settings.size or settings.crop or (int(area**0.5),))[0]
    noise = np.random.default_rng(0).integers(0, 256, (side, side, 3), dtype=np.uint8)
    y, x = np.mgrid[0:61, 0:83]
    smooth = np.stack((x + y, 2 * y, 255 - x), -1).clip(0, 255).astype(np.uint8)
    return {"whole": noise, "odd": smooth}


def encoded(model: VisionModel, file: Path, images: dict[str, NDArray[np.uint8]]) -> dict[str, Tensor]:
    """Our rows of images, each decoded as a server decodes it."""
    settings, found = vision.image_settings(file), {}
    assert settings is not None
    for name, pixels in images.items():
        with tempfile.SpooledTemporaryFile() as png:
            Image.fromarray(pixels).save(png, "PNG")
            png.seek(0)
            (image,) = decode(settings, (ImageSource.of_bytes(png.read()),))
        found[name] = model.encode(image)
    return found


def append_class(model: VisionModel, file: GgufFile) -> None:
    """Give the class token the last position, and every patch the one before its own."""

    def stored(name: str) -> Tensor:
        return ggml_blocks.decode(file.info(name).kind, file.read(name)).float().reshape(-1, model.config.hidden)

    positions = stored("v.position_embd.weight")
    model.tower.class_row = stored("v.class_embd")[0] + positions[-1]
    model.tower.positions = positions[:-1].contiguous()


def difference(ours: Tensor, theirs: Tensor) -> float | str:
    if ours.shape != theirs.shape:
        return f"{len(ours)} rows are not {len(theirs)}"
    return float((ours - theirs).norm() / theirs.norm())


def compared(file: Path, python: Path) -> dict[str, dict[str, object]]:
    """The figures of a pair by picture."""
    settings, tower = vision.image_settings(file), mmproj.path_of(file)
    model = vision.vision_of(file, torch.float32)
    assert settings is not None
    assert model is not None
    images, at = pictures(settings.pixels), file.with_suffix(".images.npz")
    out = file.with_suffix(".rows.npz")
    np.savez(at, **images)  # type: ignore[arg-type]
    child = ROOT / "bench/peers/llama_images.py"
    done = subprocess.run([python, child, file, tower, at, out], capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{child.name}: {done.stderr[-2000:]}")
    with np.load(out) as arrays:
        theirs = {name: torch.from_numpy(arrays[name]) for name in images}
    ours = encoded(model, file, images)
    found: dict[str, dict[str, object]] = {
        name: {"rows": len(ours[name]), "difference": difference(ours[name], theirs[name])} for name in images
    }
    if model.config.class_token:
        append_class(model, GgufFile(tower))
        for name, rows in encoded(model, file, images).items():
            found[name]["as appended"] = difference(rows[1:], theirs[name][:-1])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="*", type=Path, metavar="FOLDER")
    parser.add_argument("--python", type=Path, default=PYTHON, help="of llama.cpp's environment")
    args = parser.parse_args()
    if not args.python.exists():
        parser.error(f"there is no {args.python}: `make .venv-llamacpp/.installed` sets it up")
    found = {}
    with tempfile.TemporaryDirectory() as name:
        place = Path(name)
        models = [(kind, tiny(kind, place / kind)) for kind in (*KINDS, "llava_siglip")]
        for label, folder in models + [(each.name, each) for each in args.folders]:
            file = place / f"{label}.gguf"
            convert(folder, file, to="gguf")
            found[label] = compared(file, args.python)
            for picture, figures in found[label].items():
                shown = [f"{each:.1e}" if isinstance(each, float) else str(each) for each in figures.values()]
                print(f"{label:<14}{picture:<7}" + "  ".join(shown), flush=True)
    print(json.dumps(found))


if __name__ == "__main__":
    main()

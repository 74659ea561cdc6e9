"""VILA's three folders seen as one folder of LLaVA's layout, which `to_dense.py` writes to disk.

VILA-1.5 keeps its language model, vision tower and projector in `llm/`, `vision_tower/` and `mm_projector/`, each with
a config of its own, beside a config.json that says how they go together. They become one config.json, and tensors under
LLaVA's names. Two kinds of projector can be expressed:

* `mlp2x_gelu` is LLaVA's own, and transformers loads the output;
* `mlp_downsample` and `mlp_downsample_2x2_fix` compute the same: 2 x 2 patches are normalized and read at a time. No
  architecture of transformers has this, so the output has one of attar's, `LlavaDownsampleForConditionalGeneration`.

What changes the result and has no place in that layout is refused by name. No code of the folder is read. VILA's
prompts have `<image>` where an image stands; where the tokenizer has no such token it gets one, behind all others.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from attar.checkpoints.convert.dense import DenseFolder, Original
from attar.checkpoints.folder import CONFIG, GENERATION, Folder, read_config, write_json
from attar.checkpoints.receipts import receipt
from attar.checkpoints.sources.hf import Checkpoint
from attar.checkpoints.sources.vision import VisionFiles
from attar.checkpoints.strict_io import naming
from attar.formats.scheme import Part
from attar.images.settings import PREPROCESSOR
from attar.model.families import read_config as read_model
from attar.model.vision import assembly
from attar.model.vision.config import HALF, read_vision
from attar.model.vision.wrappers import COMMON_TEXTS, is_vila, vila_part
from attar.text.tokenizer import Tokenizer

LLM, TOWER, PROJECTOR = "llm", "vision_tower", "mm_projector"
PREFIXES: Mapping[str, str] = {LLM: "language_model.", TOWER: "vision_tower.", PROJECTOR: "multi_modal_projector."}
IMAGE = "<image>"
DOWNSAMPLE = {"layers.1": "norm", "layers.2": "linear_1", "layers.4": "linear_2"}
PROJECTORS: Mapping[str, tuple[str, Mapping[str, str]]] = {
    "mlp2x_gelu": ("llava", {"layers.0": "linear_1", "layers.2": "linear_2"}),
    "mlp_downsample": ("llava_downsample", DOWNSAMPLE),
    "mlp_downsample_2x2_fix": ("llava_downsample", DOWNSAMPLE),
}
"""By VILA's name: the `model_type` of the output, and the modules' names in it."""
ARCHITECTURES = {
    "llava": "LlavaForConditionalGeneration", "llava_downsample": "LlavaDownsampleForConditionalGeneration",
}  # fmt: skip
TOWERS: Mapping[str, tuple[str, str]] = {
    "siglip_vision_model": ("cls_patch", "full"), "clip_vision_model": ("patch", "default"),
}  # fmt: skip
"""By `model_type`: which rows VILA takes of all that the tower gives, and LLaVA's word for it."""
LOCAL = ("_name_or_path", "architectures", "auto_map", "dtype", "torch_dtype", "transformers_version")
"""Keys of a part's config that are not copied: paths and code, and what the whole config says."""
COPIED = (
    "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "vocab_size",
    "image_size", "patch_size", "model_type", "mm_projector_type",
)  # fmt: skip
"""Keys of a part's config that the outer config repeats."""


def is_vila_folder(path: Path) -> bool:
    """Return whether a folder has VILA's layout, by its config.json. Raises CheckpointError for a malformed one."""
    return (path / CONFIG).is_file() and is_vila(read_config(path / CONFIG))


def open_vila(path: Path, dtype: str | None = None) -> Checkpoint:
    """Open VILA's folder as a dense one of LLaVA's layout, whose tensors have `dtype`, None: their own.

    Raises ValueError where a part is missing, where parts do not fit together, and for what the layout cannot express.
    """
    of = Checkpoint.over(VilaFolder(path))
    original = Original("vila", {}, receipt.known(path))
    return Checkpoint.over(DenseFolder(of, dtype, original))


class VilaFolder(Folder):
    """The three folders as one. Reads as `Folder` does, and writes the files beside the weights on `carry`."""

    def __init__(self, path: Path) -> None:
        self.path, self.mapped = path, False
        self._outer = read_config(path / CONFIG)
        self._parts = {part: self._open(part) for part in PREFIXES}
        self.files = {f"{part}/{name}": file for part, own in self._parts.items() for name, file in own.files.items()}
        self._check_sizes()
        kind, modules = self._projector()
        self._stored = {
            prefix + _renamed(name, modules if part == PROJECTOR else {}): (part, name)
            for part, prefix in PREFIXES.items()
            for name in self._parts[part].names()
        }
        with naming(self._parts[LLM].path):
            loaded = Tokenizer.load(self._parts[LLM].path)
        known = loaded.token_to_id(IMAGE)
        if known is not None and known not in loaded.special_ids:
            raise self.error("tokenizer_unsupported", f"{IMAGE} is no special token of the tokenizer in {LLM}")
        self._tokenizer = None if known is not None else loaded.with_special(IMAGE)
        token = known if self._tokenizer is None else self._tokenizer.token_to_id(IMAGE)
        self.config = self._whole_config(kind, token)
        self._preprocessor = self._pixels()
        self._check_tower()

    # Tensors

    def names(self) -> tuple[str, ...]:
        return tuple(self._stored)

    def has(self, name: str) -> bool:
        return name in self._stored

    def info(self, name: str) -> Part:
        part, stored = self._stored[name]
        return self._parts[part].info(stored)

    def read(self, name: str, out: Tensor | None = None) -> Tensor:
        part, stored = self._stored[name]
        return self._parts[part].read(stored, out)

    def read_rows(self, name: str, start: int, stop: int) -> Tensor:
        part, stored = self._stored[name]
        return self._parts[part].read_rows(stored, start, stop)

    # Files beside them

    def generation(self) -> dict[str, Any] | None:
        return self._parts[LLM].generation()

    def carry_files(self) -> tuple[str, ...]:
        """Return the files that an output takes over. Raises CheckpointError as `Folder.carry_files`."""
        own = [name for name in super().carry_files() if _is_licence(name)]
        inner = self._parts[LLM].carry_files()
        if self._tokenizer is not None:  # its files are written anew
            inner = tuple(name for name in inner if _is_licence(name) or name == GENERATION)
        return (*own, *(f"{LLM}/{name}" for name in inner))

    def carry(self, names: Iterable[str], out: Path) -> None:
        inner = [name for name in names if name.startswith(f"{LLM}/")]
        super().carry([name for name in names if name not in inner], out)
        self._parts[LLM].carry([name.removeprefix(f"{LLM}/") for name in inner], out)
        if self._tokenizer is not None:
            self._tokenizer.save(out)
        write_json(out / PREPROCESSOR, self._preprocessor)

    # Reading

    def _open(self, part: str) -> Folder:
        """Open a part. Raises CheckpointError where it is missing, lies outside of the folder or is compressed."""
        key = f"{part}_cfg"
        with naming(self.path / CONFIG):
            name = vila_part(self._outer, key)
        place = self.path / name
        if not place.is_dir():
            raise self.error("checkpoint_incomplete", f"has no folder {name}, of which VILA's {key} speaks")
        if not place.resolve().is_relative_to(self.path.resolve()):
            raise self.error("file_unsafe", f"{name} is a link out of the folder")
        found = Folder(place, is_part=True)
        if found.config.get("quantization_config") is not None:
            said = f"{name} is compressed: `attar convert` reads VILA's folders in 16 or 32 bits, and `attar compress` "
            raise self.error("quantization_unsupported", said + "compresses what it writes")
        return found

    def _check_sizes(self) -> None:
        """Raise CheckpointError where the outer config contradicts a part's own."""
        for part, own in self._parts.items():
            stated: Any = self._outer.get(f"{part}_cfg")
            for key in COPIED if isinstance(stated, dict) else ():
                self._same(f"{part}_cfg: {key}", stated.get(key), f"{part}/{CONFIG}", own.config.get(key))
        for key, part in (("hidden_size", LLM), ("mm_hidden_size", TOWER)):
            size = self._parts[part].config.get("hidden_size")
            self._same(key, self._outer.get(key), f"hidden_size of {part}/{CONFIG}", size)

    def _same(self, key: str, stated: object, where: str, found: object) -> None:
        if stated is not None and found is not None and stated != found:
            said = f"{key} is {stated!r:.40} in {CONFIG}, and {found!r:.40} in {where}"
            raise self.error("checkpoint_mismatch", said)

    def _projector(self) -> tuple[str, Mapping[str, str]]:
        name = self._parts[PROJECTOR].config.get("mm_projector_type")
        if not isinstance(name, str) or name not in PROJECTORS:
            raise self._refused(f"the projector {name!r:.40}", PROJECTORS)
        return PROJECTORS[name]

    def _refused(self, what: str, known: Iterable[str]) -> Exception:
        return self.error("feature_unsupported", f"{what} is not supported: known are {', '.join(known)}")

    def _whole_config(self, kind: str, token: int | None) -> dict[str, Any]:
        """Return the config.json of LLaVA's layout. Raises CheckpointError for what it cannot express."""
        outer, text, tower = self._outer, self._parts[LLM].config, self._parts[TOWER].config
        if text.get("model_type") not in COMMON_TEXTS:
            raise self._refused(f"the language model {text.get('model_type')!r:.40}", COMMON_TEXTS)
        if (of_tower := tower.get("model_type")) not in TOWERS:
            raise self._refused(f"the tower {of_tower!r:.40}", TOWERS)
        rows, strategy = TOWERS[str(of_tower)]
        if outer.get("mm_vision_select_feature", rows) != rows:
            raise self._refused(f"mm_vision_select_feature other than {rows} with {of_tower}", [rows])
        for key in ("s2", "dynamic_s2", "mm_use_im_start_end", "ps3"):
            if outer.get(key):
                raise self._refused(f"{key} = {outer[key]!r:.40}", ["false"])
        if outer.get("vision_resolution") not in (None, -1, tower.get("image_size")):
            raise self._refused(f"vision_resolution = {outer['vision_resolution']!r:.40}", ["-1"])
        outside = ("dtype", "torch_dtype", "tie_word_embeddings")
        more: dict[str, Any] = {key: text[key] for key in outside if key in text}
        if kind == "llava_downsample":
            more["downsample_factor"] = 2
        return {
            "architectures": [ARCHITECTURES[kind]],
            "model_type": kind,
            "text_config": {key: value for key, value in text.items() if key not in LOCAL},
            "vision_config": {key: value for key, value in tower.items() if key not in LOCAL},
            "image_token_index": token,
            "projector_hidden_act": "gelu",
            "multimodal_projector_bias": True,
            "vision_feature_layer": outer.get("mm_vision_select_layer", -2),
            "vision_feature_select_strategy": strategy,
            **more,
        }

    def _pixels(self) -> dict[str, Any]:
        """Return the preprocessor_config.json that does what VILA does to an image."""
        tower = self._parts[TOWER]
        if not (tower.path / PREPROCESSOR).is_file():
            raise tower.error("checkpoint_incomplete", f"has no {PREPROCESSOR}")
        given, side = read_config(tower.path / PREPROCESSOR), tower.config.get("image_size")
        size = given.get("crop_size", given.get("size"))
        if size not in (side, {"height": side, "width": side}, {"shortest_edge": side}):
            said = f"image_size of {TOWER}/{CONFIG} is {side!r:.40}, and {PREPROCESSOR} makes images of {size!r:.60}"
            raise self.error("checkpoint_mismatch", said)
        ratio = self._outer.get("image_aspect_ratio") or "resize"
        if ratio not in ("resize", "pad"):
            raise self._refused(f"image_aspect_ratio = {ratio!r:.40}", ("resize", "pad"))
        numbers = ("image_mean", "image_std", "do_rescale", "rescale_factor", "do_normalize")
        return {
            "image_mean": list(HALF), "image_std": list(HALF),
            **{key: given[key] for key in numbers if given.get(key) is not None},
            "do_resize": True, "size": {"height": side, "width": side}, "do_center_crop": False,
            "do_pad": ratio == "pad",
            "resample": given.get("resample", 3) if ratio == "pad" else 3,  # Pillow's own, by which VILA resizes
        }  # fmt: skip

    def _check_tower(self) -> None:
        """Raise ValueError where tower and projector do not have the tensors that the config describes."""
        with naming(self.path):
            config = read_vision(self.config, read_model(self.config).hidden, self._preprocessor)
            assert config is not None, "the config has a tower"
            assembly.stored_dtypes(config, VisionFiles(self))


def _renamed(name: str, modules: Mapping[str, str]) -> str:
    module, _, part = name.rpartition(".")
    return f"{modules.get(module, module)}.{part}" if module else name


def _is_licence(name: str) -> bool:
    return re.match(r"LICEN[CS]E|NOTICE|USE_POLICY", name) is not None

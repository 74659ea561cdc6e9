"""A tiny random checkpoint in VILA's layout, written by torch and transformers, and its logits composed from them."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import save_file
from torch import Tensor, nn

from tests.images.test_placeholders import backend
from tests.model.vision import tiny

MEAN, STD = (0.5, 0.4, 0.3), (0.5, 0.25, 0.2)
IMAGE_SIZE, PATCH, HIDDEN, TOWER = 30, 4, 64, 32  # 7 patches a side: odd, and two pixels are left over
PROJECTORS = ("mlp2x_gelu", "mlp_downsample", "mlp_downsample_2x2_fix")


class DownSample(nn.Module):
    """VILA's merge of 2 x 2 patches, as `DownSampleBlock` computes it."""

    def forward(self, x: Tensor) -> Tensor:
        count, rows, columns = len(x), round(x.shape[1] ** 0.5), x.shape[2]
        grid = x.reshape(count, rows, rows, columns)
        if rows % 2:
            grid = torch.cat((grid, torch.zeros(count, 1, rows, columns)), 1)
            grid = torch.cat((grid, torch.zeros(count, rows + 1, 1, columns)), 2)
        rows = grid.shape[1]
        wide = grid.reshape(count, rows, rows // 2, 2 * columns).permute(0, 2, 1, 3)
        merged = wide.reshape(count, rows // 2, rows // 2, 4 * columns).permute(0, 2, 1, 3)
        return merged.reshape(count, -1, 4 * columns)


def _projector(kind: str) -> nn.Sequential:
    if kind == "mlp2x_gelu":
        return nn.Sequential(nn.Linear(TOWER, HIDDEN), nn.GELU(), nn.Linear(HIDDEN, HIDDEN))
    linears = nn.Linear(4 * TOWER, HIDDEN), nn.GELU(), nn.Linear(HIDDEN, HIDDEN)
    return nn.Sequential(DownSample(), nn.LayerNorm(4 * TOWER), *linears)


@dataclass(eq=False)
class Vila:
    """The three models, and the folder that holds them."""

    path: Path
    llm: Any
    tower: Any
    projector: nn.Sequential
    class_token: bool

    @torch.inference_mode()
    def rows(self, pixels: Tensor) -> Tensor:
        """Return the rows [rows, I] of one image of normalised pixels [3, H, W]."""
        hidden = self.tower(pixels[None], output_hidden_states=True).hidden_states[-2]
        return self.projector(hidden[:, int(self.class_token) :])[0]  # type: ignore[no-any-return]

    @torch.inference_mode()
    def logits(self, ids: list[int], token: int, pixels: list[Tensor]) -> Tensor:
        """Return logits [N, V] of a prompt, in which `token` stands for each row of each image."""
        at = [number for number, each in enumerate(ids) if each == token]
        known = torch.tensor([0 if each == token else each for each in ids])
        rows = self.llm.model.embed_tokens(known)
        if at:
            rows[at] = torch.cat([self.rows(each) for each in pixels])
        return self.llm(inputs_embeds=rows[None], use_cache=False).logits[0]  # type: ignore[no-any-return]


def put(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value))


def change(path: Path, **changes: Any) -> None:
    """Change keys of a JSON file; None takes a key out."""
    value = json.loads(path.read_text()) | changes
    put(path, {key: each for key, each in value.items() if each is not None})


def write(
    path: Path, projector: str = "mlp_downsample", tower: str = "siglip", known: bool = False, ratio: str = "resize"
) -> Vila:
    """Write a checkpoint of VILA; `known`: its tokenizer has the image's token."""
    torch.manual_seed(0)
    tokens = backend()
    text = json.loads(tokens.to_str())
    if not known:  # a name that says nothing, in the place of the token's
        said = json.dumps(text).replace('"<image>"', '"<unused>"')
        text = json.loads(said)
    vocab = tokens.get_vocab_size()
    sizes = {**tiny.TEXT, "vocab_size": vocab, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 3}
    llm = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes)).eval()
    seen = {**tiny.SIGLIP, "image_size": IMAGE_SIZE, "patch_size": PATCH}
    if tower == "siglip":
        eyes: Any = transformers.SiglipVisionModel(transformers.SiglipVisionConfig(**seen)).eval()
    else:
        eyes = transformers.CLIPVisionModel(transformers.CLIPVisionConfig(**seen, projection_dim=8)).eval()
    hands = _projector(projector).eval()
    for each in (llm, eyes, hands):
        tiny._randomize(each)
    transformers.utils.logging.disable_progress_bar()
    llm.save_pretrained(path / "llm", max_shard_size="60KB")
    put(path / "llm" / "tokenizer.json", text)
    put(path / "llm" / "tokenizer_config.json", {"bos_token": "<s>", "eos_token": "</s>", "chat_template": TEMPLATE})
    eyes.save_pretrained(path / "vision_tower")
    pixels = {"image_mean": MEAN, "image_std": STD, "resample": 3, "rescale_factor": 1 / 255, "do_resize": True}
    size = {"height": IMAGE_SIZE, "width": IMAGE_SIZE}
    own = {"size": size} if tower == "siglip" else {"size": {"shortest_edge": IMAGE_SIZE}, "crop_size": size}
    put(path / "vision_tower" / "preprocessor_config.json", {**pixels, **own})
    (path / "mm_projector").mkdir()
    save_file(
        {f"layers.{name}": each.contiguous() for name, each in hands.state_dict().items()},
        path / "mm_projector" / "model.safetensors",
    )
    put(path / "mm_projector" / "config.json", {"mm_projector_type": projector, "model_type": "v2l_projector"})
    parts = {f"{part}_cfg": json.loads((path / part / "config.json").read_text()) for part in
             ("llm", "vision_tower", "mm_projector")}  # fmt: skip
    put(path / "config.json", {
        "_name_or_path": "./vlm", "architectures": ["LlavaLlamaModel"], "model_type": "llava_llama", "s2": False,
        "hidden_size": HIDDEN, "mm_hidden_size": TOWER, "image_aspect_ratio": ratio, "vision_resolution": -1,
        "mm_vision_select_feature": "cls_patch" if tower == "siglip" else "patch", "mm_vision_select_layer": -2,
        "mm_use_im_start_end": False, "mm_use_im_patch_token": False, "resume_path": "./vlm", **parts,
    })  # fmt: skip
    (path / "modeling_vila.py").write_text("raise SystemExit('code of a model ran')\n")
    (path / "LICENSE").write_text("free\n")
    return Vila(path, llm, eyes, hands, tower == "clip")


TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }}: {% if message['content'] is string %}{{ message['content'] }}"
    "{% else %}{% for part in message['content'] %}{% if part['type'] == 'image' %}<image>\n"
    "{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}</s>\n{% endfor %}assistant:"
)

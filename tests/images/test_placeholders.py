"""Prompts with images have the token ids of transformers' processors."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import AddedToken, decoders, models, pre_tokenizers, trainers
from tokenizers import Tokenizer as Backend

from attar.errors import UserError
from attar.images.decoding import ImageSource, decode
from attar.images.placeholders import Placeholders
from attar.images.settings import ImageSettings, read_settings
from attar.text.tokenizer import Tokenizer
from tests.images import oracle

Image = pytest.importorskip("PIL.Image", reason="needs Pillow, of the extra [vision]")
from tests.images.test_decoding import file, picture  # noqa: E402

SPECIALS = [
    "<s>", "</s>", "<unk>", "<pad>", "<extra>", "<image>", "<start_of_image>", "<end_of_image>",
    "<fake_token_around_image>", "<global-img>", *(f"<row_{row}_col_{column}>" for row in (1, 2) for column in (1, 2)),
]  # fmt: skip
"""The image token has the id 5; rows and columns beyond 2 are no tokens, and are written as text."""
TEXT = "User: what is this?\n\nAssistant: a cat.\n\n\nrow_3_col_1 crops to help you see better\n"
SIZES = [(64, 64), (100, 37), (37, 100), (33, 200), (5, 600)]
PROMPTS = ["{}", "User: {} what?\n{}\n\n{} and\n", "\n{}\n\n{}"]


def backend() -> Backend:
    made = Backend(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=[AddedToken(name, special=True, normalized=False) for name in SPECIALS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False,
    )  # fmt: skip
    made.train_from_iterator([TEXT] * 20, trainer)
    return made


def reference(case: str, own: Backend, settings: ImageSettings) -> Any:
    """Return transformers' processor of a case."""
    from transformers import PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=own, bos_token="<s>", eos_token="</s>", pad_token="<pad>",
        extra_special_tokens={
            "image_token": "<image>", "boi_token": "<start_of_image>", "eoi_token": "<end_of_image>",
        },
    )  # fmt: skip
    family = oracle.model_type(case)
    name, options = {
        "idefics3": ("idefics3.processing_idefics3.Idefics3Processor", {"image_seq_len": settings.tile_rows}),
        "smolvlm": ("idefics3.processing_idefics3.Idefics3Processor", {"image_seq_len": settings.tile_rows}),
        "llava": ("llava.processing_llava.LlavaProcessor", {"patch_size": 8}),
        "llava_next": ("llava_next.processing_llava_next.LlavaNextProcessor", {"patch_size": 8}),
        "qwen2_vl": ("qwen2_vl.processing_qwen2_vl.Qwen2VLProcessor", {}),
        "gemma3": ("gemma3.processing_gemma3.Gemma3Processor", {"image_seq_length": settings.tile_rows}),
    }[family]
    if family.startswith("llava"):
        full = case == "llava_siglip"
        options |= {"vision_feature_select_strategy": "full" if full else "default",
                    "num_additional_image_tokens": 0 if full else 1}  # fmt: skip
    module, _, kind = name.rpartition(".")
    made = getattr(importlib.import_module(f"transformers.models.{module}"), kind)
    made.check_argument_for_proper_class = lambda *_: None  # a processor of images without torchvision
    if family == "qwen2_vl":
        made.get_attributes = classmethod(lambda cls: ["image_processor", "tokenizer"])
    return made(image_processor=oracle.processor(case), tokenizer=tokenizer, **options)


@pytest.mark.parametrize("case", oracle.CASES)
def test_token_ids_are_those_of_transformers(case: str, tmp_path: Path) -> None:
    settings = read_settings(oracle.write(case, tmp_path))
    assert settings is not None
    own = backend()
    places = Placeholders(settings, Tokenizer(own))
    known = reference(case, backend(), settings)
    for seed, template in enumerate(PROMPTS):
        count = template.count("{}")
        pictures = [picture(*SIZES[(seed + at) % len(SIZES)], seed) for at in range(count)]
        images = decode(settings, [ImageSource.of_bytes(file(each)) for each in pictures])
        rendered = template.format(*[places.place] * count)
        ids = Tokenizer(own).encode_chat(places.expand(rendered, images))
        given = [[each] for each in pictures] if case.startswith(("idefics3", "smolvlm")) and count == 1 else [pictures]
        wanted = known(images=given if case.startswith(("idefics3", "smolvlm", "gemma3")) else pictures,
                       text=[rendered], add_special_tokens=False)["input_ids"][0]  # fmt: skip
        assert ids == np.asarray(wanted).tolist()
        assert ids.count(settings.image_token) == sum(image.rows for image in images)


def test_a_template_without_a_place_for_each_image_is_refused(tmp_path: Path) -> None:
    settings = read_settings(oracle.write("gemma3", tmp_path))
    assert settings is not None
    places = Placeholders(settings, Tokenizer(backend()))
    images = decode(settings, [ImageSource.of_bytes(file(picture(8, 8)))])
    for rendered in ("", "<image>", "<start_of_image><start_of_image>"):
        with pytest.raises(UserError) as caught:
            places.expand(rendered, images)
        assert caught.value.code == "template_failed"


def test_the_image_token_must_be_special(tmp_path: Path) -> None:
    settings = read_settings(oracle.write("llava", tmp_path, image_token_index=300))
    assert settings is not None
    with pytest.raises(UserError) as caught:
        Placeholders(settings, Tokenizer(backend()))
    assert caught.value.code == "config_invalid"

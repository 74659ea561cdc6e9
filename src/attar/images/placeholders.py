"""The tokens of images in a prompt: where a chat template writes one, the family's run of markers and image tokens.

The expansion is of the rendered text, before it is tokenized, as in transformers' processors: so token ids are equal,
also where a marker's line breaks merge with those of the text around it.
"""

from __future__ import annotations

from collections.abc import Sequence

from attar.errors import UserError
from attar.images.settings import ImageSettings
from attar.protocol.images import ImageInput
from attar.text.tokenizer import Tokenizer

_AROUND, _GLOBAL = "<fake_token_around_image>", "<global-img>"


class Placeholders:
    """Texts of the image tokens of one model. Raises UserError (`config_invalid`) where the tokenizer lacks one."""

    def __init__(self, settings: ImageSettings, tokenizer: Tokenizer) -> None:
        self.settings, self._tokenizer = settings, tokenizer
        self.image, self.place = self._text(settings.image_token), self._text(settings.place_token)
        self._end = "" if settings.end_token is None else self._text(settings.end_token)

    def _text(self, token: int) -> str:
        """Return the text of a special token."""
        if token not in self._tokenizer.special_ids:  # else a user's text could become one
            raise UserError("config_invalid", f"the image token {token} is no special token of the tokenizer")
        return self._tokenizer.id_to_bytes(token).decode("utf-8", "replace")

    def expand(self, rendered: str, images: Sequence[ImageInput]) -> str:
        """Return a rendered prompt with each image's tokens in its place.

        Raises UserError (`template_failed`) where the template has not written one place for each image.
        """
        before, *behind = rendered.split(self.place)
        if len(behind) != len(images):
            message = f"the chat template has {len(behind)} places for {len(images)} images"
            raise UserError("template_failed", message)
        pieces = [before]
        for image, text in zip(images, behind, strict=True):
            pieces += [self.of(image), text]
        return "".join(pieces)

    def of(self, image: ImageInput) -> str:
        """Return the text of one image's tokens."""
        family = self.settings.pixels.family
        if family == "gemma3":
            return f"\n\n{self.place}{self.image * image.rows}{self._end}\n\n"
        if family != "idefics3":
            return self.image * image.rows
        run = self.image * self.settings.tile_rows
        rows, columns = image.grid
        tiles = "".join(
            "".join(f"{_AROUND}<row_{row}_col_{column}>{run}" for column in range(1, columns + 1)) + "\n"
            for row in range(1, rows + 1)
        )
        return f"{tiles}{chr(10) if tiles else ''}{_AROUND}{_GLOBAL}{run}{_AROUND}"

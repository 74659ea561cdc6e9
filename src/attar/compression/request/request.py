"""A request to `compress` as pure values, not checked against a model (`resolve` does that)."""

from __future__ import annotations

import math
from dataclasses import KW_ONLY, dataclass
from pathlib import Path

from attar.compression.calibration.amount import Amount, Calibration, count_sequences, is_drawn
from attar.compression.outputs.tower_schemes import TOWER_SCHEMES, UNCHANGED
from attar.compression.recipe.recipe import Recipe
from attar.compression.recipe.recipe_file import load_recipe
from attar.errors import UserError
from attar.formats.scheme import Scheme


@dataclass(frozen=True, slots=True)
class Target:
    """One target of the compression: `bits` a weight of the blocks' linears that no override decides about, `size` in
    bytes of all weight files, or the mean `kl` on the tokens that allocation measures on. `candidates` are the schemes
    to choose among; without it they follow from the recipe."""

    bits: float | None = None
    size: int | None = None
    kl: float | None = None
    candidates: tuple[Scheme, ...] | None = None

    def __post_init__(self) -> None:
        given = list(self.to_dict().values())
        if len(given) != 1:
            raise UserError("option_conflict" if given else "option_missing", "give one target: bits, size or KL")
        if not given[0] > 0 or not math.isfinite(given[0]):
            raise UserError("target_invalid", f"a target is a positive number, not {given[0]}")

    def to_dict(self) -> dict[str, float]:
        """Return the target value under its name, for the receipt, which stores the candidates elsewhere."""
        pairs = (("bits", self.bits), ("size", self.size), ("kl", self.kl))
        return {name: value for name, value in pairs if value is not None}


def parse_candidates(text: str) -> tuple[Scheme, ...]:
    """Parse schemes by name, with commas between. Raises ValueError on an unknown one."""
    return tuple(Scheme.parse(name.strip()) for name in text.split(","))


@dataclass(frozen=True)
class CompressionRequest:
    """Compress the checkpoint `src` (folder, GGUF file, Hub id or `demo`) into the folder `dst`, or the file, if it
    ends in .gguf.

    `recipe` is a name such as `gptq-w4g128`, a YAML file, or a Recipe. Of several names, or `best-w4g128`, the one
    closest to the original on calibration text set aside is kept (`best`); of `ablate-` with a name, the steps that
    help there. `head` is the scheme of the LM head, whatever the recipe says of it: `bf16` (unchanged), `int8`, `int4`,
    or a scheme of weights alone. With a `target`, each linear gets the candidate scheme that `allocate` chooses, by
    default the recipe's with other bits. An output that misses a target of KL is made anew with more bits, twice at
    most, where there are more to choose. If all miss it, the nearest is kept.

    `calibration` is a text file, token ids [S][L], or `self` for text that the model writes: `samples` sequences of
    `length` tokens. Recipes that only round need none. It is followed by `drawn` sequences that the model writes. The
    given text alone chooses between recipes or bits and judges tuning. `calib_images` is a folder of images with texts
    (`images.pairs`); at most `samples` of them follow the text, each in a sequence of its own. `imatrix` is an
    importance matrix for a GGUF file, which weighs errors by it; calibration alone gives one. `evaluation` is a
    held-out text file on whose first `eval_tokens` the cost is measured; `evaluation_images` is a folder of images with
    held-out texts, behind which it is measured as well.

    The vision tower and projector of a vision-language model are stored as `vision` says: `16bit` (as they are), `w8`
    or `w8a8`, rounded to nearest.

    With `requantize` the source may be compressed itself, in any format that attar reads: its decoded values are
    compressed then, and are the original in every measurement. An output file has at most `max_shard_bytes`; None:
    5 GB, and a GGUF file of any size.

    With `as_draft` the receipt says that the output drafts for its source.

    On a `device` that is not a CPU each block is moved there, run and solved there, and the result comes back to be
    written (`device_placement`); the cost is measured there too, in bfloat16. At most `calib_memory` bytes of
    calibration activations are held in memory. A killed run resumes, unless `resume` is false.

    Raises ValueError where these values do not go together.
    """

    src: str | Path
    dst: str | Path
    _: KW_ONLY
    recipe: str | Path | Recipe = "gptq-w4g128"
    head: str | None = None
    vision: str = UNCHANGED
    target: Target | None = None
    calibration: Calibration | None = None
    samples: int = 128
    length: int = 512
    seed: int = 0
    drawn: int = 0
    calib_images: Path | None = None
    imatrix: str | Path | None = None
    evaluation: str | Path | None = None
    evaluation_images: Path | None = None
    eval_tokens: int | None = None
    device: str = "cpu"
    calib_memory: int = 2 << 30
    max_shard_bytes: int | None = None
    overwrite: bool = False
    resume: bool = True
    requantize: bool = False
    as_draft: bool = False

    def __post_init__(self) -> None:
        drawn = self.amount.drawn  # checked by `Amount`
        if not str(self.dst):  # an unset shell variable; Path would mean the current folder
            raise UserError("output_invalid", "the output's name is empty: give a folder to write")
        if drawn and (self.calibration is None or is_drawn(self.calibration)):
            raise UserError(
                "calibration_missing",
                "text is drawn to go with a calibration text: give one, or more samples of `self`",
            )
        if self.calib_images is not None and self.calibration is None:
            raise UserError(
                "calibration_missing", "images go with a calibration text: give --calib a text file, or `self`"
            )
        if self.vision not in TOWER_SCHEMES:
            known = ", ".join(TOWER_SCHEMES)
            raise UserError("name_unknown", f"a vision tower is stored as {known}, not {self.vision!r}")
        if self.vision != UNCHANGED and self.to_file:
            raise UserError(
                "option_conflict",
                f"--vision {self.vision}: towers beside GGUF files are dense: give a folder as output",
            )
        if self.imatrix is not None and not self.to_file:
            raise UserError(
                "option_conflict", "an importance matrix is for GGUF files: give an output that ends in .gguf"
            )

    @property
    def path(self) -> Path:
        """Return the path of the output."""
        return Path(self.dst)

    @property
    def to_file(self) -> bool:
        """Return whether the output is a GGUF file, not a folder."""
        return self.path.suffix.lower() == ".gguf"

    def planned(self, recipe: str | Path | Recipe) -> Recipe:
        """Return a recipe for this output: with the request's head, and with the mix of a file. Raises ValueError for
        unknown words, and where the output cannot be of its kind."""
        plan = recipe if isinstance(recipe, Recipe) else load_recipe(recipe)
        if self.head is not None:
            plan = plan.with_head(self.head)
        if plan.mix is not None and not self.to_file:
            raise UserError(
                "output_invalid",
                f"{plan.name} is a mix of GGUF files: give an output that ends in .gguf, not {self.path}",
            )
        if self.to_file and (plan.pruning is not None or plan.structured is not None):
            raise UserError(
                "gguf_inexpressible",
                f"{plan.name} writes a folder, not a GGUF file: give an output that does not end in .gguf",
            )
        return plan.for_file() if self.to_file else plan

    def require_apart(self, source: Path) -> None:
        """Raise ValueError where the output would replace the model at `source`."""
        if source.resolve().is_relative_to(self.path.resolve()):
            message = f"{self.dst} would replace the model that it is made from: choose another output"
            raise UserError("output_is_source", message)

    @property
    def amount(self) -> Amount:
        """Return the amount of calibration text to use."""
        return Amount(self.samples, self.length, self.seed, self.drawn)

    @property
    def given(self) -> int | None:
        """Return the maximal number of given calibration sequences; None without any."""
        return None if self.calibration is None else count_sequences(self.calibration, self.amount)

    @property
    def sequences(self) -> int | None:
        """Return the number of sequences including those that the model writes; None without any."""
        return None if self.given is None else self.given + self.drawn


def default_recipe(dst: str | Path, as_draft: bool = False) -> str:
    """Return the recipe for an output where none is named. One for drafts reads no text: it is made in seconds."""
    if Path(dst).suffix.lower() == ".gguf":
        return "q4_k_s" if as_draft else "q4_k_m"
    return "hqq-w4g64" if as_draft else "gptq-w4g128"


def default_head(dst: str | Path, as_draft: bool) -> str | None:
    """Return the scheme of the LM head where none is named; None for the recipe's own. A draft reads the whole head."""
    return "w4g64" if as_draft and Path(dst).suffix.lower() != ".gguf" else None

"""Speculative decoding of a TensorRT-LLM configuration, as `--draft` and `--draft-tokens`.

    tensorrt_llm_draft_model_name      --draft: a model of this name, unless --draft is given
    num_draft_tokens                   --draft-tokens; an input of this name is a request's own limit
    decoding_mode: lookahead           --draft lookahead
    decoding_mode: medusa, eagle, ...  a warning: the heads are in the engine, and --draft takes their folder

None of these is refused, because attar's drafts change no text. The names are those of `tensorrt_llm_bls` and
`tensorrt_llm` in triton-inference-server/tensorrtllm_backend.
"""

from __future__ import annotations

from collections.abc import Mapping

from attar.errors import UserError
from attar.integrations.triton_server.pbtxt import Message
from attar.protocol.speculation import MAX_DRAFT_TOKENS

TARGET, DRAFT, COUNT = "tensorrt_llm_model_name", "tensorrt_llm_draft_model_name", "num_draft_tokens"
SHAPES = ("medusa_choices", "eagle_choices")
WINDOWS = ("lookahead_window_size", "lookahead_ngram_size", "lookahead_verification_set_size")
PARAMETERS = frozenset({TARGET, DRAFT, COUNT, *SHAPES, *WINDOWS})
LOOKAHEAD = "lookahead"
MODES = (LOOKAHEAD, "medusa", "eagle", "redrafter", "explicit_draft_tokens", "external_draft_tokens")
"""Values of `decoding_mode` that ask for speculative decoding."""


class Speculation:
    """What a configuration's `parameters` and inputs ask for, as options, notes and warnings."""

    def __init__(self, root: Message, parameters: Mapping[str, str]) -> None:
        """Read a configuration. Raises UserError for a number of drafts that is none."""
        self.options: dict[str, int | str] = {}
        self.notes: list[str] = []
        self.warnings: list[str] = []
        mode, draft = parameters.get("decoding_mode", ""), parameters.get(DRAFT, "")
        if parameters.get(TARGET):
            self.notes.append(f"{TARGET}: the target is the model that `attar serve` is given")
        if draft:
            self.options["draft"] = draft
            self.warnings.append(
                f"{DRAFT}: {draft[:80]!r} is taken for a folder, file or Hub id; else name it with --draft"
            )
        elif mode == LOOKAHEAD:
            self.options["draft"] = LOOKAHEAD
        elif mode in MODES:
            self.warnings.append(
                f"decoding_mode: {mode}: drafts are made by --draft FOLDER, of a head or a model: those of the engine "
                "cannot be read"
            )
        if text := parameters.get(COUNT, ""):
            self._count(text)
        self._shapes(parameters)
        if any(each.text("name") == COUNT for each in root.messages("input")):
            self.notes.append(f"{COUNT}: a request limits its drafts by `speculation.max_tokens`")

    def _count(self, text: str) -> None:
        if not text.isdecimal() or len(text) > 18:
            raise UserError("option_malformed", f"{COUNT}: expected a number, not {text[:80]!r}")
        if (count := int(text)) > MAX_DRAFT_TOKENS:
            self.warnings.append(f"{COUNT}: {count} drafts: a step has {MAX_DRAFT_TOKENS} at most")
        self.options["draft-tokens"] = min(count, MAX_DRAFT_TOKENS)

    def _shapes(self, parameters: Mapping[str, str]) -> None:
        for name in SHAPES:
            if parameters.get(name):
                self.warnings.append(f"{name}: drafts are a chain, or a tree of another shape with --draft-tree N")
        for name in WINDOWS:
            if parameters.get(name):
                self.warnings.append(f"{name}: the window and the n-grams have fixed sizes here; no text depends on it")

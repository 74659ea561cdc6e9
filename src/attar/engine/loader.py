"""Loading of models for generation: weights and the runners that compute with them, below the engines."""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path

from attar.checkpoints import vocabulary
from attar.checkpoints.receipts import receipt
from attar.checkpoints.receipts.receipt import Receipt
from attar.checkpoints.sources import hf, opening
from attar.checkpoints.sources.vision import load_vision
from attar.checkpoints.strict_io import VerificationError
from attar.errors import UserError
from attar.execution.model_runner import Runner
from attar.execution.parallel.executor import ParallelExecutor
from attar.kernels import dispatch
from attar.model.decoder import Decoder
from attar.model.split import Share
from attar.model.vision.model import VisionModel
from attar.progress import Progress
from attar.text.tokenizer import Tokenizer

BY_REFERENCE = "by the reference, so a text's bits may depend on other requests in its batch"

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Parallel:
    """Processes that share a model: `tp` compute each layer together, `pp` stages have some of the layers each.

    On `cuda` each has a GPU of its own; on CPUs they share the cores, to test parallelism. `threads` is the total of
    all processes, by default the number of cores.
    """

    tp: int = 1
    pp: int = 1
    threads: int | None = None


@dataclass
class LoadedModel:
    """A checkpoint with loaded weights. `executor` has the processes that share it, where there are several;
    `receipt` is the folder's, or None. `reading` is the tokenizer, where a thread began to read it. `tower` computes
    the features of images, where they were asked for and the model takes them."""

    path: Path
    decoder: Decoder
    executor: ParallelExecutor | None
    receipt: Receipt | None
    reading: Future[Tokenizer] | None = None
    tower: VisionModel | None = None

    @property
    def runner(self) -> Callable[..., Runner]:
        """The class or function that makes the runner of an engine on this model."""
        return Runner if self.executor is None else self.executor.runner

    def close(self) -> None:
        """End the processes that share the model, where there are several."""
        if self.executor is not None:
            self.executor.close()

    @cached_property
    def has_tokenizer(self) -> bool:
        """True where the checkpoint has a tokenizer."""
        return vocabulary.has_tokenizer(self.path)

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The checkpoint's tokenizer. Raises ValueError where there is none."""
        return vocabulary.tokenizer(self.path) if self.reading is None else self.reading.result()

    @cached_property
    def eos_ids(self) -> frozenset[int]:
        """Tokens that end a text: those of the generation config, and the tokenizer's. Chat templates end a turn by the
        tokenizer's, which some configs forget."""
        return frozenset(self.decoder.config.eos_ids) | (self.tokenizer.eos_ids if self.has_tokenizer else frozenset())


def load_model(
    path: Path,
    *,
    device: str = "cpu",
    dtype: str | None = None,
    activations: str = "int8g128",
    parallel: Parallel | None = None,
    verify: bool = True,
    images: bool = False,
    progress: Progress | None = None,
) -> LoadedModel:
    """Load a checkpoint's weights, with `images` also its vision tower, where it has one. `LLM` documents the others.

    Raises ValueError where it cannot be loaded or the device cannot compute, VerificationError (a ValueError) where it
    fails its probe.
    """
    dispatch.require(device)
    computed = hf.compute_dtype(dtype, device)
    parallel = parallel or Parallel()
    loading = None if progress is None else partial(progress, "loading")
    executor: ParallelExecutor | None = None
    reading: Future[Tokenizer] | None = None
    if Share(0, parallel.tp, parallel.pp).count <= 1:
        reading = _read_tokenizer(path)
        store = None if computed is None else dispatch.store(activations, device, computed)
        decoder = opening.load(path, computed, loading, store)
    else:
        executor = ParallelExecutor(
            path, parallel.tp, parallel.pp, device=device, dtype=computed, activations=activations,
            threads=parallel.threads, progress=loading,
        )  # fmt: skip
        decoder = executor.decoder
    tower = None
    if images:
        store = None if computed is None else dispatch.store(activations, device, computed)
        try:
            tower = load_vision(path, decoder.dtype, store)
        except UserError as error:
            if error.code != "checkpoint_incomplete":
                raise
            logger.warning("%s: the model takes no images", error)
    found = receipt.read_receipt(path)
    if verify and found is not None and executor is not None:
        logger.warning("the receipt's probe is not replayed in several processes: `attar verify` does so in one")
    elif verify and found is not None:
        verdict = receipt.verify(path, decoder, hashes=False, probes="one")
        if not verdict.ok:
            raise VerificationError(
                "checkpoint_diverges",
                f"{path} does not compute what its receipt says: it diverges at {verdict.first_divergence}. "
                "`attar verify` checks the files; --no-verify loads it all the same",
            )
    return LoadedModel(path, decoder, executor, found, reading, tower)


def _read_tokenizer(path: Path) -> Future[Tokenizer] | None:
    """Begin to read a GGUF file's tokenizer beside its weights: a large vocabulary takes as long as they do. Errors
    are raised where the tokenizer is asked for."""
    if not vocabulary.is_gguf(path):
        return None
    with_one = ThreadPoolExecutor(1, thread_name_prefix="tokenizer")
    reading = with_one.submit(vocabulary.tokenizer, path)
    with_one.shutdown(wait=False)
    return reading


def without_kernels(decoder: Decoder) -> list[str]:
    """Return sentences on the linears of a CPU model that the reference kernels compute, and why; none without such."""
    if decoder.store is None:
        dtype = str(decoder.dtype).removeprefix("torch.")
        why = next(reason for _, reason in dispatch.candidates("linear", "cpu", decoder.dtype))
        return [f"no linear has a CPU kernel in {dtype} ({why}): all run {BY_REFERENCE}"]
    found: dict[str, list[str]] = {}
    for name, reason in decoder.store.refused.items():
        found.setdefault(reason, []).append(name)
    return [
        f"{names[0]}{f' and {len(names) - 1} more linears' if names[1:] else ''}: {reason}: run {BY_REFERENCE}"
        for reason, names in found.items()
    ]

"""The model card of a compressed folder, and its sentences about which programs read the output.

Tests cover the statements about attar and transformers. vLLM is not tried, and is named only where its documentation
names the exact format.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from attar.checkpoints.layouts import bitsandbytes, own_format
from attar.compression.recipe.parser import KEEP
from attar.formats.scheme import Grid, Scheme
from attar.formats.weight_formats import Fp8Blocks

DENSE = "safetensors"  # the method of an output in which nothing is packed


def notes(transposed: bool, experts: bool, packed_ends: bool, used: Collection[Scheme], method: str) -> tuple[str, ...]:
    """Return notes for users who load the output elsewhere, a sentence each. `used` are the schemes in it;
    `packed_ends`: whether one packed matrix is both ends of the model; `method`: the library format."""
    if not used:
        return ()
    if method == own_format.METHOD:
        return ("It loads in attar only: no other reader has a place for these schemes in one folder.",)
    if method == bitsandbytes.METHOD:
        return ("attar reads it, and transformers where bitsandbytes is installed.",)
    if transposed:
        return (
            "It loads in attar only: transformers, which keeps these weights in Conv1D modules, passes the packed ones "
            "over and starts from random ones.",
        )
    asymmetric = any(scheme.layout == "packed" and not scheme.grid.symmetric for scheme in used)
    if packed_ends:
        once = (
            "Its embedding, which is its LM head too, is stored once and packed: attar reads it, and vLLM, which "
            "was not tried, if it reads packed embeddings of tied models; transformers 5.23 stops"
        )
        if len(used) == 1 and not experts:
            return (f"{once} unless it is given `quantization_config=CompressedTensorsConfig(dequantize=True)`.",)
        return (
            f"{once}, and must not be told to dequantize: it would take every matrix for one of the first scheme, and "
            "answer nonsense.",
        )
    if experts and (asymmetric or any(scheme.activation is not None for scheme in used)):
        return (
            "It loads in attar; transformers 5.23, which fuses the experts of a mixture, refuses theirs in W8A8 and "
            "with packed zero points, and does not round the activations of FP8.",
        )
    if asymmetric and len(used) > 1:
        return ("attar reads it; transformers 5.23 has no place for packed zero points beside another scheme.",)
    if asymmetric:
        return (
            "attar reads it; transformers 5.23 needs "
            "`quantization_config=CompressedTensorsConfig(dequantize=True)` for its packed zero points.",
        )
    return ()


def readers(used: Collection[Scheme], special: bool, online: bool) -> str:
    """Return a sentence on the readers of an output, for use where no note has one. `special`: whether there are
    experts or a compressed LM head, which the sentence hardly covers; `online`: whether inputs are rotated at run time,
    which has a note of its own."""
    if online:
        return "attar reads it."
    if not used:
        return "It is dense: attar reads it, and transformers as it does the original."
    form = _known_to_vllm(next(iter(used))) if len(used) == 1 and not special else None
    if form is None:
        return "attar and transformers read it."
    return f"attar and transformers read it. vLLM was not tried; its documentation lists {form} in this format."


def _known_to_vllm(scheme: Scheme) -> str | None:
    """Return vLLM's name of a scheme among the compressed-tensors forms of its documentation, or None. These are INT4
    and INT8 weights alone (WNA16) in groups for which it has kernels, INT8 W8A8, and FP8 W8A8."""
    weight, activation = scheme.weight, scheme.activation
    if isinstance(weight, Fp8Blocks):
        return "FP8 in blocks" if activation is not None else None
    if not isinstance(weight, Grid) or not weight.symmetric:
        return None
    if activation is None:
        grouped = weight.granularity == "channel" or weight.group_size in (32, 64, 128)
        packed = scheme.layout == "packed" and weight.bits in (4, 8) and grouped
        return f"W{weight.bits}A16 of integers" if packed else None
    if not isinstance(activation, Grid) or (weight.bits, activation.bits) != (8, 8) or weight.granularity == "group":
        return None
    if not scheme.static and activation.granularity != "token":
        return None
    return "W8A8 of INT8" if weight.kind == "int" else "W8A8 of FP8"


def untrained_note(
    names: Sequence[str], schemes: Collection[Scheme | None], method: str, dense: bool
) -> tuple[str, ...]:
    """Return a note where tuning, by the named `method`, trains nothing of linears in schemes of these `names`.
    `dense`: whether it trains the weights of other linears."""
    if not names:
        return ()
    some = dense or len(names) < len({scheme.name for scheme in schemes if scheme is not None})
    where = f"beside linears in {', '.join(names)}" if some else "here, which gains less"
    which = "these" if some else f"linears in {', '.join(names)}"
    return (f"Norms and biases are all that {method} trained {where}: of what {which} store it moves no number.",)


def wide_codes(used: Collection[Scheme]) -> tuple[str, ...]:
    """Return a note about integers of fewer than 8 bits that are stored in 8."""
    plain = [each for each in used if each.layout == "plain" and isinstance(each.weight, Grid)]
    names = ", ".join(sorted(each.name for each in plain if each.grid.bits < 8))
    if not names:
        return ()
    return (f"Codes of {names} are stored in 8 bits each, as the format has them beside rounded inputs.",)


def text(
    recipe: str,
    head: str,
    bits_per_weight: float,
    size: int,
    cost: Mapping[str, Any] | None,
    sentences: Sequence[str],
    method: str,
) -> str:
    """Return README.md of a compressed folder: what it is, how to run it, and what the compression cost. `method` is
    the library format, and `sentences` say which programs read it."""
    measured = "Not measured: `attar eval` does, against the original."
    if cost is not None:
        rows = [("perplexity", "ppl"), ("KL divergence, mean", "kl_mean"), ("KL divergence, 99.9 %", "kl_p999")]
        rows += [("top-1 agreement", "top1"), ("tokens measured", "tokens")]
        measured = "| measure | value |\n|---|---|\n" + "\n".join(
            f"| {label} | {cost[key]:.6g} |" for label, key in rows
        )
    tags = ", ".join(dict.fromkeys(("attar", method)))
    with_head = "" if head == KEEP else f", the LM head in `{head}`"
    return (
        f"---\nlibrary_name: transformers\ntags: [{tags}]\n---\n\n# Compressed with attar\n\n"
        f"Recipe `{recipe}`{with_head}: {bits_per_weight:.3f} bits per weight in the compressed linears, {size:,}\n"
        f"bytes of weights. Stored in the format of {method}. {' '.join(sentences).strip()}\n\n"
        "`receipt.json` holds the recipe, hashes and probes; `attar verify` checks them on your machine.\n\n"
        f"## What it cost\n\nAgainst the original, on held-out text:\n\n{measured}\n"
    )

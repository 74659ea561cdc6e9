"""Rotations folded into a model's weights: the same function, in coordinates where no channel stands out.

Large models have a few channels a hundred times the others, and they cost all others precision in rounding. An
orthogonal matrix spreads them over all channels (QuaRot: Ashkboos et al. 2024; of weights, QuIP: Chee et al. 2023):

* the residual stream, x' = x R. Its readers become W' = W R, and writers W' = R^T W. RMSNorm without its
  weight commutes with R, so the weights of norms go into the linears that read them first, and ones are left behind.
The LM head takes in the final norm's: a tied one is untied, unless that norm's weights are ones already.
* the values of each head, v' = v R_v, which o inverts: one matrix a layer, in every head.
* `online`: inputs of down, by a Hadamard matrix at run time (`Linear.hadamard`), since no linear feeds them.
* `across`: inputs of o as well, since attention keeps heads apart. (QuaRot turns each head of v by a Hadamard matrix
  offline, and across heads at run time: multiplied, that is the one matrix of all columns, used here at run time. The
  rotation of heads is then left out, for the two would undo each other within each head.)

A rotation mixes a channel that is large and unimportant, because small weights read it, into all others. So inputs of o
and down are scaled first (`balance`): each row of v and up, with the norm's weight in it, and the columns of o and down
that read it get the same norms. Where channels have been scaled up and their readers down, that takes it back exactly.

LayerNorm subtracts the mean, and commutes with the rotations that leave the vector of ones where it is. Its bias goes
to the biases of those that read it, or where they have none stays, as (bias / weight) R.

A norm behind attention or feed-forward (Gemma 2 and 3) weighs the stream's channels where no linear follows: such
models are refused, as are sizes of which no Hadamard matrix is known (`rotation: orthogonal` knows all of them). Not
done: rotating queries and keys at run time, which KV caches do themselves (`model.kv_basis`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

import torch

from attar.checkpoints.sources.hf import Checkpoint
from attar.compression.recipe.methods import Rotate, SpinQuant
from attar.compression.recipe.recipe import HEAD, Recipe, naming
from attar.compression.rotation.rotated import (
    Balance,
    Change,
    Matrix,
    NormBias,
    NormWeight,
    RotatedCheckpoint,
    RotatedFolder,
    Vector,
)
from attar.compression.solvers.transforms.rotations import Rotation, draw
from attar.errors import UserError
from attar.kernels import hadamard
from attar.model.assembly import all_compressible, gates
from attar.model.config import ModelConfig

STREAM = -1  # seed number of the residual stream's rotation; layers count from 0


def rotated(checkpoint: Checkpoint, recipe: Recipe, seed: int) -> RotatedCheckpoint:
    """Return the view of the checkpoint that `recipe.rotate` asks for. Raises ValueError where the family cannot be
    rotated, or no Hadamard matrix of one of its sizes is known. Also raises it where a rotation at run time is asked
    for and no linear can take it."""
    assert recipe.rotate is not None
    names = checkpoint.config.names
    if names.attention_post_norm is not None or names.feed_forward_post_norm is not None:
        raise UserError(
            "architecture_unsupported",
            f"{recipe.name}: {checkpoint.config.architecture} has norms behind attention and feed-forward, whose "
            "weights no linear takes in: the residual stream of such a model cannot be rotated",
        )
    with naming(recipe.name):
        plan = _Plan(checkpoint, recipe, recipe.rotate, seed)
        for layer in range(checkpoint.config.layers):
            plan.layer(layer)
        plan.ends()
    for word, name in (("online", names.down), ("across", names.output)):
        if getattr(recipe.rotate, word) and word not in plan.turned:
            raise UserError(
                "recipe_without_effect",
                f"{recipe.name}: {word} is for {name}, where that is rounded and has an even number of columns, which "
                f"it nowhere does here: say {word}: false",
            )
    stated = {"tie_word_embeddings": False} if plan.untied else {}
    folder = RotatedFolder(checkpoint.folder, plan.changes, plan.added, {**checkpoint.folder.config, **stated})
    config = replace(checkpoint.config, tied=checkpoint.config.tied and not plan.untied)
    view = RotatedCheckpoint(folder, config, checkpoint.dtype)
    view.online, view.stream, view.heads, view.untied = plan.online, plan.stream, plan.heads, plan.untied
    view.rounded = {name for name in all_compressible(config) if recipe.scheme_for(name) is not None}
    if recipe.mix is not None:  # in a GGUF file tables have types too, and the rest is float32
        ends = {names.embed: HEAD if config.tied else names.embed, HEAD: HEAD}
        rounded = [end for end, known in ends.items() if recipe.scheme_for(known, recipe.scheme) is not None]
        folder.wide = {checkpoint.stored_name(f"{end}.weight") for end in rounded}
        folder.wide |= {name for name, change in plan.changes.items() if isinstance(change, Vector)}
    return view


def _feed_forwards(config: ModelConfig, layer: int) -> Iterator[tuple[list[str], str]]:
    """Yield, for each feed-forward of a layer, the names of the linears that read its norm, up the last, and of
    down."""
    names, at = config.names, config.names.layer.format(i=layer)
    if config.experts is None or not config.is_sparse(layer):
        yield [f"{at}.{name}" for name in names.gate_up], f"{at}.{names.down}"
        return
    modules = [names.expert.format(e=e) for e in range(config.experts.count)]
    for module in [*modules, *([names.shared_expert] if config.experts.shared else [])]:
        yield [f"{at}.{module}.{name}" for name in names.expert_gate_up], f"{at}.{module}.{names.expert_down}"


class _Plan:
    """The changes of every tensor of a checkpoint, layer by layer."""

    def __init__(self, checkpoint: Checkpoint, recipe: Recipe, options: Rotate, seed: int) -> None:
        self._compressed = recipe.scheme_for
        self.checkpoint, self.config, self.options, self.seed = checkpoint, checkpoint.config, options, seed
        self.changes: dict[str, Change] = {}
        self.added: dict[str, str] = {}
        self.online: dict[str, int] = {}
        self.turned = set[str]()  # options that rotate inputs at run time
        self.heads: list[Rotation | None] = []
        self.untied = False
        assert not self.config.norm_offset, "families whose norms have one have norms behind attention too"
        self._mean = self.config.norm == "layer"
        if self._mean and (options.rotation != "hadamard" or isinstance(options, SpinQuant)):
            raise UserError(
                "method_option_invalid",
                "LayerNorm commutes only with rotations that keep the mean: use quarot, rotation: hadamard",
            )
        self.stream = draw(options.rotation, self.config.hidden, seed, STREAM, self._mean)

    def layer(self, layer: int) -> None:
        """Plan all tensors of layer `layer`."""
        config, names = self.config, self.config.names
        at = names.layer.format(i=layer)
        norm, qkv, output = f"{at}.{names.attention_norm}", [f"{at}.{n}" for n in names.qkv], f"{at}.{names.output}"
        mixed = self._at_run_time("across", output)
        turns = self.options.heads and mixed is None
        heads = draw(self.options.rotation, config.head_dim, self.seed, layer) if turns else None
        self.heads.append(heads)
        groups = config.heads // config.kv_heads
        values = self._balance(norm, qkv[-1], output, config.kv_heads * config.head_dim, config.head_dim, groups)
        self._reads(norm, qkv, {qkv[-1]: values}, heads)
        self._adds(output, mixed or heads, values)
        norm, readers, overs = f"{at}.{names.feed_forward_norm}", gates(config, layer), dict[str, Balance | None]()
        scales_pass = config.gated or config.activation == "relu"
        for up, down in _feed_forwards(config, layer):
            width = self.checkpoint.linear_shape(down)[1]
            balance = self._balance(norm, up[-1], down, width, width, 1) if scales_pass else None
            overs[up[-1]] = balance
            readers += up
            self._adds(down, self._at_run_time("online", down), balance)
        self._reads(norm, readers, overs)

    def _at_run_time(self, option: str, name: str) -> Rotation | None:
        """Rotate the inputs of a linear in blocks, where the option says so, it is rounded and there are any."""
        block = hadamard.block_of(self.checkpoint.linear_shape(name)[1])
        if not getattr(self.options, option) or block == 1 or not self._compressed(name):
            return None
        self.online[name] = block
        self.turned.add(option)
        return Rotation(block, torch.ones(block, dtype=torch.float64))

    def _balance(self, norm: str, source: str, reader: str, size: int, head_dim: int, groups: int) -> Balance | None:
        if not self.options.balance:
            return None
        stored = self.checkpoint.stored_name
        weight, of_reader = stored(f"{source}.weight"), stored(f"{reader}.weight")
        transposed = self.config.names.is_transposed(source)
        return Balance(weight, stored(norm), of_reader, size, head_dim, groups, transposed)

    def ends(self) -> None:
        """Plan the tables of tokens and positions, the final norm, and the LM head."""
        config, names, stored = self.config, self.config.names, self.checkpoint.stored_name
        embed, head = (stored(f"{name}.weight") for name in (names.embed, HEAD))
        has_embed, has_head = (self.checkpoint.has(f"{name}.weight") for name in (names.embed, HEAD))
        source = {embed: embed if has_embed else head, head: head if has_head else embed}
        norm = stored(names.final_norm)
        if names.positions is not None:
            at = stored(f"{names.positions}.weight")
            self.changes[at] = Matrix(at, inputs=self.stream)
        if has_embed != has_head:
            ones = bool((self.checkpoint.tensor(f"{names.final_norm}.weight") == 1).all())
            if ones and not self._mean:  # one table still serves both ends
                only = source[embed]
                self.changes[only] = Matrix(only, inputs=self.stream)
                return
            self.added = {embed if has_head else head: source[embed]}
        self.untied = config.tied
        self.changes[embed] = Matrix(source[embed], inputs=self.stream)
        self.changes[head] = Matrix(source[head], norm=norm, inputs=self.stream)
        self._norm(names.final_norm, biases=False)

    def _reads(
        self, norm: str, linears: list[str], overs: Mapping[str, Balance | None], values: Rotation | None = None
    ) -> None:
        """Plan the linears that read the output of `norm`. `overs` holds, by name, the balance that divides a linear's
        last outputs, as many as it has scales. `values` rotates the outputs of the last linear, a layer's values."""
        names, stored = self.config.names, self.checkpoint.stored_name
        biases = self._mean and all(self.checkpoint.has(f"{name}.bias") for name in linears)
        for name in linears:
            after, over = values if name == linears[-1] else None, overs.get(name)
            last = self.config.kv_heads * self.config.head_dim if over is None else over.size
            turned, weight, bias = names.is_transposed(name), stored(f"{name}.weight"), stored(f"{name}.bias")
            self.changes[weight] = Matrix(weight, stored(norm), self.stream, after, last, turned, over=over)
            if self.checkpoint.has(f"{name}.bias") and (biases or after is not None or over is not None):
                self.changes[bias] = Vector(bias, after, last, weight, stored(norm) if biases else None, turned, over)
        self._norm(norm, biases)

    def _adds(self, name: str, inputs: Rotation | None, times: Balance | None) -> None:
        """Plan a linear that adds to the residual stream, whose inputs are scaled and then rotated by `inputs`."""
        stored, turned = self.checkpoint.stored_name, self.config.names.is_transposed(name)
        weight, bias = stored(f"{name}.weight"), stored(f"{name}.bias")
        self.changes[weight] = Matrix(weight, inputs=inputs, outputs=self.stream, turned=turned, times=times)
        if self.checkpoint.has(f"{name}.bias"):
            self.changes[bias] = Vector(bias, self.stream)

    def _norm(self, norm: str, biases: bool) -> None:
        """Plan a norm whose weight the linears behind it have absorbed, and, if `biases`, its bias."""
        stored = self.checkpoint.stored_name(norm)
        self.changes[f"{stored}.weight"] = NormWeight()
        if self._mean:
            self.changes[f"{stored}.bias"] = NormBias(stored, None if biases else self.stream)

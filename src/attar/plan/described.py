"""Description of a model for the lab's page: its shape and exact sizes, by the arithmetic of plans. Torch-free."""

from __future__ import annotations

from attar.kv.schemes import SCHEMES
from attar.model.config import ModelConfig
from attar.plan import costs, fit, steps
from attar.plan.comparison import usual_storages
from attar.plan.costs import BLOCK, Storage
from attar.plan.steps import StepLimits
from attar.protocol.model_shape import ModelShape, StoredKv, StoredWeights


def described(name: str, config: ModelConfig, storage: Storage, kv: str, limits: StepLimits) -> ModelShape:
    """Describe a model in one process on CPUs, with a KV cache of the format `kv` and steps within `limits`."""
    linears = [each for each in costs.matrices(config) if each.part == "linears"]
    head = config.vocab_size * config.hidden
    first, *others = (_stored(config, each) for each in usual_storages(config, storage))
    step = steps.largest_step(config, storage, limits, config.context).total
    step += costs.beside_bytes(config, SCHEMES[kv], limits.sequences)
    return ModelShape(
        name, config.layers, config.hidden, config.heads, config.kv_heads, config.head_dim, config.context,
        sum(each.rows * each.columns for each in linears),
        head + round(sum(each.active * each.rows * each.columns for each in linears)),
        head, 0 if config.tied else head, first, tuple(others), kv, _kv_formats(config),
        costs.step_bytes(config, storage), step, fit.ENGINE + fit.SERVER + 2 * fit.TOKENIZER * config.vocab_size,
        BLOCK, limits.headroom,
    )  # fmt: skip


def _stored(config: ModelConfig, storage: Storage) -> StoredWeights:
    found = costs.weight_bytes(config, storage)
    return StoredWeights(storage.label, found.linears, found.head, found.embedding, found.norms)


def _kv_formats(config: ModelConfig) -> tuple[StoredKv, ...]:
    """Return the KV formats that support the model's head size, the most precise first."""
    found = []
    for name, scheme in SCHEMES.items():
        try:
            token = costs.kv_bytes(config, scheme)
        except ValueError:
            continue
        found.append(StoredKv(name, scheme.bits_per_value(config.head_dim, BLOCK), token))
    return tuple(sorted(found, key=lambda each: -each.bits))

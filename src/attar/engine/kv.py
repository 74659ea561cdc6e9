"""How an engine, a bench or an evaluation keeps keys and values: a scheme by its name, calibrated where it is to be.

Calibration wants text that the model finds likely, and nothing is at hand where a model is served. So the model writes
it: texts that begin with a token drawn at random. A quarter is random throughout, because a model may repeat itself,
and a direction that calibration has never seen would be rounded to nothing. The seed makes the bases, and with them
every answer, the same each time.
"""

from __future__ import annotations

import torch
from torch import Tensor

from attar.engine.decoding import Decoding
from attar.formats import kv
from attar.formats.kv import KvScheme
from attar.kernels.pages import Bases
from attar.model import kv_basis
from attar.model.cache import BLOCK
from attar.model.decoder import Decoder

WRITTEN, RANDOM, LENGTH = 12, 4, 256  # texts, and tokens of each
SEED = 11


def bases(decoder: Decoder, scheme: KvScheme) -> list[Bases] | None:
    """What caches of this model and scheme want: None where they are not calibrated."""
    return kv_basis.calibrate(decoder, sample(decoder), scheme) if scheme.calibrated else None


def of(decoder: Decoder, name: str | None) -> KvScheme:
    """The scheme of a name, by default what loses nothing. Raises ValueError where the model's heads do not fit it."""
    scheme = decoder.lossless if name is None else kv.scheme(name)
    scheme.check(decoder.config.head_dim, BLOCK)
    return scheme


@torch.inference_mode()
def sample(decoder: Decoder, written: int = WRITTEN, random: int = RANDOM, seed: int = SEED) -> Tensor:
    """Token ids [written + random, L], of `LENGTH` tokens or as many as the model's context allows."""
    length, vocabulary = min(LENGTH, decoder.config.context), decoder.config.vocab_size
    numbers = torch.Generator().manual_seed(seed)
    noise = torch.randint(0, vocabulary, (random, length), generator=numbers)
    drawn = [torch.randint(0, vocabulary, (written,), generator=numbers)]
    decoding = Decoding(decoder, decoder.cache(length, written), length)
    while len(drawn) < length:
        chances = decoding.step(drawn[-1].tolist()).float().softmax(-1)
        drawn.append(torch.multinomial(chances, 1, generator=numbers)[:, 0])
    return torch.cat((torch.stack(drawn, 1), noise))

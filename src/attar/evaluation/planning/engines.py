"""The line of a start of replicas where one engine would be faster, in a process of its own that loads torch.

`attar serve --replicas` runs this module, because its own process has no torch, which headers of checkpoints need.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import msgspec

from attar.kv.schemes import scheme
from attar.plan.rates.profile import MachineProfile
from attar.plan.rates.step_time import StepModel
from attar.plan.replicas import compare
from attar.protocol.settings import Settings

CONTEXT = 1024  # tokens of each sequence, at most


def sentence(settings: Settings, count: int, profile: MachineProfile) -> str:
    """Return a sentence where one engine on all cores decodes faster than `count` replicas; "" where it does not.

    `settings` are those of an engine: as many sequences as one runs are compared. Raises ValueError for a model whose
    headers cannot be read.
    """
    from attar.checkpoints.sources.opening import stored

    config, storage = stored(Path(settings.model))
    kv = scheme(settings.kv or "float32")
    context = min(CONTEXT, settings.context or config.context)
    found = compare(StepModel(config, storage, kv, profile), count, settings.limits().together, context)
    if not found.one_is_faster:
        return ""
    return (
        f"one engine on all cores is faster by this machine's rates: about {found.one:,.0f} tokens/s for {found.users} "
        f"requests of {context:,} tokens, {found.several:,.0f} with {count} replicas"
    )


def main() -> int:
    """Read [settings, count, profile] as JSON from standard input, and print the sentence as JSON."""
    settings, count, profile = json.loads(sys.stdin.buffer.read())
    try:
        found = sentence(msgspec.convert(settings, Settings), count, msgspec.convert(profile, MachineProfile))
    except (ValueError, OSError):
        found = ""  # the engines report what is wrong with the model
    print(json.dumps(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""An endless stream: what a window with sinks costs over many novels, and what it takes in memory.

    PYTHONPATH=src:. python bench/kv_stream.py MODEL NOVELS [--policy sink:4+1020] [--tokens 524288] [--part 65536]

The novels, one behind another, are one prompt that runs through the scheduler and the runner of an engine. Figures are
the perplexity of each part, the memory of the process behind the first part and in the end, and, at positions of the
last part drawn with a fixed seed, the perplexity beside that of fresh windows: as many tokens before each position as
the policy keeps at most, computed anew with a full cache. `--part 8192 --tokens 16384` is a short form.
"""

from __future__ import annotations

import argparse
import json
import lzma
import math
import os
import random
import time
from pathlib import Path

import torch
from torch import Tensor

from attar.checkpoints import vocabulary
from attar.checkpoints.sources import opening
from attar.execution import kv_cache
from attar.execution.model_runner import Runner, Wanted
from attar.kernels import dispatch
from attar.kv.eviction import Eviction
from attar.model.cache import BLOCK, ForwardBatch
from attar.model.decoder import Decoder
from attar.protocol.scheduler_config import SchedulerConfig
from attar.scheduling.block_pool import BlockPool
from attar.scheduling.prefix_cache import PrefixCache
from attar.scheduling.scheduler import Scheduler
from attar.scheduling.sequence import Sequence
from attar.scheduling.step_plan import Outcome, ScheduledTokens
from attar.text.tokenizer import Tokenizer

SEED = 27
ROWS = 512  # most rows of a step


def stream_of(path: Path, tokenizer: Tokenizer, tokens: int) -> list[int]:
    """The first tokens of novels, one JSON object a line, or of plain text."""
    found = list[int]()
    opened = lzma.open if path.suffix == ".xz" else open
    with opened(path, "rt", encoding="utf-8") as file:
        for line in file if ".jsonl" in path.name else [file.read()]:
            found += tokenizer.encode(json.loads(line)["text"] if ".jsonl" in path.name else line)
            if len(found) >= tokens:
                return found[:tokens]
    raise SystemExit(f"the text has {len(found):,} tokens, fewer than {tokens:,}")


def resident() -> int:
    """Bytes of this process in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def perplexity(chances: Tensor) -> float:
    return math.exp(-float(chances.double().mean()))


class Stream:
    """Log probabilities [N] of a stream's tokens, NaN for the first, and the memory behind its parts."""

    def __init__(self, decoder: Decoder, ids: list[int], policy: Eviction, kv: str | None, part: int) -> None:
        scheme = kv_cache.resolve(decoder, kv)
        kv_cache.check_eviction(decoder, scheme, policy, decoder.config.context)
        blocks, bases = 2 * -(-policy.budget // BLOCK) + 2, kv_cache.bases(decoder, scheme)
        runner = Runner(decoder, blocks, decoder.config.context, scheme, bases=bases)
        runner.evict_keys()
        self.chances = torch.full((len(ids),), torch.nan)
        self.memory = list[tuple[int, int]]()  # bytes of the process, and of the stream's blocks
        each = sum(pages.nbytes for pages in runner.pages) // blocks
        pool, begun, expected = BlockPool(blocks, BLOCK), time.process_time(), torch.tensor(ids)

        def watch(chunk: ScheduledTokens, at: int, logits: Tensor) -> None:
            first = chunk.start + at + 1  # the token behind the first of these rows
            own = expected[first : first + len(logits)]
            found = logits[: len(own)].log_softmax(-1).gather(1, own[:, None])
            self.chances[first : first + len(own)] = found[:, 0]

        scheduler = Scheduler(pool, PrefixCache(pool), SchedulerConfig(max_running=1, max_step_tokens=ROWS, headroom=0))
        sequence = Sequence(id="stream", prompt_ids=ids, max_tokens=1, bypass=True, eviction=policy)
        scheduler.add([sequence], 0.0)
        end = 0
        while end < len(ids):
            plan = scheduler.plan(0.0)
            (chunk,) = plan.chunks
            runner.run(plan, {"stream": Wanted(logits=watch)})
            end, held = chunk.start + chunk.rows, len(sequence.blocks) + len(sequence.pristine)
            if end // part > chunk.start // part:
                self.memory.append((resident(), held * each))
                own = self.chances[max(1, end // part * part - part) : end // part * part]
                print(
                    f"{end:>9,} tokens: perplexity of this part {perplexity(own):.3f}, {resident() / 1e6:.1f} MB, "
                    f"{held} blocks, {time.process_time() - begun:.0f} s",
                    flush=True,
                )
            scheduler.commit(plan, {"stream": Outcome((0,))} if chunk.samples else {}, 0.0)
        self.seconds = time.process_time() - begun


def fresh(decoder: Decoder, ids: list[int], positions: list[int], window: int) -> Tensor:
    """Log probabilities of the tokens at these positions, each behind the `window` tokens before it alone."""
    cache, found = decoder.cache(window), list[Tensor]()
    for at in positions:
        cache.truncate(0, 0)
        own = torch.tensor(ids[at - window : at])
        for piece in own[:-1].split(ROWS):
            decoder.states(piece, ForwardBatch((len(piece),), window, cache))
        logits = decoder.forward(own[-1:], ForwardBatch((1,), window, cache))
        found.append(logits[0].log_softmax(-1)[ids[at]])
    return torch.stack(found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("novels", type=Path)
    parser.add_argument("--policy", default="sink:4+1020", help="comma-separated: each in turn, on the same tokens")
    parser.add_argument("--tokens", type=int, default=1 << 19)
    parser.add_argument("--part", type=int, default=1 << 16)
    parser.add_argument("--positions", type=int, default=200)
    parser.add_argument("--kv")
    parser.add_argument("--activations", default="int8g128")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    decoder = opening.load(args.model, torch.float32, None, dispatch.store(args.activations))
    ids = stream_of(args.novels, vocabulary.tokenizer(args.model), args.tokens)
    policies = [Eviction.parse(each) for each in args.policy.split(",")]
    drawn = random.Random(SEED).sample(range(args.tokens - args.part, args.tokens), args.positions)
    window = max(each.budget for each in policies)
    report = dict[str, object](tokens=args.tokens, part=args.part, kv=args.kv, activations=args.activations)
    with torch.inference_mode():
        found = dict[str, Tensor]()
        for policy in policies:
            print(policy, flush=True)
            stream = Stream(decoder, ids, policy, args.kv, args.part)
            found[str(policy)] = own = stream.chances[drawn]
            (first, kept), (last, kept_last) = stream.memory[0], stream.memory[-1]
            report[str(policy)] = row = {
                "first_part": perplexity(stream.chances[1 : args.part]),
                "last_part": perplexity(stream.chances[-args.part :]), "at_positions": perplexity(own),
                "memory": [first, last], "memory_grows": last / first - 1, "cache": [kept, kept_last],
                "seconds": stream.seconds,
            }  # fmt: skip
            print(row, flush=True)
        alone = fresh(decoder, ids, drawn, window)
    report["fresh_windows"] = perplexity(alone)
    report["times_fresh"] = {name: perplexity(own) / perplexity(alone) for name, own in found.items()}
    line = json.dumps(report)
    print(line)
    if args.json:
        args.json.write_text(line)


if __name__ == "__main__":
    main()

"""500 random lives of the scheduler; and bugs planted in it, each of which they must find."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import pytest

import attar.scheduling
from tests.scheduling.simulation import failing

SOURCE = Path(attar.scheduling.__path__[0])
SEEDS = 500
PARTS = 10  # so that workers share them
ENOUGH = 500  # seeds, which must find any of the bugs below


@pytest.mark.parametrize("part", range(PARTS))
def test_every_invariant_holds_after_every_event(part: int) -> None:
    seeds = range(part * SEEDS // PARTS, (part + 1) * SEEDS // PARTS)
    if (failure := failing(seeds)) is not None:
        seed, error = failure
        raise AssertionError(f"python -m tests.scheduling.simulation --first {seed} --seeds 1") from error


class Bug(NamedTuple):
    name: str
    file: str
    line: str
    instead: str
    seed: int = 0  # one that finds it where many do not; it is tried first


BUGS = [
    Bug("blocks leak when a sequence is cancelled", "scheduler",
        "self.tables.release(sequence, self._last(sequence), keep)", "pass"),
    Bug("a sequence takes a block too many", "scheduler", "if due else self.tables.missing(sequence)",
        "if due else self.tables.missing(sequence) + 1"),
    Bug("a copy source is never let go", "scheduler", "self.pool.drop(copy.source for copy in step.copies)", "pass"),
    Bug("matched blocks stay held when there is no room", "admission", "self._pool.drop(shared)", "pass"),
    Bug("matched blocks are used without being held", "admission", "self._pool.hold(shared)",
        "self._pool.hold(shared[len(match.blocks) :])"),
    Bug("a copy has a slot too few", "admission", "match.length % self._pool.size, sequence))",
        "match.length % self._pool.size - 1, sequence))"),
    Bug("the whole prompt is matched, and nothing is left to run", "block_tables",
        "len(sequence.tokens) - 1)", "len(sequence.tokens))"),
    Bug("bypass is ignored", "admission", "if not sequence.bypass:", "if True:"),
    Bug("tokens enter the tree that were not computed", "block_tables",
        "self.alike(sequence, sequence.computed)", "self.alike(sequence, sequence.computed + 1)"),
    Bug("outputs that read few keys enter the tree", "block_tables", "self.alike(sequence, sequence.computed)",
        "sequence.computed"),
    Bug("an output takes keys of another's prompt", "admission", "prompt = sequence.tokens[:alike]",
        "prompt = sequence.tokens[:-1]", seed=49),
    Bug("the last rows of a prompt, which read all, enter the tree", "block_tables",
        "min(length, self._prefill.alike(sequence.prompt))", "length"),
    Bug("what failed enters the tree", "scheduler",
        "self._end(sequence, outcome.failure, now, keep=False)",
        "sequence.computed = start + rows; self._end(sequence, outcome.failure, now)"),
    Bug("cancelled in the queue, it stays there", "scheduler",
        "    self.queue.remove(sequence)\n        sequence.enter", "    pass\n        sequence.enter"),
    Bug("cancelled during a step, it is freed under the runner", "block_tables",
        "self.pool.drop if step is None else step.held.extend", "self.pool.drop"),
    Bug("what a step was to let go stays held", "block_tables", "self.pool.drop(step.held)", "pass"),
    Bug("a block that the tree replaces is freed under the runner", "block_tables",
        "sequence.blocks, self._let_go(step))", "sequence.blocks)"),
    Bug("a token is appended after the cancellation", "scheduler",
        "if sequence.status is Status.ENDED:\n                continue", "if False:\n                continue"),
    Bug("a preempted sequence goes on where it was", "block_tables",
        "sequence.blocks, sequence.computed, sequence.planned, sequence.inflight_tokens = [], 0, 0, 0",
        "sequence.blocks = []"),
    Bug("a row that is planned counts as computed", "scheduler", "sequence.planned += rows",
        "sequence.planned += rows; sequence.computed = sequence.planned"),
    Bug("a token that was chosen is still to come", "scheduler",
        "sequence.inflight_tokens -= sequence.max_tokens > 0", "pass"),
    Bug("somebody gives way to a step ahead", "scheduler", "if missing > self.pool.available or", "if", seed=37),
    Bug("a step ahead has keys of two horizons", "scheduler",
        "any(sequence.outgrown or sequence.due for sequence", "any(sequence.due for sequence"),
    Bug("keys of two horizons are kept as one's", "block_tables", "self.cache.insert(sequence.salt,",
        "self.cache.insert(sequence.cache_salt,"),
    Bug("nobody starts over", "scheduler", "if sequence.outgrown:", "if False:"),
    Bug("a sequence is preempted without end", "scheduler", "sequence.preemptions += 1", "pass", seed=246),
    Bug("whoever may not be preempted is not given all it needs", "admission",
        "if self._lasts(sequence) else len(sequence.tokens)", "if False else len(sequence.tokens)"),
    Bug("nobody is ever overdue", "admission", "sequence.overdue = sequence.passed >=", "sequence.overdue = 0 >"),
    Bug("the token budget is not counted", "scheduler", "self.limits.max_step_tokens - len(decoding)",
        "self.limits.max_step_tokens"),
    Bug("drafts are not counted", "scheduler", "budget -= step.drafts", "pass"),
    Bug("one sequence's drafts leave others as many", "scheduler", "spare -= len(drafts)", "pass"),
    Bug("drafts go past the last token", "block_tables", "min(longest, sequence.cut) - sequence.expected)", "99)"),
    Bug("drafts go past a horizon", "block_tables",
        "if not sequence.horizon else min(sequence.longest, sequence.horizon)", ""),
    Bug("a chunk crosses an eviction", "scheduler", "min(sequence.reach(sequence.planned, budget), sequence.cut)",
        "sequence.reach(sequence.planned, budget)"),
    Bug("tokens behind an eviction go into the tree", "block_tables", "if sequence.dropped:", "if False:"),
    Bug("the sinks' block is never let go", "block_tables", "*sequence.pristine, *sequence.spare", "*sequence.spare"),
    Bug("blocks in reserve are never let go", "block_tables", "*sequence.pristine, *sequence.spare",
        "*sequence.pristine"),
    Bug("drafts have no blocks", "block_tables", "if missing > 0:", "if False:"),
    Bug("all drafts count as computed", "scheduler", "max(0, len(outcome.tokens) - 1) if drafts else 0", "len(drafts)"),
    Bug("a branch has a block too few", "block_tables", "self.pool.needed(sequence.expected + of[rows[-1]]) - first",
        "max(1, self.pool.needed(sequence.expected + of[rows[-1]]) - first - 1)"),
    Bug("blocks of branches are never let go", "block_tables",
        "step.held += itertools.chain.from_iterable(tree.blocks)", "pass"),
    Bug("the blocks of another branch are taken", "block_tables", "tree.blocks[branch - 1]", "tree.blocks[-branch]"),
    Bug("a branch is right, and the first one's blocks stay", "block_tables", "if branch else ()", "if False else ()"),
    Bug("a branch's blocks are taken and let go", "block_tables", "step.held.remove(block)", "pass"),
    Bug("a sequence's own blocks are lost to a branch", "block_tables",
        "step.held += sequence.blocks[place : place + 1]", "pass"),
    Bug("prompts go before who decodes", "scheduler",
        "[sequence for sequence in self.running if sequence.pending == 1]", "[]"),
    Bug("deadlines are missed", "deadlines", "heapq.heappush(self._heap, (sequence.deadline, sequence.id))", "pass"),
    Bug("nobody looks for deadlines before a step", "scheduler", "self.expire(now)\n        return self._decide(now)",
        "return self._decide(now)"),
    Bug("nobody looks for deadlines before a step ahead", "scheduler", "self.expire(now)\n        missing", "missing"),
    Bug("somebody is let in with no tokens left of the budget", "scheduler", "and (budget or whole_batch)", ""),
    Bug("a fault at a sequence's end leaves its blocks held", "block_tables",
        "        finally:\n            self._let_go(step)",
        "        except ZeroDivisionError: ...\n        else:\n            self._let_go(step)"),
    Bug("a fault in admission leaves matched blocks held", "admission",
        "        finally:\n            if room is None:",
        "        except ZeroDivisionError: ...\n        else:\n            if room is None:", seed=30),
    Bug("a fault after a split leaves the order of use wrong", "prefix_cache", "self._touch(upper)  #", "pass  #",
        seed=402),
    Bug("a fault leaves a root of nothing", "prefix_cache",
        "root = Node(cache_salt, None, array(\"i\"), [])",
        "root = self._roots[cache_salt] = Node(cache_salt, None, array(\"i\"), [])"),
    Bug("salts are mixed up", "prefix_cache", "if (root := self._roots.get(cache_salt)) is None:",
        "if (root := next(iter(self._roots.values()), None)) is None:"),
    Bug("a leaf in use is evicted", "prefix_cache", "goal and not pool.holders(leaf.blocks[left - 1]):", "goal:"),
    Bug("the first child is taken for the closest", "prefix_cache", "if length > shared:", "if length >= 0:"),
    Bug("an edge is followed a block too far", "prefix_cache",
        "common(branch.tokens, tokens[at : at + len(branch.tokens)])",
        "-(-common(branch.tokens, tokens[at : at + len(branch.tokens)]) // size) * size"),
    Bug("a block enters the tree twice", "prefix_cache",
        "blocks[len(known) : self", "blocks[max(len(known) - 1, 0) : self"),
    Bug("a duplicate replaces the tree's block and is not let go", "prefix_cache",
        "(drop or self.pool.drop)([blocks[i]])", "pass"),
    Bug("a leaf that goes on inside its last block is left behind", "prefix_cache",
        "self._remove(branch)  #", "pass  #"),
    Bug("rows of images run without features", "scheduler", "rows = min(sequence.reach(sequence.planned, budget), ",
        "rows = min(sequence.planned + min(pending, budget), "),
    Bug("a match ends within an image whose rows see each other", "admission",
        "while (start := sequence.within(match.length)) is not None:", "while False:"),
    Bug("an image whose rows were evicted stays", "prefix_cache",
        "self.images.drop_tokens(leaf.tokens[left * size :])", "pass"),
    Bug("an image of a leaf that is replaced stays", "prefix_cache", "self.images.drop_tokens(branch.tokens)", "pass",
        seed=27),
    Bug("an image goes while the tree has its rows", "prefix_cache", "self.images.hold_tokens(rest)", "pass"),
    Bug("matches end inside a group", "prefix_cache", "length = found - found % self.round_to", "length = found"),
    Bug("a node is used without its parents", "prefix_cache",
        "node = node.parent\n\n    def _rem", "break\n\n    def _rem"),
    Bug("an evicted block is not forgotten", "prefix_cache", "self._forget([leaf.blocks[left]])", "pass"),
    Bug("nothing is released behind a window", "sliding", "if first > sequence.slid:", "if False:"),
    Bug("a block is released that a window reads", "sliding", "self.limits.first(sequence.computed), self.pool",
        "self.limits.first(sequence.computed + 1), self.pool"),
    Bug("sliding blocks of wrong drafts stay", "sliding", "if len(sequence.sliding) > end:", "if False:"),
    Bug("a match ends behind a hole", "sliding", "            if hole is None:", "            if True:"),
    Bug("a match's window is not held", "sliding", "self._hold(held)", "self._hold(held[len(window) :])"),
    Bug("what was lent is not dropped", "sliding", "self.drop(step.sliding_held)", "pass"),
    Bug("what was lent counts for ever", "sliding", "self.lent -= len(step.sliding_held)", "pass"),
    Bug("a promise outlives its sequence", "sliding", "self._promised.pop(sequence, None)", "pass"),
    Bug("more is promised than there is", "sliding", "+ copies <= self.unpromised", "+ copies <= self.pool.total"),
    Bug("what lies beside an evicted block stays", "sliding", "self.pool.forget([own])", "pass"),
    Bug("a sequence that ends within a step frees its window", "sliding", "        if step is None:",
        "        if True:"),
    Bug("a branch has the window of another", "block_tables", "sequence.sliding[place : place + 1] = [block]", "pass"),
    Bug("sliding blocks of branches are never let go", "block_tables",
        "self.sliding.lend(step, list(itertools.chain.from_iterable(tree.sliding)))", "pass"),
    Bug("a fetch that nobody waits for is given up under the thread", "fetching",
        "late, fetch.sequences = fetch.sequences, []",
        "late, fetch.sequences = fetch.sequences, []; self._pool.drop(fetch.filled)"),
    Bug("a block that was not filled enters the tree", "fetching", "(fetch.known + count) *",
        "min(len(fetch.blocks), fetch.known + count + 1) *"),
    Bug("fetched blocks are never let go", "fetching", "self._pool.drop(fetch.blocks)", "pass"),
    Bug("the blocks before fetched ones are not held", "fetching", "self._pool.hold(known)", "pass", seed=32),
    Bug("the blocks before fetched ones stay held where there is no room", "fetching",
        "self._pool.drop(known)", "pass", seed=353),
    Bug("one more fetch than there is room for", "fetching", "cached + count + spare <= pool.available", "True",
        seed=50),
    Bug("a sequence whose blocks came is forgotten", "fetching",
        "sequence.fetched = count * self._pool.size\n                self._requeue(sequence, now)", "pass"),
    Bug("deadlines of fetches are missed", "scheduler", "self.fetching.expire(now)", "pass"),
    Bug("cancelled while it waits for blocks, it waits on", "scheduler", "self.fetching.leave(sequence)", "pass",
        seed=41),
    Bug("lent blocks are not held", "fetching", "self._pool.hold(blocks)", "pass"),
    Bug("a freed block is not put back", "block_pool", "self._free.append(block)", "pass"),
    Bug("a cached block counts as free", "block_pool", "CACHED if self._kept[block] else FREE\n        before",
        "FREE\n        before"),
]  # fmt: skip


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.name)
def test_a_planted_bug_is_found(bug: Bug, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = (SOURCE / f"{bug.file}.py").read_text()
    assert source.count(bug.line) == 1, "the line to be broken is not there"
    broken = loaded(bug.file, source.replace(bug.line, bug.instead), tmp_path, monkeypatch)
    assert failing((bug.seed, *range(ENOUGH)), **{bug.file: broken}) is not None


@pytest.mark.parametrize("file", sorted({bug.file for bug in BUGS}))
def test_a_module_without_a_bug_passes(file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a bug would be found for its module's being a second one."""
    whole = loaded(file, (SOURCE / f"{file}.py").read_text(), tmp_path, monkeypatch)
    assert failing(range(20), **{file: whole}) is None


def loaded(file: str, source: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A module of `attar.scheduling` with another source."""
    path = folder / f"{file}.py"
    path.write_text(source)
    spec = importlib.util.spec_from_file_location(f"broken_{file}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)  # where dataclasses look their module up
    spec.loader.exec_module(module)
    return module

"""The process that proves grammars: reads them on stdin, writes verdicts on stdout, until stdin ends.

Started by `grammar_proof.py` in a bare Python. Its first request is the vocabulary. Each further one is a grammar, for
which the process forks: the copy limits its own memory, processor time and stack, compiles the grammar and walks along
it, and is gone. So no grammar leaves anything behind, and one that overflows the stack costs a copy.

The stack has 1 MiB, less than any thread that will run the grammar later: a compiler that recurses too deeply there
ends here.
"""

from __future__ import annotations

import json
import os
import random
import resource
import sys
import threading
from typing import Any

from attar.errors import UserError
from attar.protocol.child_process import NO_FILES, limit, memory_with, send
from attar.protocol.framing import read
from attar.protocol.grammar import Grammar
from attar.text import grammars

MAX_FRAME = 64 << 20
EXTRA_MEMORY = 384 << 20  # bytes of address space above what the idle process has
CPU_SECONDS = 2
STACK = 1 << 20  # bytes
STEPS = 32  # tokens of the walk


def prove(vocabulary: grammars.Vocabulary, grammar: Grammar) -> None:
    """Compile a grammar, copy it, and walk along random tokens that it allows. Raises GrammarError."""
    found = grammars.matcher(vocabulary, grammar)
    found.deep_copy()
    source, ends = random.Random(0), sum(1 << each for each in vocabulary.ends)
    for _ in range(STEPS):
        if (bits := grammars.mask(found)) is None:
            break
        allowed = int.from_bytes(bits, "little")
        if not allowed:
            raise grammars.refusal(grammar, "NoExtension")
        if not (going_on := allowed & ~ends):
            return
        if not found.consume_token(_one_of(going_on, source)) or found.is_stopped():
            break
    if found.is_error():
        raise grammars.refusal(grammar, found.get_error())


def _one_of(bits: int, source: random.Random) -> int:
    """Return the place of one of the bits that are set: the first behind a random place."""
    rest = bits >> source.randrange(bits.bit_length())
    rest <<= bits.bit_length() - rest.bit_length()
    return (rest & -rest).bit_length() - 1


def answer(vocabulary: grammars.Vocabulary, body: bytes) -> bytes:
    """Return the verdict on a grammar: `+`, or `-` with the place and the sentence of an error."""
    try:
        prove(vocabulary, Grammar(**json.loads(body)))
    except MemoryError:
        return b'-[null, "the constraint needs too much memory"]'
    except RecursionError:
        return b'-[null, "the constraint is nested too deeply"]'
    except UserError as error:
        return b"-" + json.dumps([getattr(error, "pointer", None), str(error)]).encode()
    return b"+"


def limit_work() -> None:
    """Limit the memory and processor time of this process, and the stack of its next thread."""
    limit({**NO_FILES, **memory_with(EXTRA_MEMORY)})
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_SECONDS, CPU_SECONDS + 1))
    threading.stack_size(STACK)


def work(vocabulary: grammars.Vocabulary, body: bytes) -> None:
    """Write the verdict on a grammar, in a copy of the process that ends with it."""
    limit_work()
    said: list[bytes] = []
    thread = threading.Thread(target=lambda: said.append(answer(vocabulary, body)))
    thread.start()
    thread.join()
    send(said[0])
    os._exit(0)


def main() -> None:
    send(b"+")
    words: Any = read(sys.stdin.buffer, MAX_FRAME)
    if words is None:
        return
    vocabulary = grammars.Vocabulary.from_json(words)
    grammars.matcher(vocabulary, Grammar("regex", "a"))  # all that is made at first use
    send(b"+")
    while (body := read(sys.stdin.buffer)) is not None:
        if (pid := os.fork()) == 0:
            try:
                work(vocabulary, body)
            finally:
                os._exit(1)
        _, status = os.waitpid(pid, 0)
        if os.WIFSIGNALED(status):
            seconds = os.WTERMSIG(status) in (9, 24)
            words = f"takes more than {CPU_SECONDS} s to compile" if seconds else "is nested too deeply or too large"
            send(b"-" + json.dumps([None, f"the constraint {words}"]).encode())
        elif os.WEXITSTATUS(status):
            send(b'-[null, "the constraint cannot be compiled"]')

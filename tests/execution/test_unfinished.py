"""Which unfinished block is whose: nobody loses one that is still wanted, and a step can be run again."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from attar.execution.unfinished import Unfinished
from attar.scheduling.sequence import Sequence, Status
from attar.scheduling.step_plan import ScheduledTokens

SIZE, RUNNING = 16, 3


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_lives_of_unfinished_blocks(data: st.DataObject) -> None:
    """Contents are modelled: (sequence, block) in each, and what a row reads of its own block must be there."""
    unfinished, held = Unfinished(RUNNING), dict[int, tuple[Sequence, int]]()
    running: list[Sequence] = []
    names = iter(range(10**6))
    for _ in range(data.draw(st.integers(1, 25))):
        for sequence in [s for s in running if data.draw(st.integers(0, 9)) == 0]:
            sequence.status = data.draw(st.sampled_from([Status.ENDED, Status.PREEMPTED]))
            running.remove(sequence)
        while len(running) < RUNNING and data.draw(st.booleans()):
            made = Sequence(id=str(next(names)), prompt_ids=[0], max_tokens=1)
            made.status, made.computed = Status.PREFILL, SIZE * data.draw(st.integers(0, 2))
            running.append(made)
        chosen = [s for s in running if data.draw(st.integers(0, 3))]
        chunks = [ScheduledTokens(s, s.computed, data.draw(st.integers(1, 50)), 1) for s in chosen]
        for _ in range(data.draw(st.integers(1, 2))):  # a step that raised is run again
            tails = unfinished.tails(chunks, SIZE)
            blocks = [range(start // SIZE, (start + rows - 1) // SIZE + 1) for _, start, rows, *_ in chunks]
            for piece in range(max(map(len, blocks), default=0)):  # all sequences fill their next block side by side
                filled = {}
                for row, ((sequence, start, *_), of_row) in enumerate(zip(chunks, blocks, strict=True)):
                    if piece < len(of_row):
                        block, tail = of_row[piece], tails(row, of_row[piece])
                        assert 0 <= tail < unfinished.count
                        assert tail not in filled
                        if start // SIZE == block and start % SIZE:  # what was there before is read
                            assert held[tail] == (sequence, block)
                        filled[tail] = (sequence, block)
                held |= filled
        for sequence, start, rows, *_ in chunks:
            sequence.computed = start + rows

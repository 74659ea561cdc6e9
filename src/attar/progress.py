"""What long work calls to say how far it has come, so that a command can show it."""

from __future__ import annotations

from typing import Protocol


class Progress(Protocol):
    """Take a report of a stage of work: `done` of its `total` parts, whatever the stage counts in.

    Work calls it from the thread that it runs in. Of a stage, `total` stays and `done` does not fall, unless the stage
    begins again for another model; `done` may begin above 0 where an earlier run is resumed, and need not reach
    `total`. Stages follow one another, each under the name that a user is shown. What it raises ends the work, as
    KeyboardInterrupt does, and leaves what can be resumed.
    """

    def __call__(self, stage: str, done: int, total: int, /) -> None: ...


class StageProgress(Protocol):
    """Take a report of one stage, as `Progress` does, where the caller of the work names the stage."""

    def __call__(self, done: int, total: int, /) -> None: ...

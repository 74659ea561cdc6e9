"""A model in two processes: the texts of one, and what happens when one of them dies."""

from __future__ import annotations

import itertools
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from attar import faults
from attar.checkpoints.adapters import lora
from attar.checkpoints.sources.hub import embedded
from attar.engine import startup
from attar.engine.config import EngineConfig
from attar.engine.engine import Engine
from attar.engine.llm.llm import LLM
from attar.engine.loader import Parallel
from attar.execution.parallel import executor
from attar.execution.parallel.commands import Job, encode
from attar.execution.parallel.executor import ParallelExecutor, ParallelRunner, WorkerLost
from attar.execution.parallel.worker_group import WorkerGroup
from attar.faults import Fault
from attar.kernels.operands import Routes
from attar.kv.schemes import SCHEMES
from attar.model.cache import ForwardBatch
from attar.protocol.messages import Delta, Embed, Failed, Submit
from attar.protocol.request import SamplingParams
from attar.protocol.scheduler_config import SchedulerConfig
from attar.protocol.settings import Settings
from tests.engine.test_adapters import save
from tests.errors import user_error

SECONDS = 30.0  # in which a death is known, on a machine however busy; on a quiet one it takes a tenth of a second
SUMMED = 1e-4  # max |difference| of logits of a few units, float32
PROMPTS = ("Once upon a time there was", "The dog")
GREEDY = SamplingParams(max_tokens=12, temperature=0, prompt_logprobs=0)


def gone(process: subprocess.Popen[bytes]) -> bool:
    """Whether it ends in time."""
    try:
        process.wait(SECONDS)
    except subprocess.TimeoutExpired:
        return False
    return True


@pytest.fixture(scope="module")
def one(demo: Path) -> LLM:
    return LLM(demo)


@pytest.fixture(scope="module", params=[(2, 1), (1, 2)], ids=["tp", "pp"])
def two(demo: Path, request: pytest.FixtureRequest) -> Iterator[LLM]:
    tp, pp = request.param
    llm = LLM(demo, parallel=Parallel(tp, pp))
    yield llm
    llm.close()


def test_texts_are_those_of_one_process(one: LLM, two: LLM) -> None:
    alone, together = one.generate(PROMPTS, GREEDY), two.generate(PROMPTS, GREEDY)
    assert [each.token_ids for each in together] == [each.token_ids for each in alone]
    again = two.generate([PROMPTS[0] + alone[0].text, *PROMPTS], GREEDY)  # by the prefix tree, in the same engine
    assert [each.token_ids for each in again[1:]] == [each.token_ids for each in alone]


@pytest.mark.parametrize("kv", [None, "kivi2"])
def test_preempted_forked_and_scored_sequences(one: LLM, two: LLM, kv: str | None) -> None:
    """Few blocks for several requests of several choices: blocks change hands, are copied, and given up."""

    def told(llm: LLM) -> tuple[dict[tuple[str, int], list[int]], int]:
        limits = SchedulerConfig(max_step_tokens=48, headroom=0.0)
        engine = Engine(
            llm.decoder,
            None,
            EngineConfig(6, 160, limits, kv=None if kv is None else SCHEMES[kv]),
            runner=llm.model.runner,
            clock=itertools.count().__next__,
        )
        params = SamplingParams(max_tokens=10, temperature=0, ignore_eos=True)
        scored = replace(params, prompt_logprobs=0, max_tokens=3)
        for i, n in enumerate((2, 1, 2)):
            engine.submit(Submit(f"{i}", tuple(range(100 + i, 160 + i)), params, n=n))
        engine.submit(Submit("scored", tuple(range(100, 140)), scored))
        engine.embed(Embed("vector", tuple(range(30))))
        tokens: dict[tuple[str, int], list[int]] = {}
        while not engine.idle:
            for event in engine.step():
                assert not isinstance(event, Failed), event
                if isinstance(event, Delta):
                    tokens.setdefault((event.id, event.choice), []).extend(event.token_ids)
        return tokens, engine.scheduler.preemptions

    alone, together = told(one), told(two)
    assert together == alone
    assert alone[1] > 0, "nothing was preempted"


def test_logits_outside_of_an_engine_too(one: LLM, two: LLM) -> None:
    ids = [5, 6, 7, 8]
    assert (one.logits(ids) - two.logits(ids)).abs().max() < SUMMED
    caches = [llm.decoder.cache(8, 2, SCHEMES["int8"]) for llm in (one, two)]
    for lengths in ((2, 1), (1, 0), (1, 1)):
        rows = torch.arange(sum(lengths))
        found = [
            llm.decoder.forward(rows + 9, ForwardBatch(lengths, 8, cache), rows[-1:])
            for llm, cache in zip((one, two), caches, strict=True)
        ]
        assert (found[0] - found[1]).abs().max() < SUMMED * 100, "codes of eight bits may fall to the other side"


@pytest.fixture(scope="module")
def tone(one: LLM, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An adapter of every linear, the output matrix among them."""
    folder = tmp_path_factory.mktemp("adapters") / "tone"
    save(folder, lora.shapes_of(one.decoder), 0)
    return folder


def test_requests_take_adapters_in_every_process(one: LLM, two: LLM, tone: Path) -> None:
    def told(llm: LLM) -> list[tuple[list[int], float]]:
        lora.install(llm.decoder, 1, tone)
        limits = SchedulerConfig(max_running=4, max_step_tokens=24)
        engine = Engine(
            llm.decoder, None, EngineConfig(12, 64, limits, adapters=("tone",)), runner=llm.model.runner
        )  # fmt: skip
        params, asks = (
            SamplingParams(max_tokens=6, temperature=0, logprobs=0, ignore_eos=True),
            ("", "tone", "tone", ""),
        )
        for i, adapter in enumerate(asks):
            engine.submit(Submit(f"{i}", tuple(range(100 + i // 2, 130)), params, adapter=adapter))
        found: dict[str, tuple[list[int], list[float]]] = {}
        while not engine.idle:
            for event in engine.step():
                assert not isinstance(event, Failed), event
                if isinstance(event, Delta):
                    tokens, chances = found.setdefault(event.id, ([], []))
                    tokens.extend(event.token_ids)
                    chances.extend(each.logprob for each in event.logprobs or ())
        return [(tokens, sum(chances)) for _, (tokens, chances) in sorted(found.items())]

    alone, together = told(one), told(two)
    assert [tokens for tokens, _ in together] == [tokens for tokens, _ in alone]
    assert [chance for _, chance in together] == pytest.approx([chance for _, chance in alone], abs=10 * SUMMED)
    assert alone[0][0] != alone[1][0]
    rows = torch.randn(3, one.decoder.config.hidden, generator=torch.Generator().manual_seed(0))
    routes = Routes(torch.tensor([0, 1, 0]))
    found = [llm.decoder.logits(rows, routes=routes) for llm in (one, two)]
    assert (found[0] - found[1]).abs().max() < SUMMED * found[0].abs().max()
    assert (found[0] - one.decoder.logits(rows))[1].abs().max() > SUMMED


def test_an_adapter_that_is_wrong_is_found_before_the_others_hear_of_it(two: LLM, tmp_path: Path) -> None:
    before = two.logits([5, 6, 7])
    with user_error("file_not_found", "adapter_model.safetensors"):
        lora.attach(two.decoder, tmp_path)
    assert torch.equal(two.logits([5, 6, 7]), before)


def test_hidden_states_may_become_logits_later(one: LLM, two: LLM) -> None:
    rows = torch.randn(3, one.decoder.config.hidden, generator=torch.Generator().manual_seed(0))
    assert (one.decoder.logits(rows) - two.decoder.logits(rows)).abs().max() < SUMMED


def test_what_cannot_be_shared_is_refused_before_a_process_starts(demo: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subprocess, "Popen", None)
    with user_error("parallel_indivisible"):
        ParallelExecutor(demo, 3, 1)


def test_a_scheme_of_keys_that_is_calibrated_is_refused(two: LLM) -> None:
    from attar.execution import kv_cache as kv

    with user_error("kv_unsupported"):
        kv.resolve(two.decoder, "klt4")


def test_a_worker_ends_with_its_leader_whatever_it_is_doing(tmp_path: Path) -> None:
    worker = subprocess.Popen(
        [sys.executable, "-m", "attar.execution.parallel.worker"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert worker.stdin is not None
    assert worker.stdout is not None
    folder = tmp_path / "folder"
    folder.mkdir()
    worker.stdin.write(encode(Job("model", 1, 2, 1, "cpu", "float32", "int8g128", True, 1, str(folder))))
    worker.stdin.flush()
    assert b"started" in worker.stdout.read(4 + 15)
    assert worker.poll() is None, "it waits for the first process, which never comes"
    worker.stdin.close()
    assert gone(worker)
    assert not folder.exists()
    worker.stdout.close()


def test_a_worker_whose_gpu_does_not_answer_says_so(tmp_path: Path) -> None:
    script = (
        "import torch\n"
        "def silent(device):\n    raise RuntimeError('no answer')\n"
        "torch.cuda.mem_get_info = silent\n"
        "from attar.execution.parallel import worker\n"
        "raise SystemExit(worker.main())"
    )
    job = encode(Job("model", 1, 2, 1, "cuda:1", "float32", "int8g128", True, 1, str(tmp_path)))
    worker = subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert worker.stdin is not None
    assert worker.stdout is not None
    worker.stdin.write(job)
    worker.stdin.flush()
    said = worker.stdout.read()  # to its end, however long importing takes
    assert gone(worker)
    worker.stdin.close()
    worker.stdout.close()
    assert worker.returncode == 2
    assert b"cuda:1 cannot be used: no answer" in said


def test_every_process_has_its_part_of_the_threads(demo: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Asked(Exception):
        pass

    def made(folder: Path, jobs: list[Job]) -> WorkerGroup:
        assert [job.threads for job in jobs] == [3]
        folder.rmdir()
        raise Asked

    monkeypatch.setattr(executor, "WorkerGroup", made)
    monkeypatch.setattr(executor.machine, "cores", lambda *args: 64)
    threads = torch.get_num_threads()
    try:
        with pytest.raises(Asked):
            startup.start_engine(Settings(str(demo), "", memory=10**9, context=256, tp=2, threads=6))
    finally:
        torch.set_num_threads(threads)


def test_an_engine_ends_when_a_worker_dies(tmp_path: Path) -> None:
    settings = Settings(str(embedded()), str(tmp_path / "engine"), max_cached_tokens=512, context=128, tp=2, threads=1)
    (tmp_path / "temporary").mkdir()
    engine = subprocess.Popen(
        [sys.executable, "-m", "attar.engine.main"],
        stdin=subprocess.PIPE,
        env=os.environ | {"TMPDIR": str(tmp_path / "temporary")},
    )
    assert engine.stdin is not None
    engine.stdin.write(msgspec.json.encode(settings) + b"\n")
    engine.stdin.flush()
    while not (tmp_path / "engine").exists():
        assert engine.poll() is None, "it does not start"
        time.sleep(0.05)
    children = Path(f"/proc/{engine.pid}/task/{engine.pid}/children").read_text().split()
    workers = [
        int(pid) for pid in children if "attar.execution.parallel.worker" in Path(f"/proc/{pid}/cmdline").read_text()
    ]
    os.kill(workers[0], signal.SIGKILL)
    assert gone(engine)
    assert engine.returncode == 1
    assert not list((tmp_path / "temporary").glob("attar-*")), "the folder of their meeting"
    engine.stdin.close()


def tokens(llm: LLM) -> tuple[dict[str, list[int]], Engine]:
    """What an engine of its own gives to three prompts, of which one is scored and one shares a beginning."""
    limits = SchedulerConfig(max_step_tokens=48, headroom=0.0)
    made = Engine(llm.decoder, None, EngineConfig(8, 160, limits), runner=llm.model.runner)
    params = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)
    for i, prompt in enumerate((range(100, 170), range(100, 150), range(30))):
        scored = replace(params, prompt_logprobs=0) if i == 2 else params
        made.submit(Submit(str(i), tuple(prompt), scored))
    found: dict[str, list[int]] = {}
    while not made.idle:
        for event in made.step():
            assert not isinstance(event, Failed), event
            if isinstance(event, Delta):
                found.setdefault(event.id, []).extend(event.token_ids)
    return found, made


def test_where_the_first_has_too_little_memory_all_run_smaller_steps(one: LLM, two: LLM) -> None:
    """Twice: they meet anew each time."""
    expected, _ = tokens(one)
    faults.arm(Fault("runner.memory", after=1, times=2))  # in a step of 22 tokens, and in its half
    found, made = tokens(two)
    assert found == expected
    assert made.launcher.rows == 6
    assert (made.ahead, set(made.alone)) == (0, set()), "on CPUs nothing overlaps"
    assert made.runner.waits == "several processes compute a step together"


def test_they_meet_anew_where_their_folder_was_cleaned_away(one: LLM, two: LLM) -> None:
    found, made = tokens(two)
    assert isinstance(made.runner, ParallelRunner)
    shutil.rmtree(made.runner.workers.folder)
    faults.arm(Fault("runner.memory", after=1, times=2))
    assert tokens(two)[0] == found == tokens(one)[0]


LATE = """
import time
from pathlib import Path
from attar.execution.parallel import part, worker

plain = part.meet_again

def meet_again(job, groups, count):
    plain(job, groups, count)
    time.sleep(0.3)
    Path(job.folder, f"through{count}").touch()

part.meet_again = meet_again
raise SystemExit(worker.main())
"""


def test_nobody_goes_on_before_all_have_met(demo: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who is short of memory in the very next step too would leave while others are still making connections."""

    class Late(subprocess.Popen[bytes]):
        def __init__(self, command: list[str], **how: Any) -> None:
            super().__init__([command[0], "-c", LATE], **how)

    monkeypatch.setattr(subprocess, "Popen", Late)
    llm = LLM(demo, parallel=Parallel(2))
    through = []
    plain = ParallelRunner._meet

    def meet(self: ParallelRunner) -> None:
        plain(self)
        through.append((self.workers.folder / f"through{self.workers.met}").exists())

    monkeypatch.setattr(ParallelRunner, "_meet", meet)
    try:
        faults.arm(Fault("runner.memory", after=1, times=2))
        tokens(llm)
        assert through == [True, True]
    finally:
        llm.close()


SHORT = """
import torch
from attar.execution.parallel import worker
from attar.model import layers

plain = layers.Attention.forward

def forward(self, x, step, hook=None):
    if self.layer == 1 and len(x) > 12:
        raise torch.OutOfMemoryError("no room")
    return plain(self, x, step, hook)

layers.Attention.forward = forward
raise SystemExit(worker.main())
"""


def test_where_another_has_too_little_memory_within_a_step_all_run_smaller_ones(
    one: LLM, demo: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first waits for it in an exchange then, and has done half of the step."""

    class Small(subprocess.Popen[bytes]):
        def __init__(self, command: list[str], **how: Any) -> None:
            super().__init__([command[0], "-c", SHORT], **how)

    monkeypatch.setattr(subprocess, "Popen", Small)
    llm = LLM(demo, parallel=Parallel(2))
    try:
        found, made = tokens(llm)
        assert found == tokens(one)[0]
        assert made.launcher.rows == 12
    finally:
        llm.close()


def test_a_step_that_is_broken_off_ends_the_model(demo: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The others have run it, and their answer would be taken for that to the next step."""

    def interrupted(*args: Any) -> None:
        raise KeyboardInterrupt

    llm = LLM(demo, parallel=Parallel(2))
    try:
        monkeypatch.setattr(llm.decoder, "states", interrupted)
        with pytest.raises(KeyboardInterrupt):
            tokens(llm)
        monkeypatch.undo()
        with pytest.raises(RuntimeError, match="a step was broken off"):
            llm.logits([1, 2])
    finally:
        llm.close()


def test_others_that_wait_within_a_step_are_not_waited_for(demo: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = LLM(demo, parallel=Parallel(2))
    try:
        monkeypatch.setattr(executor, "waits", lambda decoder: "as on a GPU where experts run")
        faults.arm(Fault("runner.memory"))
        with pytest.raises(WorkerLost, match="too little memory"):
            tokens(llm)
    finally:
        llm.close()


def test_an_adapter_of_all_rows(demo: Path, two: LLM, tone: Path) -> None:
    """Nothing takes it away again, so few tests come after this one."""
    one = LLM(demo)
    one.attach(tone)
    expected = one.logits([5, 6, 7, 8])
    before = two.logits([5, 6, 7, 8])
    lora.attach(two.decoder, tone)
    assert (two.logits([5, 6, 7, 8]) - expected).abs().max() < SUMMED * expected.abs().max()
    assert (before - expected).abs().max() > SUMMED * expected.abs().max()


def test_a_dead_process_is_known(two: LLM) -> None:
    """The last of its module: nothing is left of the fixture."""
    assert two.model.executor is not None
    two.running.engine = None  # others were made of the same processes, which know the last alone
    answer = two.stream(PROMPTS[0], SamplingParams(max_tokens=200, temperature=0, ignore_eos=True))
    next(answer)
    two.model.executor.workers.children[0].send_signal(signal.SIGKILL)
    since = time.monotonic()
    with pytest.raises(RuntimeError, match="the model is no longer there: process 1 of the model ended with status -9"):
        list(answer)
    with pytest.raises(RuntimeError, match="process 1 of the model ended"):
        two.logits([1, 2])
    assert time.monotonic() - since < SECONDS
    two.close()
    assert not two.model.executor.workers.folder.exists()

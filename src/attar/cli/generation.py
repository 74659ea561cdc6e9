"""Commands that run a model in this process: `generate`, `chat`, `bench`."""

from __future__ import annotations

import sys
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from attar.cli.options import (
    MODEL,
    Activations,
    Adapter,
    ComputeDtype,
    Device,
    Json,
    Kv,
    Model,
    NoVerify,
    Pp,
    Quiet,
    Rounding,
    Tp,
)
from attar.cli.terminal import (
    NO_RECEIPT,
    Progress,
    emit,
    errors,
    print_pieces,
    progress,
    read_stdin,
    require,
    tell,
    tell_doubt,
    tell_shared,
)

if TYPE_CHECKING:
    from attar.engine.llm import LLM
    from attar.protocol.request import Completion


def _load(model: str, bar: Progress, adapter: Path | None, *, device: str, tp: int, pp: int, **how: Any) -> LLM:
    """The model, with what there is to say of it on stderr; `how` goes on to `LLM`."""
    from attar.engine.llm import LLM
    from attar.engine.loader import Parallel

    tell_shared(device, tp, pp)
    llm = LLM(model, device=device, progress=bar, parallel=Parallel(tp, pp), **how)
    if adapter is not None:
        llm.attach(adapter)
    bar.close()
    if llm.model.receipt is None:
        tell(NO_RECEIPT)
    tell_doubt(adapter, llm.model.path)
    return llm


def _cut_short(llm: LLM, done: Completion, max_tokens: int) -> list[str]:
    """What is to be said of a text that the context ended before `max_tokens`; said on stderr, too."""
    if done.finish_reason != "length" or len(done.token_ids) >= max_tokens:
        return []
    said = f"the context of {llm.context} tokens is full: {len(done.token_ids)} of {max_tokens} tokens were generated"
    tell(said)
    return [said]


def generate(
    model: Model,
    prompt: Annotated[
        str | None, typer.Option(help="The text to continue; default: stdin, less its last line break.")
    ] = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="Tokens to generate at most.")] = 128,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 takes the likeliest token.")] = 1.0,
    top_k: Annotated[int, typer.Option(min=0, help="Draw among the k likeliest; 0: all.")] = 0,
    top_p: Annotated[
        float, typer.Option(help="Draw among the likeliest that hold this much probability; in (0, 1].")
    ] = 1.0,
    min_p: Annotated[
        float, typer.Option(help="Drop tokens below this fraction of the likeliest one's probability; in [0, 1].")
    ] = 0.0,
    repetition_penalty: Annotated[float, typer.Option(help="Above 1: tokens seen before become less likely.")] = 1.0,
    presence_penalty: Annotated[
        float, typer.Option(help="Subtracted from the logit of each token generated before.")
    ] = 0.0,
    frequency_penalty: Annotated[float, typer.Option(help="The same, once for each time it was generated.")] = 0.0,
    stop: Annotated[list[str] | None, typer.Option(help="End at this text, which is not printed. Repeatable.")] = None,
    ignore_eos: Annotated[
        bool, typer.Option("--ignore-eos", help="Go on past the tokens that end a text, to --max-tokens.")
    ] = False,
    seed: Annotated[int | None, typer.Option(min=0, help="Makes a drawn text repeatable.")] = None,
    logprobs: Annotated[
        int | None, typer.Option(min=0, help="Also report the log-probabilities of the k likeliest.")
    ] = None,
    device: Device = "cpu",
    dtype: ComputeDtype = None,
    activations: Activations = Rounding.int8g128,
    adapter: Adapter = None,
    tp: Tp = 1,
    pp: Pp = 1,
    no_verify: NoVerify = False,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Continue a prompt.

    The text streams to stdout as it is made. Options are as given here: of the model's generation_config.json only the
    tokens that end a text are taken, never a temperature or filter.
    """
    with errors(as_json), progress(quiet) as bar:
        from attar.protocol.request import SamplingParams

        params = SamplingParams(
            max_tokens=max_tokens, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p,
            repetition_penalty=repetition_penalty, presence_penalty=presence_penalty,
            frequency_penalty=frequency_penalty, stop=tuple(stop or ()), ignore_eos=ignore_eos, seed=seed,
            logprobs=logprobs,
        )  # fmt: skip
        require(device)
        if prompt is None:
            prompt = read_stdin()
        llm = _load(
            model,
            bar,
            adapter,
            device=device,
            dtype=dtype,
            activations=activations.value,
            verify=not no_verify,
            tp=tp,
            pp=pp,
        )
        done = print_pieces(llm.stream(prompt, params))
        emit(as_json, done.to_dict() | {"warnings": _cut_short(llm, done, max_tokens)})


def chat(
    model: Model,
    system: Annotated[str | None, typer.Option(help="A system message to begin with.")] = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="Tokens of one answer at most.")] = 512,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 takes the likeliest token.")] = 0.7,
    top_p: Annotated[
        float, typer.Option(help="Draw among the likeliest that hold this much probability; in (0, 1].")
    ] = 1.0,
    seed: Annotated[int | None, typer.Option(min=0, help="Makes a drawn answer repeatable.")] = None,
    device: Device = "cpu",
    dtype: ComputeDtype = None,
    activations: Activations = Rounding.int8g128,
    adapter: Adapter = None,
    tp: Tp = 1,
    pp: Pp = 1,
    no_verify: NoVerify = False,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Talk to a model through its own chat template.

    One line is one turn; an empty line or Ctrl-D ends. With stdin piped, each of its lines is a turn.
    """
    with errors(as_json), progress(quiet) as bar:
        from attar.protocol.request import SamplingParams

        params = SamplingParams(max_tokens=max_tokens, temperature=temperature, top_p=top_p, seed=seed)
        llm = _load(
            model,
            bar,
            adapter,
            device=device,
            dtype=dtype,
            activations=activations.value,
            verify=not no_verify,
            tp=tp,
            pp=pp,
        )
        llm.tokenizer.chat_template()  # a model that cannot chat says so before the first turn
        if sys.stdin.isatty():
            with suppress(ImportError):
                import readline  # noqa: F401 - arrow keys and history in input()
        messages = [{"role": "system", "content": system}] if system else []
        warnings = []
        while True:
            try:
                said = input("you> " if sys.stdin.isatty() else "")
            except EOFError:
                said = ""
            if not said.strip():
                break
            messages.append({"role": "user", "content": said})
            answer = print_pieces(llm.stream_chat(messages, params))
            messages.append({"role": "assistant", "content": answer.text})
            warnings += _cut_short(llm, answer, max_tokens)
        emit(as_json, {"messages": messages, "warnings": warnings})


def bench(
    source: Annotated[str | None, typer.Argument(metavar="[MODEL]", help=MODEL)] = None,
    shape: Annotated[
        str | None, typer.Option(help="Instead of a model, random weights in the shape of one, such as llama-3.2-1b.")
    ] = None,
    scheme: Annotated[str, typer.Option(help="Of a shape: w4g128, w8a8, ... or bf16.")] = "w4g128",
    head: Annotated[str, typer.Option(help="Of a shape: its output matrix in bf16, int8 or int4.")] = "int8",
    prompt: Annotated[int, typer.Option(min=16, help="Tokens of each prompt.")] = 512,
    gen: Annotated[int, typer.Option(min=2, help="Decode steps.")] = 128,
    batch: Annotated[int, typer.Option(min=1, help="Sequences that decode together.")] = 1,
    device: Device = "cpu",
    activations: Activations = Rounding.int8g128,
    kv: Kv = None,
    tp: Tp = 1,
    pp: Pp = 1,
    as_json: Json = False,
) -> None:
    """Measure speed, beside what this machine can do."""
    with errors(as_json):
        from attar.checkpoints.sources import hub
        from attar.checkpoints.sources.stored import stored
        from attar.evaluation import decode_speed

        if (source is None) == (shape is None):
            raise ValueError("name a model or a --shape, one of the two")
        require(device)
        load = decode_speed.Load(prompt, gen, batch)
        if tp * pp > 1:
            if source is None:
                raise ValueError("--tp and --pp are of a model: a --shape is measured in one process")
            tell_shared(device, tp, pp)
            report = decode_speed.run_shared(hub.resolve(source), tp, pp, load, activations.value, kv, device)
        elif shape is not None:
            name = shape
            report = decode_speed.run(
                lambda store: decode_speed.build(name, scheme, head, store), load, activations.value, kv, device,
                decode_speed.part(name, scheme, head),
            )  # fmt: skip
            report |= {"shape": shape, "scheme": scheme, "head": "bf16" if scheme == "bf16" else head}
        else:
            path = hub.resolve(str(source))
            part = stored(path)
            report = decode_speed.run(
                lambda store: decode_speed.load(path, store), load, activations.value, kv, device, part
            )
        print(decode_speed.to_text(report))
        emit(as_json, report)

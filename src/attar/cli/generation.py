"""Commands that run a model in this process: `generate`, `chat`, `bench`."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from attar import machine
from attar.cli import options, terminal
from attar.cli.commands import configured, flag, option
from attar.cli.terminal import (
    dimmed,
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
from attar.errors import Code, UserError

if TYPE_CHECKING:
    from attar.cli.tool_use.conversation import ToolChat
    from attar.engine.llm.llm import LLM
    from attar.protocol.grammar import Grammar
    from attar.protocol.request import Completion, SamplingParams


def _load(config: options.RunConfig, bar: terminal.Progress) -> LLM:
    """Load the model, and print on stderr what a user should know of it."""
    tell_shared(config.device, config.tp, config.pp)
    with machine.uncollected():
        from attar.engine.llm.llm import LLM
        from attar.engine.loader import Parallel

        llm = LLM(
            config.model, device=config.device, dtype=config.dtype, activations=config.activations.value,
            parallel=Parallel(config.tp, config.pp), draft=config.draft, draft_tokens=config.draft_tokens,
            draft_tree=config.draft_tree, sparse_attention=config.sparse_attention,
            sparse_prefill=config.sparse_prefill, kv_eviction=config.kv_eviction or (), verify=not config.no_verify,
            progress=bar,
        )  # fmt: skip
        gc.freeze()  # all of it is old now, so that the next collection, of young objects, need not walk through it
        gc.unfreeze()
    if config.adapter is not None:
        llm.attach(config.adapter)
    bar.close()
    if llm.model.receipt is None:
        tell(terminal.NO_RECEIPT)
    tell_doubt(config.adapter, llm.model.path)
    return llm


def _cut_short(llm: LLM, done: Completion, max_tokens: int) -> list[str]:
    """Return warnings, printed to stderr too, about a text that the context ended before `max_tokens`."""
    if done.finish_reason != "length" or len(done.token_ids) >= max_tokens:
        return []
    said = f"the context of {llm.context} tokens is full: {len(done.token_ids)} of {max_tokens} tokens were generated"
    tell(said)
    return [said]


@dataclass(frozen=True, kw_only=True)
class ConstrainedConfig(options.RunConfig):
    """Options of a model whose answers may be constrained."""

    schema: Annotated[
        Path | None, option("Constraint", "FILE", "Answer with JSON by this JSON schema.", "--schema")
    ] = None
    regex: Annotated[str | None, option("Constraint", "REGEX", "Answer with a text that this matches as a whole.")] = (
        None
    )
    grammar: Annotated[
        Path | None, option("Constraint", "FILE", "Answer by this grammar, in GBNF or Lark's format.", "--grammar")
    ] = None

    def constraint(self) -> Grammar | None:
        """Return the constraint, if there is one. Raises UserError where there are several, or a file is missing."""
        from attar.protocol.grammar import Grammar
        from attar.text.files import read_text

        given = [name for name in ("schema", "regex", "grammar") if getattr(self, name) is not None]
        if len(given) > 1:
            message = f"an answer has one constraint at most: leave out --{given[0]} or --{given[1]}"
            raise UserError("option_conflict", message)
        if self.schema is not None:
            return Grammar.json_schema(read_text(self.schema))
        if self.grammar is not None:
            return Grammar.of_text(read_text(self.grammar))
        return None if self.regex is None else Grammar("regex", self.regex)


@dataclass(frozen=True, kw_only=True)
class GenerateConfig(ConstrainedConfig):
    """Options of `generate`."""

    prompt: Annotated[
        str | None, option("Prompt", "TEXT", "Text to continue.", default="stdin, without its last line break")
    ] = None
    max_tokens: options.MaxTokens = 128
    stop: Annotated[list[str] | None, option("Prompt", "TEXT", "End at this text, which is not printed.")] = None
    trust_forced: Annotated[bool, flag(
        "Constraint", "Take tokens that the constraint forces, whatever the model draws: fewer steps, another text.",
        "--trust-forced",
    )] = False  # fmt: skip
    suffix: Annotated[
        str | None, option("Prompt", "TEXT", "Text behind the answer, for models that can fill in the middle.")
    ] = None
    min_tokens: Annotated[
        int, option("Prompt", "N", "Sample no end of the text, and seek no --stop, in so many first tokens.", min=0)
    ] = 0
    ignore_eos: Annotated[bool, flag("Prompt", "Continue past EOS, up to --max-tokens.", "--ignore-eos")] = False
    logprobs: Annotated[
        int | None, option("Prompt", "K", "Report the log probabilities of the K most probable tokens.", min=0)
    ] = None
    temperature: Annotated[
        float | None, option("Sampling", "T", options.TEMPERATURE, "--temperature", min=0, default="1")
    ] = None
    top_k: Annotated[
        int | None, option("Sampling", "K", "Sample among the K most probable tokens; 0: all.", min=0, default="0")
    ] = None
    top_p: Annotated[float | None, option("Sampling", "P", options.TOP_P, "--top-p", default="1")] = None
    min_p: Annotated[float | None, option(
        "Sampling", "P", "Drop tokens below this fraction of the largest probability; in [0, 1].", default="0",
    )] = None  # fmt: skip
    repetition_penalty: Annotated[float | None, option(
        "Sampling", "X", "Above 1: make tokens of the prompt and the text less probable.", default="1",
    )] = None  # fmt: skip
    presence_penalty: Annotated[
        float, option("Sampling", "X", "Subtract this from the logit of each token generated before.")
    ] = 0.0
    frequency_penalty: Annotated[float, option("Sampling", "X", "The same, once for each occurrence.")] = 0.0
    seed: options.SamplingSeed = None
    generation_config: options.GenerationConfig = options.Defaults.attar

    def sampling(self) -> SamplingParams:
        """Make the settings of sampling. Raises ValueError for values that make no sense."""
        return _params(
            self, {}, ("top_k", "min_p", "repetition_penalty"), presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty, stop=tuple(self.stop or ()), ignore_eos=self.ignore_eos,
            logprobs=self.logprobs, min_tokens=self.min_tokens, trust_forced=self.trust_forced,
        )  # fmt: skip


def _params(
    config: GenerateConfig | ChatConfig, own: dict[str, Any], names: tuple[str, ...], **others: Any
) -> SamplingParams:
    """Make sampling parameters: those given by option, else the model's where they are asked for, else the command's
    `own`. `names` are options besides those that both commands have."""
    from attar.checkpoints import generation_config
    from attar.checkpoints.sources import hub
    from attar.protocol.request import SamplingParams

    options_given = {name: getattr(config, name) for name in ("temperature", "top_p", *names)}
    given = {name: value for name, value in options_given.items() if value is not None} | others
    given |= {"max_tokens": config.max_tokens, "seed": config.seed}
    SamplingParams(**given)  # wrong ones are refused before anything is downloaded
    if config.generation_config is options.Defaults.model:
        own = generation_config.sampling(hub.resolve(config.model))
    return SamplingParams(**own | given)


@configured(GenerateConfig)
def generate(config: GenerateConfig) -> None:
    """Continue a prompt.

    The text streams to stdout. The model's generation_config.json sets the end tokens. It sets a temperature or filter
    with --generation-config model only.

    Examples:
      attar generate ./out --prompt "Once upon a time" --temperature 0
      attar generate ./out --top-p 0.9 --seed 1 < prompt.txt
      attar generate ./out --prompt "A colour: " --regex "(red|green|blue)"
      attar generate ./coder --prompt "def add(a, b):" --suffix "print(add(1, 2))"
    """
    with errors(config.as_json), progress(config.quiet) as bar:
        params, constraint = config.sampling(), config.constraint()
        require(config.device)
        prompt: str | Sequence[int] = read_stdin() if config.prompt is None else config.prompt
        llm = _load(config, bar)
        if config.suffix is not None:
            prompt, params = _infill(llm, str(prompt), config.suffix, params)
        done = print_pieces(llm.stream(prompt, params, constraint=constraint))
        warnings = _cut_short(llm, done, config.max_tokens) + (_overruled(llm) if config.trust_forced else [])
        emit(config.as_json, done.to_dict() | {"warnings": warnings})


def _overruled(llm: LLM) -> list[str]:
    """Return what trusting forced tokens has changed, printed to stderr too."""
    assert llm.running.engine is not None
    found = llm.running.engine.stats()
    said = f"{found.overruled_tokens} of {found.forced_tokens} forced tokens are others than the model drew"
    tell(said)
    return [said]


def _infill(llm: LLM, prefix: str, suffix: str, params: SamplingParams) -> tuple[Sequence[int], SamplingParams]:
    """Return the prompt for what comes between both texts, and parameters by which a new file ends it too. Raises
    UserError where the model has no tokens for it."""
    from attar.text.forms.infill import Infill
    from attar.text.literal import LiteralChat

    infill = Infill.of(llm.tokenizer, LiteralChat(llm.tokenizer).text_ids)
    if infill is None:
        message = "--suffix: this model has no tokens to fill in the middle of a text"
        raise UserError("feature_unsupported", message)
    return infill.ids(prefix, suffix), replace(params, stop_token_ids=(*params.stop_token_ids, *infill.ends))


@dataclass(frozen=True, kw_only=True)
class ChatConfig(ConstrainedConfig):
    """Options of `chat`."""

    system: Annotated[str | None, option("Prompt", "TEXT", "System message.")] = None
    max_tokens: options.MaxTokens = 512
    temperature: Annotated[
        float | None, option("Sampling", "T", options.TEMPERATURE, "--temperature", min=0, default="0.7")
    ] = None
    top_p: Annotated[float | None, option("Sampling", "P", options.TOP_P, "--top-p", default="1")] = None
    seed: options.SamplingSeed = None
    generation_config: options.GenerationConfig = options.Defaults.attar
    template_date: options.TemplateDate = None
    image: Annotated[list[Path] | None, option(
        "Prompt", "FILE", "PNG, JPEG or WebP file that the first turn shows.", "--image",
    )] = None  # fmt: skip
    tools: Annotated[
        Path | None, option("Tools", "FILE", "Functions of this Python file that the model may call.", "--tools")
    ] = None
    yes_tools: Annotated[
        str | None, option("Tools", "NAMES", "Run calls of these functions without a question, as a,b.", "--yes-tools")
    ] = None


@configured(ChatConfig)
def chat(config: ChatConfig) -> None:
    """Talk to a model through its own chat template.

    One line is one turn; an empty line or Ctrl-D ends the chat. Piped stdin has one turn a line. Each call of a tool is
    shown and confirmed. Without a terminal, calls that --yes-tools does not name are refused.

    Examples:
      attar chat ./out
      attar chat ./out --tools functions.py --yes-tools weather
      attar chat ./out --system "Answer in one sentence." --temperature 0
      attar chat ./vision --image photo.jpg
    """
    with errors(config.as_json), progress(config.quiet) as bar:
        params, constraint = _params(config, {"temperature": 0.7}, ()), config.constraint()
        make, shown = _with_tools(config, constraint), _shown(config.image or ())
        llm = _load(config, bar)
        llm.tokenizer.chat_template()  # a model that cannot chat says so before the first turn
        with_tools = None if make is None else make(llm)
        messages: list[dict[str, Any]] = []
        if config.system is not None:
            messages.append({"role": "system", "content": config.system})
        warnings = []
        for said in _turns():
            messages.append({"role": "user", "content": [*shown, {"type": "text", "text": said}] if shown else said})
            shown = []
            if with_tools is not None:
                answer = with_tools.turn(messages, params, date=config.template_date)
                warnings += _cut_short(llm, answer, config.max_tokens)
                continue
            stream = llm.chat_events(messages, params, constraint=constraint, date=config.template_date)
            answer = print_pieces(dimmed(stream))
            messages.append({"role": "assistant", "content": answer.text})
            warnings += _cut_short(llm, answer, config.max_tokens)
        emit(config.as_json, {"messages": messages, "warnings": warnings})


def _with_tools(config: ChatConfig, constraint: Grammar | None) -> Callable[[LLM], ToolChat] | None:
    """Return what makes a chat with tools of a model; None where there are no tools. Raises UserError for options that
    do not fit together, and for functions that cannot be tools."""
    if config.tools is None:
        if config.yes_tools is not None:
            raise UserError("option_unused", "--yes-tools is for the functions of --tools")
        return None
    from attar.cli.tool_use.conversation import ToolChat, allowed_names, ask_terminal
    from attar.cli.tool_use.functions import Functions

    if constraint is not None:
        raise UserError("option_conflict", "--tools: calls have a grammar of their own: leave out the constraint")
    functions = Functions(config.tools)
    allowed = allowed_names(config.yes_tools, functions)
    return lambda llm: ToolChat(llm, functions, allowed, ask_terminal)


def _shown(files: Sequence[Path]) -> list[dict[str, Any]]:
    """Return the parts of a message that shows image files. Raises UserError for what is no regular file, and for files
    that are too many or too large."""
    from attar.images.decoding import MAX_FILE, check_count

    check_count(len(files))
    for file in files:
        if not file.exists():
            raise UserError("file_not_found", f"--image {file}: no such file")
        if not file.is_file():
            raise UserError("file_wrong_kind", f"--image {file} is no regular file")
        if file.stat().st_size > MAX_FILE:
            raise UserError("image_too_large", f"--image {file}: an image has at most {MAX_FILE >> 20} MiB")
    return [{"type": "image", "image": str(file)} for file in files]


def _turns() -> Iterator[str]:
    """Read the user's turns, up to an empty one or the end of stdin."""
    if sys.stdin.isatty():
        with suppress(ImportError):
            import readline  # noqa: F401 - arrow keys and history in input()
    with suppress(EOFError):
        while (said := input("you> " if sys.stdin.isatty() else "")).strip():
            yield said.removesuffix("\r")  # of lines that end in CRLF


@dataclass(frozen=True, kw_only=True)
class BenchConfig:
    """Options of `bench`."""

    model: options.OptionalModel = None
    shape: Annotated[
        str | None, option("Model", "NAME", "Instead of MODEL: random weights of this shape, such as llama-3.2-1b.")
    ] = None
    scheme: Annotated[str, option("Model", "SCHEME", "Weights of the --shape: w4g128, w8a8, ... or bf16.")] = "w4g128"
    head: Annotated[str, option("Model", "SCHEME", "LM head of the --shape: bf16, int8 or int4.")] = "int8"
    prompt: Annotated[int, option("Workload", "N", "Tokens of each prompt.", min=16)] = 512
    gen: Annotated[int, option("Workload", "N", "Decode steps.", min=2)] = 128
    batch: Annotated[int, option("Workload", "N", "Sequences that decode together.", min=1)] = 1
    rows: Annotated[str | None, option(
        "Workload", "LIST", "Measure steps of so many rows of a sequence too, as 1,2,4,8 over the first's cost.",
    )] = None  # fmt: skip
    rates: Annotated[bool, flag(
        "Workload", "Instead of a model, measure this machine's rates, and keep them for plans by goals.", "--rates",
    )] = False  # fmt: skip
    device: options.Device = "cpu"
    activations: options.Activations = options.Precision.int8g128
    kv: options.Kv = None
    tp: options.Tp = 1
    pp: options.Pp = 1
    output: Annotated[
        Path | None, option("Output", "FILE", "Write the --rates to this file too.", "--output", "-o")
    ] = None
    as_json: options.Json = False


@configured(BenchConfig)
def bench(config: BenchConfig) -> None:
    """Measure decode and prefill speed on this machine.

    The report compares them with the memory bandwidth and the arithmetic peak, measured in the same run. With --rates,
    the machine is measured in a minute: bandwidth, operations, products by rows, and attention.

    Examples:
      attar bench ./out --batch 16
      attar bench ./out --rows 1,2,3,4,6,8,16
      attar bench --shape llama-3.2-1b --scheme w4g128 --head int8
      attar bench --rates -o rates.json
    """
    with errors(config.as_json):
        if config.rates:
            from attar.cli.goals.rates import measure_rates

            if config.model is not None or config.shape is not None or config.device != "cpu":
                message = "--rates measures this CPU: leave out the model, --shape and --device"
                raise UserError("option_conflict", message)
            measure_rates(config.output, config.as_json)
            return
        if config.output is not None:
            raise UserError("option_unused", "--output is for the rates of --rates: a bench prints its figures")
        from attar.checkpoints.sources import hub
        from attar.evaluation import decode_speed, row_costs

        if (config.model is None) == (config.shape is None):
            code: Code = "option_missing" if config.model is None else "option_conflict"
            raise UserError(code, "name a model or a --shape, one of the two")
        require(config.device)
        setup = decode_speed.Setup(config.device, config.activations.value, config.kv, config.tp, config.pp)
        rows = () if config.rows is None else row_costs.parse(config.rows)
        load = decode_speed.Load(config.prompt, config.gen, config.batch, rows)
        if config.shape is None:
            tell_shared(config.device, config.tp, config.pp)
            report = decode_speed.measure_model(hub.resolve(str(config.model)), load, setup)
        else:
            report = decode_speed.measure_shape(config.shape, config.scheme, config.head, load, setup)
        print(decode_speed.to_text(report))
        emit(config.as_json, report)

r"""Splitting of text before merging, by its names in GGUF files (`tokenizer.ggml.pre`).

A GGUF file does not store its tokenizer's pipeline. It stores a name, which the converter found by encoding a fixed
text and looking up the hash of the ids, and every reader brings the table. The names and most expressions here are
facts of llama.cpp's converter and vocabulary reader; several names may have one behaviour.

Where llama.cpp's reader approximates the pipeline of training, this table has the models' own pipeline, because a file
should be read like its original:

- case (tekken, gpt-4o and similar): the reader knows only ASCII case, the models know Unicode's;
- NFC (Qwen, Command R, the GPT-NeoX vocabularies of MPT and OLMo): the reader never normalizes;
- numbers of Falcon: the models cut them after the step to bytes, in whose alphabet `½` is half of many a letter;
- `\s` (DeepSeek's older two): the reader's is partly ASCII, the models' Unicode.

Cuts are applied one after another, each to the pieces of the one before; matches and the text between them are both
kept.

Not covered: names of encoders' vocabularies; pipelines that these cuts cannot express (gemma4, kimi-k2, afmoe,
chameleon, whitespace) or that could not be confirmed (youtu); and two whose expressions take a time quadratic in a run
of digits (tiny_aya, superbpe), which any sender of a prompt could exploit.
"""

from __future__ import annotations

from dataclasses import dataclass

from attar.text.convert import LLAMA3_SPLIT, QWEN2_SPLIT


@dataclass(frozen=True)
class Pre:
    """One behaviour: the cuts of text, and of its bytes' characters; without any, GPT-2's own splitting.

    `nfc`: text is composed first. `whole`: a piece that is a token is taken without merging (`ignore_merges`). `bos`:
    BOS is added where the file does not say.
    """

    cuts: tuple[str, ...] = ()
    byte_cuts: tuple[str, ...] = ()
    nfc: bool = False
    whole: bool = False
    bos: bool = False


_SPACES = r"|\s*[\r\n]+|\s+(?!\S)|\s+"
GPT2_SPLIT = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_CONTRACTED = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_THREES = r"\p{N}{1,3}"


def _like_gpt4(
    digits: str = r"\p{N}",
    word: str = r"\p{L}+",
    stops: str = r" ?[^\s\p{L}\p{N}]+[\r\n]*",
    spaces: str = r"\s+(?!\S)|\s+",
) -> str:
    """Return a variation of Qwen2's splitting, which is the result without arguments."""
    return rf"{_CONTRACTED}|[^\r\n\p{{L}}\p{{N}}]?{word}|{digits}|{stops}|\s*[\r\n]+|{spaces}"


_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"


def _cased(contracted: str, digits: str) -> str:
    """Return GPT-4o's words, which end where lower case is followed by upper."""
    lead = r"[^\r\n\p{L}\p{N}]?"
    words = f"{lead}{_UPPER}*{_LOWER}+{contracted}|{lead}{_UPPER}+{_LOWER}*{contracted}"
    return rf"{words}|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*" + _SPACES


# DeepSeek LLM's letters: those with case, as its authors' Unicode had them.
_DEEPSEEK_LETTERS = (
    r"A-Za-z\u00b5\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u01ba\u01bc-\u01bf\u01c4-\u0293\u0295-\u02af\u0370-\u0373\u0376"
    r"\u0377\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c\u038e-\u03a1\u03a3-\u03f5\u03f7-\u0481\u048a-\u052f"
    r"\u0531-\u0556\u10a0-\u10c5\u13a0-\u13f5\u13f8-\u13fd\u1c90-\u1cba\u1cbd-\u1cbf\u1d00-\u1d2b\u1d6b-\u1d77"
    r"\u1d79-\u1d9a\u1e00-\u1f15\u1f18-\u1f1d\u1f20-\u1f45\u1f48-\u1f4d\u1f50-\u1f57\u1f59\u1f5b\u1f5d\u1f5f-\u1f7d"
    r"\u1f80-\u1fb4\u1fb6-\u1fbc\u1fbe\u1fc2-\u1fc4\u1fc6-\u1fcc\u1fd0-\u1fd3\u1fd6-\u1fdb\u1fe0-\u1fec\u1ff2-\u1ff4"
    r"\u1ff6-\u1ffc\u2102\u2107\u210a-\u2113\u2115\u2119-\u211d\u2124\u2126\u2128\u212a-\u212d\u212f-\u2134\u2139"
    r"\u213c-\u213f\u2145-\u2149\u214e\u2183\u2184\u2c00-\u2c7b\u2c7e-\u2ce4\u2ceb-\u2cee\u2cf2\u2cf3\ua640-\ua66d"
    r"\ua680-\ua69b\ua722-\ua76f\ua771-\ua787\ua78b-\ua78e\uab70-\uabbf\ufb00-\ufb06\ufb13-\ufb17\uff21-\uff3a"
    r"\uff41-\uff5a\x{10400}-\x{1044f}\x{104b0}-\x{104d3}\x{104d8}-\x{104fb}\x{10c80}-\x{10cb2}\x{10cc0}-\x{10cf2}"
    r"\x{118a0}-\x{118df}\x{1e900}-\x{1e943}"
)
_DEEPSEEK_STOPS = r"!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002"
_DEEPSEEK_SCRIPTS = r"[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
_CHINESE_JAPANESE = r"[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"
_DEEPSEEK3 = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*"
    + _SPACES
)
_BLOOM = r" ?[^(\s|.,!?\u2026\u3002\uff0c\u3001\u0964\u06d4\u060c)]+"
_JAIS2_SPACES = "|".join([*(rf"\s{{{2**n}}}(?!\S)" for n in range(9, 1, -1)), r"\s{1,2}(?!\S)", r"\s"])

# Each behaviour and its names.
_TABLE = (
    (Pre(), "gpt-2 phi-2 gigachat a.x-4.0 mellum jais trillion granite-docling exaone4"),
    (Pre(nfc=True), "mpt olmo"),
    (Pre((LLAMA3_SPLIT,), whole=True, bos=True), "llama-bpe llama3 llama-v3 falcon3 falcon-h1 pixtral midm-2.0 lfm2"),
    (Pre((LLAMA3_SPLIT,)), "dbrx smaug-bpe chatglm-bpe glm4"),
    (Pre((_like_gpt4(_THREES, spaces=_JAIS2_SPACES),)), "jais-2"),
    (Pre((_THREES, _like_gpt4(r"\p{N}+")), whole=True), "minicpm5"),
    (Pre((QWEN2_SPLIT,), nfc=True), "qwen2"),
    (
        Pre((QWEN2_SPLIT,)),
        "deepseek-r1-qwen kormo f2llmv2 megrez stablelm2 hunyuan solar-open grok-2 bailingmoe bailingmoe2 llada-moe",
    ),
    (Pre((r"[^\n]+|\n+", QWEN2_SPLIT)), "laguna"),
    (Pre((_like_gpt4(word=r"[\p{L}\p{M}]+", stops=r" ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*"),), nfc=True), "qwen35"),
    (Pre((r"\p{N}", GPT2_SPLIT)), "starcoder refact smollm codeshell exaone minerva-7b mellum2"),
    (Pre((r"\p{N}", GPT2_SPLIT), nfc=True), "command-r"),
    (Pre((r"[\p{P}$+<=>^~|]+", GPT2_SPLIT, r"\p{N}+", "[0-9][0-9][0-9]")), "default"),
    (Pre((r"[\p{P}$+<=>^~|`]+", GPT2_SPLIT), byte_cuts=(r"\p{N}+", "[0-9][0-9][0-9]")), "falcon"),
    (
        Pre(
            (
                r"[\r\n]",
                rf"\s?[{_DEEPSEEK_LETTERS}]+",
                rf"\s?[{_DEEPSEEK_STOPS}]+",
                r"(?<!\s)\s+$",  # without the lookbehind, the time is quadratic in a run of spaces
                _DEEPSEEK_SCRIPTS,
                r"\p{N}+",
            )
        ),
        "deepseek-llm",
    ),
    (Pre((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _DEEPSEEK_SCRIPTS, r"\p{N}")), "deepseek-coder"),
    (Pre((_THREES, _CHINESE_JAPANESE, _DEEPSEEK3)), "deepseek-v3 hunyuan-dense joyai-llm"),
    (Pre((_cased("", r"\p{N}"),), whole=True, bos=True), "tekken"),
    (Pre((_cased(f"{_CONTRACTED}?", _THREES),)), "gpt-4o llama4 kanana2 minimax-m2"),
    (Pre((_like_gpt4(stops=r" ?[^\s\p{L}\p{N}\r\n]+"),)), "seed-coder"),
    (Pre((_like_gpt4(word=r"(?:\p{L}\p{M}*(?: \p{L}\p{M}*)*)+", stops=r" ?[^\s\p{L}\p{N}]+[\r\n/]?"),)), "exaone-moe"),
    (Pre((_BLOOM,)), "bloom gpt3-finnish poro-chat"),
    (Pre((_BLOOM, r"\p{N}")), "viking"),
)

KNOWN = {name: behaviour for behaviour, names in _TABLE for name in names.split()}

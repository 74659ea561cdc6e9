"""The command line `aider`, without git."""

from __future__ import annotations

from pathlib import Path

from checks import At, command, run


def asked(at: At, *more: str) -> str:
    return command(
        "aider", "--model", f"openai/{at.model}", "--openai-api-base", at.v1, "--openai-api-key", "none", "--no-git",
        "--yes-always", "--no-show-model-warnings", "--no-check-update", "--analytics-disable", "--no-pretty",
        "--no-show-release-notes", "--map-tokens", "0", "--no-detect-urls", *more,
    )  # fmt: skip


def edit(at: At) -> None:
    """The whole file comes back, and aider writes it."""
    if not at.sense:
        return  # its prompt is longer than the embedded model's context
    Path("greet.py").write_text('def greet():\n    return "hello"\n')
    said = asked(at, "--edit-format", "whole", "--message", "Let greet return hi in place of hello.", "greet.py")
    assert "Tokens:" in said, said[-400:]


def ask(at: At) -> None:
    if at.sense:
        said = asked(at, "--chat-mode", "ask", "--message", "What is the capital of France? One word.")
        assert "Tokens:" in said, said[-400:]


def long_prompt(at: At) -> None:
    """Aider sees by the error's words that the context was too short."""
    Path("long.txt").write_text("word " * 12000)
    said = asked(at, "--chat-mode", "ask", "--message-file", "long.txt")
    assert "token limit" in said or "ContextWindowExceeded" in said, said[-400:]


if __name__ == "__main__":
    run("aider-chat", edit, ask, long_prompt)

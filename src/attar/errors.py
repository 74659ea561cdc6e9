"""Errors that a user can mend: a sentence for people, and a stable code for programs and tests.

A code names the kind of mistake, not the place in the code: it stays when a sentence is reworded. The command line
prints it with `--json`. An error that is a bug of attar, or of a program that calls a kernel wrongly, has no code.
"""

from __future__ import annotations

import errno
from typing import Literal, get_args

Code = Literal[
    # Options and settings
    "option_missing", "option_conflict", "option_unused", "option_malformed", "option_out_of_range", "name_unknown",
    "package_missing", "device_unavailable", "device_unsupported", "memory_insufficient", "interrupted",
    # Files
    "file_not_found", "file_not_permitted", "file_failed", "download_failed", "file_too_large", "file_malformed",
    "file_wrong_kind", "file_unsafe", "text_empty", "text_too_short", "text_not_utf8", "output_exists", "output_locked",
    "output_is_source", "output_invalid", "disk_full",
    # Recipes and schemes
    "recipe_unknown", "recipe_malformed", "recipe_conflict", "recipe_without_effect", "method_unknown",
    "method_option_unknown", "method_option_unused", "method_option_invalid", "override_invalid", "scheme_unknown",
    "scheme_unsupported", "group_size_indivisible", "sparsity_invalid",
    # Calibration and compression
    "calibration_missing", "calibration_too_short", "calibration_unused", "imatrix_mismatch", "linear_without_tokens",
    "hessian_singular", "not_finite", "target_invalid", "target_unreachable", "resume_mismatch", "state_damaged",
    "source_compressed", "source_not_compressed", "source_is_gguf", "training_diverged",
    # Checkpoints
    "checkpoint_malformed", "checkpoint_incomplete", "checkpoint_mismatch", "checkpoint_too_large",
    "checkpoint_changed", "checkpoint_diverges", "config_invalid", "architecture_unsupported", "feature_unsupported",
    "quantization_invalid", "quantization_unsupported", "receipt_invalid", "gguf_malformed", "gguf_inexpressible",
    "conversion_inexact", "adapter_invalid", "adapter_mismatch",
    # Text
    "tokenizer_missing", "tokenizer_malformed", "tokenizer_unsupported", "tokenizer_mismatch", "template_missing",
    "template_failed", "token_out_of_vocabulary", "context_exceeded", "prompt_empty", "grammar_invalid",
    "tools_invalid",
    # Images
    "image_invalid", "image_too_large",
    # Evaluation
    "vocabulary_mismatch", "window_invalid", "task_malformed",
    # Running and planning
    "kv_unknown", "kv_unsupported", "parallel_indivisible", "parallel_unsupported", "worker_failed",
    "request_refused", "plan_does_not_fit",
    # Serving and load tests
    "address_invalid", "key_invalid", "exposed_without_key", "ray_exposed", "model_name_invalid", "server_unreachable",
    "answer_invalid", "trace_malformed",
    # Everything else
    "value_invalid",
]  # fmt: skip
"""Every code. `docs/errors.md` says what each means and what helps."""

CODES: tuple[Code, ...] = get_args(Code)


class UserError(ValueError):
    """An error that a user can mend. `str` of it is one sentence that says what is wrong and what helps."""

    def __init__(self, code: Code, message: str) -> None:
        super().__init__(code, message)
        self.code = code

    def __str__(self) -> str:
        return str(self.args[1])


def code_of(error: ValueError | OSError) -> Code:
    """Return the code of an error: that of a `UserError`, else by the kind of the error."""
    if isinstance(error, UserError):
        return error.code
    if isinstance(error, FileNotFoundError):
        return "file_not_found"
    if isinstance(error, PermissionError):
        return "file_not_permitted"
    if isinstance(error, OSError):
        return "disk_full" if error.errno in (errno.ENOSPC, errno.EDQUOT) else "file_failed"
    return "value_invalid"

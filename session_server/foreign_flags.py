"""Explain flags of SGLang and vLLM that `serve` does not take.

`flags` defines those that are accepted, with or without effect.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from typing import Final

_ONE_DEVICE: Final = "a model runs on one device"
_ONE_MACHINE: Final = "a server runs on one machine"
_AS_STORED: Final = (
    "weights are served as the checkpoint has them; FP8 of deepseek_v3 and MXFP4 of gpt_oss are "
    "dequantized when they are loaded"
)
_NO_ADAPTERS: Final = "adapters are not implemented"
_TEXT_ONLY: Final = "models read and write text only"
_NOT_PARSED: Final = "tool calls and reasoning are not parsed out of answers"
_NOT_CONSTRAINED: Final = "constrained decoding is not implemented"
_NO_TIERS: Final = "KV that leaves the device is recomputed, not offloaded"
_PLAIN_HTTP: Final = "the server speaks plain HTTP; put TLS in front of it"
_OWN_FILES: Final = "it is part of the checkpoint; put the file into the checkpoint's directory"


def _with_reason(text: str, names: str) -> dict[str, str]:
    return dict.fromkeys(names.split(), text)


UNSUPPORTED_FLAGS: Final[Mapping[str, str]] = (
    _with_reason(
        _ONE_DEVICE,
        "--tp --tp-size --tensor-parallel-size --pp --pp-size --pipeline-parallel-size --dp "
        "--dp-size --data-parallel-size --ep --ep-size --expert-parallel-size "
        "--enable-expert-parallel --enable-dp-attention --base-gpu-id --gpu-id-step",
    )
    | _with_reason(
        _ONE_MACHINE,
        "--nnodes --node-rank --dist-init-addr --dist-timeout --distributed-executor-backend "
        "--disaggregation-mode --load-balance-method",
    )
    | _with_reason(
        _AS_STORED, "--quantization -q --torchao-config --load-format --quantization-param-path"
    )
    | _with_reason(
        _NO_ADAPTERS,
        "--lora-paths --enable-lora --lora-modules --max-lora-rank --max-loras "
        "--max-loras-per-batch --lora-backend",
    )
    | _with_reason(
        _TEXT_ONLY,
        "--enable-multimodal --limit-mm-per-prompt --mm-processor-kwargs --is-embedding --task "
        "--runner --reward-model",
    )
    | _with_reason(
        _NOT_PARSED,
        "--tool-call-parser --reasoning-parser --enable-auto-tool-choice --tool-server",
    )
    | _with_reason(
        _NOT_CONSTRAINED,
        "--grammar-backend --guided-decoding-backend --structured-outputs-config",
    )
    | _with_reason(
        _NO_TIERS,
        "--enable-hierarchical-cache --hicache-ratio --hicache-size --hicache-write-policy "
        "--swap-space --cpu-offload-gb --kv-transfer-config",
    )
    | _with_reason(
        _PLAIN_HTTP,
        "--ssl-keyfile --ssl-certfile --ssl-ca-certs --ssl-cert-reqs --ssl-keyfile-password",
    )
    | _with_reason(
        _OWN_FILES,
        "--chat-template --tokenizer --tokenizer-path --tokenizer-mode --completion-template "
        "--hf-overrides --generation-config --json-model-override-args",
    )
    | _with_reason(
        "the Hugging Face cache (HF_HOME) decides where a model is stored",
        "--download-dir --revision --code-revision --tokenizer-revision --hf-token",
    )
)
"""Map each unsupported flag of SGLang or vLLM to the reason."""

RENAMED_FLAGS: Final[Mapping[str, str]] = {
    "--max-model-len": "--context-length",
    "--gpu-memory-utilization": "--mem-fraction-static",
    "--max-num-seqs": "--max-running-requests",
    "--max-num-batched-tokens": "--chunked-prefill-size",
    "--long-prefill-token-threshold": "--chunked-prefill-size",
    "--block-size": "--page-size",
    "--kv-cache-memory-bytes": "--max-total-tokens",
    "--no-enable-prefix-caching": "--disable-radix-cache",
    "--seed": "--random-seed",
    "--allowed-origins": "--allowed-origin",
    "--api-keys": "--api-key",
    "--uvicorn-log-level": "--log-level",
    "--speculative-config": "--speculative-algorithm",
    "--speculative-draft-model": "--speculative-draft-model-path",
    "--speculative-draft": "--speculative-draft-model-path",
    "--speculative-num-steps": "--speculative-num-draft-tokens",
    "--num-speculative-tokens": "--speculative-num-draft-tokens",
}
"""Map flags of SGLang or vLLM to their names here."""


def explain_unknown_flags(surplus: Iterable[str], known: Iterable[str], *, is_server: bool) -> str:
    """Return the error message for arguments that a subcommand does not take.

    Args:
        surplus: the arguments, values of unknown flags among them.
        known: the flags of the subcommand, to suggest near matches.
        is_server: whether to explain flags of other servers.
    """
    words = list(surplus)
    flags = [word.partition("=")[0] for word in words if word.startswith("-")]
    if not flags:
        hint = f"; pass a checkpoint as --model-path {words[0]}" if is_server else ""
        return f"unrecognized arguments: {' '.join(words)}{hint}"
    known = list(known)
    return "\n  ".join(_explain_flag(flag, known, is_server=is_server) for flag in flags)


def _explain_flag(flag: str, known: list[str], *, is_server: bool) -> str:
    if is_server and flag in RENAMED_FLAGS:
        return f"{flag} is called {RENAMED_FLAGS[flag]} here"
    if is_server and flag in UNSUPPORTED_FLAGS:
        return f"{flag} is not supported, because {UNSUPPORTED_FLAGS[flag]}"
    near = get_close_matches(flag, known, n=1, cutoff=0.7)
    hint = f"; did you mean {near[0]}?" if near else ""
    return f"unrecognized argument {flag}{hint}"

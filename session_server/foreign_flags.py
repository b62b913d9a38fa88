"""Explain flags of SGLang and vLLM that `serve` does not take.

`flags` defines those that are accepted, with or without effect.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

from session_server.core.nearest import did_you_mean, nearest

UNSUPPORTED_FLAGS: Final[Mapping[str, str]] = {
    flag: reason
    for reason, flags in {
        "a model is split by --tensor-parallel-size alone": (
            "--pp --pp-size --pipeline-parallel-size --dp --dp-size --data-parallel-size --ep "
            "--ep-size --expert-parallel-size --enable-expert-parallel --enable-dp-attention "
            "--base-gpu-id --gpu-id-step"
        ),
        "a server runs on one machine": (
            "--nnodes --node-rank --dist-init-addr --dist-timeout --distributed-executor-backend "
            "--load-balance-method"
        ),
        "the format of weights is read from the checkpoint (floats, GGUF, AWQ, GPTQ, "
        "compressed-tensors, FP8, MXFP4); see --quantize": (
            "--quantization -q --torchao-config --load-format --quantization-param-path"
        ),
        "adapters are not implemented": (
            "--lora-paths --enable-lora --lora-modules --max-lora-rank --max-loras "
            "--max-loras-per-batch --lora-backend"
        ),
        "models read and write text only": (
            "--enable-multimodal --limit-mm-per-prompt --mm-processor-kwargs --is-embedding --task "
            "--runner --reward-model"
        ),
        "the chat template says how answers think and call tools": (
            "--tool-call-parser --reasoning-parser --enable-auto-tool-choice --tool-server"
        ),
        "grammars are always llguidance's": (
            "--grammar-backend --guided-decoding-backend --structured-outputs-config"
        ),
        "KV is copied to host memory by itself (--host-kv-bytes), and to a disk as --disk-kv-bytes "
        "says": (
            "--enable-hierarchical-cache --hicache-ratio --hicache-write-policy "
            "--kv-transfer-config"
        ),
        "weights stay on the device": "--cpu-offload-gb",
        "clients show keys, not certificates, and the server's key has no password": (
            "--ssl-ca-certs --ssl-cert-reqs --ssl-keyfile-password"
        ),
        "operators have keys with admin=1 in the file of --api-key-file": "--admin-api-key",
        "it is part of the checkpoint; put the file into the checkpoint's directory": (
            "--chat-template --tokenizer --tokenizer-path --tokenizer-mode --completion-template "
            "--hf-overrides --generation-config --json-model-override-args"
        ),
        "the Hugging Face cache (HF_HOME) decides where a model is stored": (
            "--download-dir --revision --code-revision --tokenizer-revision --hf-token"
        ),
    }.items()
    for flag in flags.split()
}
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
    "--ssl-cert": "--ssl-certfile",
    "--ssl-key": "--ssl-keyfile",
    "--shutdown-timeout": "--drain-timeout",
    "--uvicorn-log-level": "--log-level",
    "--hicache-size": "--host-kv-bytes",
    "--swap-space": "--host-kv-bytes",
    "--disaggregation-mode": "--role",
    "--enforce-eager": "--disable-cuda-graph",
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
    return f"unrecognized argument {flag}{did_you_mean(nearest(flag, known, cutoff=0.7))}"

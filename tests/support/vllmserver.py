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
from ragkv.decoding import Decoding
from ragkv.engines import make_engine
from ragkv.model.checkpoint import resolve
from ragkv.runtime import Generation

PYTHON = Path(sys.prefix) / "vllm" / "bin" / "python"
PATIENCE = 600
BLOCK = 32
"""Tokens of a block of vLLM's cache."""
CORPUS = Path(__file__).parents[2] / "examples" / "corpus"
QUESTIONS = (
    "In which year was Parinphor Brewery founded?",
    "Who founded the lighthouse?",
    "Where is the river?",
    "What does the company produce?",
    "Which city has a museum?",
    "How many people live there?",
    "When did it open?",
    "Who owns the brewery?",
)
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
def vllm_server(folder, model, index, *options, port=0):
    """vLLM serving a model in float32, with the connector over an index."""
    require_vllm()
    options = ("--dtype", "float32", "--block-size", str(BLOCK), "--max-model-len", "2048", *options)
    options += ("--enable-prompt-tokens-details", "--max-logprobs", "20")
    with server.vllm_server(Path(folder), model, index, *options, python=str(PYTHON), port=port) as (url, process):
        yield VLLM(url, Path(folder) / "vllm.log", process)


def request_of(rag, number):
    """A question's request over 1 to 8 chunks, in no order of theirs."""
    top_k = (3, 5, 1, 8, 2)[number % 5]
    scored = rag.retrieve(QUESTIONS[number % 8], top_k=top_k + 2, retrieval="bm25")[number // 8 :][:top_k][::-1]
    engine = make_engine("block", rag.config.tuning)
    request, _ = rag.request(engine, QUESTIONS[number % 8], scored)
    return engine, request


def body_of(served, number, engine=None):
    """What ragkv sends to vLLM for a question."""
    block, request = request_of(served.rag, number)
    generation = Generation(max_new_tokens=1, decoding=Decoding())
    return served.rag.index.runtime._prepare(engine or block, request, generation).body | {"stream": False}


def references(served, number):
    """Here: the log-probabilities of the first token by `full`, and by `block` up to the last whole block of vLLM's."""
    engine, request = request_of(served.own, number)
    inputs = engine.cache(served.own.model, request)
    kv = inputs["past_key_values"]
    ids = inputs["input_ids"]
    whole = min(kv.get_seq_length(), ids.shape[1] - 1) // BLOCK * BLOCK
    kv.crop(whole - kv.get_seq_length())
    with served.own.model.plain() as model, torch.inference_mode():
        full = model(ids).logits[0, -1]
        positions = torch.arange(whole, ids.shape[1])[None]
        block = model(ids[:, whole:], past_key_values=kv, position_ids=positions).logits[0, -1]
    return full.float().log_softmax(-1), block.float().log_softmax(-1), whole


def far(scores, reference):
    return max(abs(score - float(reference[token])) for token, score in scores[0].items())

"""How do the first token, a decode step and the bytes of stored KV compare with llama.cpp's, with the same weights?

The random Llama of the other benchmarks is written to GGUF files (float16 and Q8_0 weights). Both sides get the same
tokens. If the logits do not correlate with ours, the conversion is refused, so a mistake in it cannot pass for speed.

llama.cpp restores the state of prefix and chunks from a file (`llama_state_seq_load_file`) and reads the question. It
is measured with flash attention and without, and the faster one counts, for each figure on its own. Ours is what
`ragkv bench ttft` measures: `block` from a warm store, checksums and decoding included; with the default codec and with
`q8` (8 bits, also in memory). Time is the processor time of one thread on both sides, rounds interleaved.
"""

from __future__ import annotations

import ctypes
import math
import os
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ragkv.benchmarks.speed.inference import (
    CHUNK_TOKENS,
    QUESTION_TOKENS,
    STEPS,
    fill,
    one_thread,
    random_llama,
    random_prompt,
    stream,
    transformers_model,
)
from ragkv.benchmarks.speed.report import (
    AutoDtype,
    BenchRow,
    Lengths,
    OnStep,
    Quick,
    Report,
    Rounds,
    alternating,
    described,
    machine,
    seconds_of,
    unseen,
    versions,
)
from ragkv.cli.options import given_numbers
from ragkv.errors import MissingExtraError, RagkvError, install_hint
from ragkv.model.language_model import LanguageModel, in_float32
from ragkv.runtime import Stream
from ragkv.store import Q8, Half, Store
from ragkv.types import Encoding

AGREED = 0.9999
"""The least accepted correlation of llama.cpp's logits, with float16 weights, with ours in float32."""
ANSWER = 256
"""Length of an answer, in tokens, that the crossover is compared with."""


def measure_llama_cpp(
    tokens: Lengths = "2048,8192",
    rounds: Rounds = 3,
    dtype: AutoDtype = "auto",
    quick: Quick = False,
    on_step: OnStep = unseen,
) -> Report:
    """First token, decode step and bytes of KV, compared with llama.cpp's, of the same weights, on one thread.

    Needs llama-cpp-python and the extra `gguf` (docs/llama-cpp.md). Example: `ragkv bench llama-cpp --tokens 8192`
    """
    if find_spec("llama_cpp") is None:
        raise MissingExtraError("ragkv bench llama-cpp needs llama.cpp; run pip install llama-cpp-python.")
    if find_spec("gguf") is None:
        raise MissingExtraError(f"ragkv bench llama-cpp writes GGUF files; {install_hint('gguf')}.")
    lengths = [2048] if quick else given_numbers("--tokens", tokens)
    lm = random_llama(dtype, "cpu")
    on_step(f"{described(lm)}, chunks of {CHUNK_TOKENS} tokens")
    rows: list[BenchRow] = []
    with one_thread(), tempfile.TemporaryDirectory(prefix="ragkv-bench-") as folder:
        files = {weights: Path(folder) / f"{weights}.gguf" for weights in ("f16", "q8_0")}
        # int8 weights cannot be written; use the weights that they were rounded from
        exact = random_llama("float32", "cpu") if lm.int8 else lm
        for weights, file in files.items():
            write_gguf(file, exact, weights)
        on_step(f"llama.cpp's logits correlate with ours by {_agreement(exact, files['f16']):.6f} at least")
        del exact
        for length in lengths:
            on_step(f"{length} tokens of context …")
            rows += _measure_length(lm, files, length, 1 if quick else rounds, Path(folder))
        used, named = versions("lmdb", "llama-cpp-python"), machine("cpu")
    return Report(bench="llama-cpp", machine=named, versions=used, rows=tuple(rows))


def write_gguf(path: Path, lm: LanguageModel, weights: str) -> None:
    """Write a Llama without a vocabulary; `weights` is the type of its matrices: f16 or q8_0."""
    import gguf

    config, kind = lm.config, gguf.GGMLQuantizationType[weights.upper()]
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    file = gguf.GGUFWriter(path, "llama")
    add_sizes(file, config)
    file.add_tokenizer_model("no_vocab")
    for name, weight in lm.module.state_dict().items():
        numbers = weight.float().numpy()
        if count := heads.get(name.split(".")[-2]):
            numbers = neighbours(numbers, count)
        to = names.get_name(name, try_suffixes=(".weight",))
        if numbers.ndim == 2:
            file.add_tensor(to, gguf.quants.quantize(numbers, kind), raw_dtype=kind)
        else:
            file.add_tensor(to, numbers)
    finish(file)


def neighbours(numbers: Any, heads: int) -> Any:
    """A projection's rows as llama.cpp has them: it rotates neighbours, transformers the halves of a head."""
    rows, width = numbers.shape
    return numbers.reshape(heads, 2, rows // heads // 2, width).swapaxes(1, 2).reshape(rows, width)


def add_sizes(file: Any, config: Any) -> None:
    """Add the sizes in a transformers configuration to a GGUF file (`gguf.GGUFWriter`)."""
    file.add_context_length(config.max_position_embeddings)
    file.add_embedding_length(config.hidden_size)
    file.add_block_count(config.num_hidden_layers)
    file.add_feed_forward_length(config.intermediate_size)
    file.add_head_count(config.num_attention_heads)
    file.add_head_count_kv(config.num_key_value_heads)
    ropes = config.rope_parameters
    file.add_rope_freq_base((ropes.get("full_attention") or ropes)["rope_theta"])
    file.add_layer_norm_rms_eps(config.rms_norm_eps)
    file.add_vocab_size(config.vocab_size)


def finish(file: Any) -> None:
    """Write a GGUF file with everything that was added to it, and close it."""
    file.write_header_to_file()
    file.write_kv_data_to_file()
    file.write_tensors_to_file()
    file.close()


class LlamaCpp:
    """One sequence in a context of llama.cpp with room for `cells` tokens, on one thread. It lives as long as the
    process."""

    def __init__(self, file: Path, cells: int, *, flash: bool, kv: str = "f16") -> None:
        import llama_cpp as api

        self._api = api
        _silence(api)
        loading = api.llama_model_default_params()
        loading.use_extra_bufts = False  # on a processor with AMX, 0.3.36 crashes reading Q8_0 weights repacked for it
        self._model = api.llama_model_load_from_file(os.fsencode(file), loading)
        settings = api.llama_context_default_params()
        settings.n_ctx = cells
        settings.n_threads = settings.n_threads_batch = 1
        settings.flash_attn_type = int(flash)
        settings.type_k = settings.type_v = getattr(api, f"GGML_TYPE_{kv.upper()}")
        self._context = api.llama_init_from_model(self._model, settings)
        if not self._context:
            raise RagkvError(f"llama.cpp could not open a context of {cells} tokens; is there enough memory?")
        self._batch = api.llama_n_batch(self._context)
        self._words = api.llama_vocab_n_tokens(api.llama_model_get_vocab(self._model))

    def read(self, ids: Sequence[int]) -> np.ndarray[Any, Any]:
        """Append these tokens; returns the logits after the last one."""
        for at in range(0, len(ids), self._batch):
            part = ids[at : at + self._batch]
            given = (self._api.llama_token * len(part))(*part)
            if code := self._api.llama_decode(self._context, self._api.llama_batch_get_one(given, len(part))):
                raise RagkvError(f"llama.cpp could not read {len(part)} tokens (code {code}).")
        return np.ctypeslib.as_array(self._api.llama_get_logits_ith(self._context, -1), (self._words,)).copy()

    def clear(self) -> None:
        self._api.llama_memory_clear(self._api.llama_get_memory(self._context), False)

    def save(self, file: Path) -> None:
        self._api.llama_state_seq_save_file(self._context, os.fsencode(file), 0, (self._api.llama_token * 1)(), 0)

    def load(self, file: Path) -> None:
        none, count = (self._api.llama_token * 1)(), ctypes.c_size_t()
        if not self._api.llama_state_seq_load_file(self._context, os.fsencode(file), 0, none, 1, ctypes.byref(count)):
            raise RagkvError(f"llama.cpp could not restore the state in {file}.")

    def close(self) -> None:
        self._api.llama_free(self._context)
        self._api.llama_model_free(self._model)


_SILENT: list[Any] = []
"""The function that llama.cpp logs to; it must outlive every call."""


def _silence(api: Any) -> None:
    if not _SILENT:
        _SILENT.append(api.llama_log_callback(lambda *_: None))
        api.llama_log_set(_SILENT[0], ctypes.c_void_p())


def _agreement(lm: LanguageModel, file: Path) -> float:
    """The lowest correlation of the logits after each of 16 tokens; RagkvError if it is too low."""
    _, [ids], _ = random_prompt(lm, CHUNK_TOKENS)
    with transformers_model(lm) as plain:
        exact = in_float32(plain)(input_ids=torch.tensor([ids])).logits[0, -16:].numpy()
    lowest = 1.0
    for flash in (False, True):
        there = LlamaCpp(file, 512, flash=flash)
        there.read(ids[:-16])
        for ours, token in zip(exact, ids[-16:], strict=True):
            lowest = min(lowest, float(np.corrcoef(ours, there.read([token]))[0, 1]))
        there.close()
    if not lowest > AGREED:
        raise RagkvError(
            f"llama.cpp's logits correlate with ours by only {lowest:.6f}: it computes something else, so nothing was "
            "measured; try another version of llama-cpp-python."
        )
    return lowest


def overtaken_after(ours: tuple[float, float, float], others: tuple[float, float, float]) -> int | None:
    """The number of the token that another runtime delivers earlier than this one; None if it never does.

    Both are given as the seconds of the first token, of the second one, and of each later one.
    """
    ahead = others[0] - ours[0]
    if ahead < 0:
        return 1
    ahead += others[1] - ours[1]
    if ahead < 0:
        return 2
    behind = ours[2] - others[2]
    return 3 + math.floor(ahead / behind) if behind > 0 else None


def _measure_length(
    lm: LanguageModel, files: dict[str, Path], length: int, rounds: int, folder: Path
) -> list[BenchRow]:
    prefix, chunks, question = random_prompt(lm, length)
    before = [*prefix, *(i for chunk in chunks for i in chunk)]
    cells = len(before) + QUESTION_TOKENS + (rounds + 2) * STEPS
    kinds = {"f16": ("f16", "f16"), "q8_0 weights": ("q8_0", "f16"), "q8_0 weights and KV": ("q8_0", "q8_0")}
    there = {
        (kind, flash): LlamaCpp(files[weights], cells, flash=flash, kv=kv)
        for kind, (weights, kv) in kinds.items()
        for flash in (False, True)
        if flash or kv == "f16"  # llama.cpp reads values in 8 bits by flash attention only
    }
    # a state depends on the types of KV and the kernel, not on the weights' type; its numbers do not affect time
    states = {key: folder / f"{length}-{kinds[key[0]][1]}-{key[1]}.state" for key in there}
    cold: dict[bool, float] = {}
    for key, context in there.items():
        if not states[key].exists():
            took = seconds_of(partial(context.read, before), processor=True)
            cold.setdefault(key[1], took)  # by f16, which comes first
            context.save(states[key])
    with ExitStack() as stack:
        index = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=folder)))
        stores = {of.id: stack.enter_context(Store.create(index / of.id, codec=of)) for of in (Half(), Q8())}
        stored, streams = dict[str, float](), dict[str, Stream]()
        for codec, store in stores.items():
            identities = fill(store, lm, prefix, chunks, [Encoding.STANDALONE])
            stored[codec] = store.kv_bytes / len(before)

        def first(codec: str) -> None:
            streams.pop(codec, None)  # its memory is reused, as llama.cpp's is
            streams[codec] = stream(lm, stores[codec].get_many, "block", identities, question)
            streams[codec].best()

        def step(codec: str) -> None:
            streams[codec].advance(streams[codec].best())
            streams[codec].best()

        def steps(step: Callable[[], object]) -> None:
            for _ in range(STEPS):  # in a row, as in an answer: each runtime's first step finds the caches cold
                step()

        works: dict[str, Callable[[], object]] = {
            name: partial(work, codec)
            for codec in stores
            for name, work in ((f"first {codec}", first), (f"second {codec}", step))
        }
        for flash in (False, True):
            context, state = there["f16", flash], states["f16", flash]
            works[f"state {flash}"] = partial(_answer, context, partial(context.load, state), question)
        flash = min(cold, key=lambda flash: cold[flash])
        works[f"prefill {flash}"] = partial(_answer, there["f16", flash], None, [*before, *question])
        times = alternating(works, rounds, processor=True)
        decoding = {f"step {codec}": partial(steps, partial(step, codec)) for codec in stores}
        for (kind, flash), context in there.items():
            _answer(context, partial(context.load, states[kind, flash]), question)
            decoding[f"{kind} {flash}"] = partial(steps, partial(context.read, question[:1]))
        each = alternating(decoding, rounds, processor=True)
        times |= {name: seconds / STEPS for name, seconds in each.items()}
    for context in there.values():
        context.close()
    sizes = {kind: file.stat().st_size / len(before) for (kind, _), file in states.items()}
    median = {name: seconds * 1000 for name, seconds in times.items()}
    best = {
        name: min(median[column] for flash in (False, True) if (column := f"{name} {flash}") in median)
        for name in ("state", "prefill", *kinds)
    }

    eight = "q8_0 weights and KV"

    def row(what: str, value: float, unit: str, baseline: str, other: float) -> BenchRow:
        return BenchRow.of(f"{what}, {length} tokens", value, unit, f"llama.cpp {baseline}", other, digits=2)

    rows = [
        row("first token", median["first half"], "ms", "f16, state from a file", best["state"]),
        row("first token, q8", median["first q8"], "ms", "f16, state from a file", best["state"]),
        row("first token", median["first half"], "ms", "f16, prefill", best["prefill"]),
        row("second token", median["second half"], "ms", "f16", best["f16"]),
        *(row("token", median["step half"], "ms", kind, best[kind]) for kind in kinds),
        row("token, q8", median["step q8"], "ms", eight, best[eight]),
        row("KV of a token", stored["half"], "bytes", "f16, state in a file", sizes["f16"]),
        row("KV of a token, q8", stored["q8"], "bytes", "q8_0, state in a file", sizes[eight]),
    ]
    ours_ms = median["first half"], median["second half"], median["step half"]
    if (overtaken := overtaken_after(ours_ms, (best["prefill"], best["f16"], best["f16"]))) is not None:
        name = f"answer until a cold llama.cpp is ahead, {length} tokens"
        rows.append(BenchRow.of(name, overtaken, "tokens", "an answer", ANSWER, overtaken / ANSWER, digits=0))
    return rows


def _answer(there: LlamaCpp, restore: Callable[[], None] | None, ids: Sequence[int]) -> int:
    """From an empty context: restore the state, if any, read the tokens, and choose the next one."""
    there.clear()
    if restore is not None:
        restore()
    return int(there.read(ids).argmax())

"""How do the first token, a decode step and the bytes of stored KV compare with llama.cpp's, with the same weights?

The random Llama of the other benchmarks is written to GGUF files (float16 and Q8_0 weights). Both sides get the same
tokens. If the logits do not correlate with ours, the conversion is refused, so a mistake in it cannot pass for speed.

llama.cpp restores the state of prefix and chunks from a file (`llama_state_seq_load_file`) and reads the question. It
is measured with flash attention and without, and the faster one counts, for each figure on its own. Ours is what
`ragkv bench ttft` measures: `block` from a warm store, checksums and decoding included; with the default codec and with
`q8` (8 bits, also in memory). Time is the processor time of one thread on both sides, rounds interleaved.

The runtime llama-cpp is measured beside llama.cpp itself with one file: `block` from a warm store as above, and a state
file that llama.cpp wrote. The values of KV do not affect time, so chunks of one length have the same KV, llama.cpp's
state is that of one piece, repeated at later positions, and its prefill is measured over that piece.
"""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer

from ragkv.benchmarks.speed import llama_cpp_runtime
from ragkv.benchmarks.speed.inference import (
    CHUNK_TOKENS,
    PREFIX_TOKENS,
    QUESTION_TOKENS,
    STEPS,
    fill,
    one_thread,
    random_ids,
    random_llama,
    random_prompt,
    stream,
    transformers_model,
)
from ragkv.benchmarks.speed.llama_cpp_runtime import answering
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
from ragkv.errors import MissingExtraError, RagkvError, UsageError, install_hint
from ragkv.model.checkpoint import resolve
from ragkv.model.gguf_merge import neighbours
from ragkv.model.language_model import LanguageModel, in_float32
from ragkv.runtime import Stream
from ragkv.store import Q8, Half, Store
from ragkv.types import Encoding

AGREED = 0.9999
"""The least accepted correlation of llama.cpp's logits, with float16 weights, with ours in float32."""
PIECE_TOKENS = 512
"""The most tokens that llama.cpp prefills beside the runtime llama-cpp."""
MOST_BYTES = 600_000_000
"""The memory that the runtime llama-cpp may take besides the file and the KV."""
_ONE_THREAD = {"OMP_NUM_THREADS": "1", "RAGKV_THREADS": "1"}
SHAPES: Mapping[str, Mapping[str, Any]] = {
    "1.1B": {
        "vocab_size": 32000,
        "hidden_size": 2048,
        "intermediate_size": 5632,
        "num_hidden_layers": 22,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "max_position_embeddings": 65536,
    },
    "3B": {
        "vocab_size": 128256,
        "hidden_size": 3072,
        "intermediate_size": 8192,
        "num_hidden_layers": 28,
        "num_attention_heads": 24,
        "num_key_value_heads": 8,
        "max_position_embeddings": 65536,
        "tie_word_embeddings": True,
    },
}
"""The fields of `LlamaConfig` for the shapes of TinyLlama and Llama 3.2."""


def measure_llama_cpp(
    tokens: Lengths = "2048,8192",
    rounds: Rounds = 3,
    model: Annotated[
        str | None,
        typer.Option(
            help="A GGUF file, or the size of a random Llama in Q4_K_M (1.1B or 3B), for the runtime llama-cpp alone.",
            show_default="a random Llama of 100M parameters, for both runtimes",
        ),
    ] = None,
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
    rounds = 1 if quick else rounds
    rows: list[BenchRow] = []
    with one_thread(), tempfile.TemporaryDirectory(prefix="ragkv-bench-") as folder:
        if model is None:
            lm = random_llama(dtype, "cpu")
            on_step(f"{described(lm)}, chunks of {CHUNK_TOKENS} tokens")
            files = {weights: Path(folder) / f"{weights}.gguf" for weights in ("f16", "q8_0")}
            # int8 weights cannot be written; use the weights that they were rounded from
            exact = random_llama("float32", "cpu") if lm.int8 else lm
            for weights, path in files.items():
                write_gguf(path, exact.config, exact.module.state_dict(), weights)
            on_step(f"llama.cpp's logits correlate with ours by {_agreement(exact, files['f16']):.6f} at least")
            del exact
            for length in lengths:
                on_step(f"{length} tokens of context …")
                rows += _measure_length(lm, files, length, rounds, Path(folder))
            file = quantised(files["f16"], "Q4_K_M", Path(folder) / "q4_k_m.gguf")
        elif model in SHAPES:
            on_step(f"{model} parameters are written and quantised …")
            file = random_file(SHAPES[model], Path(folder))
        else:
            checkpoint = resolve(model)
            if checkpoint.file is None:
                raise UsageError(f"--model {model} is no GGUF file and none of {', '.join(SHAPES)}; give one of these.")
            file = Path(checkpoint.location, checkpoint.file)
        for length in lengths:
            on_step(f"the runtime llama-cpp, {length} tokens of context …")
            rows += _measure_runtime(file, length, rounds, Path(folder))
        used, named = versions("lmdb", "llama-cpp-python"), machine("cpu")
    return Report(bench="llama-cpp", machine=named, versions=used, rows=tuple(rows))


def write_gguf(path: Path, config: Any, weights: Mapping[str, torch.Tensor], of: str) -> None:
    """Write a Llama with a vocabulary of placeholders; `of` is the type of its matrices: f16 or q8_0.

    Weights on the device "meta" are drawn at random, one at a time.
    """
    import gguf

    kind = gguf.GGMLQuantizationType[of.upper()]
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    file = gguf.GGUFWriter(path, "llama")
    add_sizes(file, config)
    file.add_tokenizer_model("gpt2")
    file.add_tokenizer_pre("gpt-2")
    file.add_token_list([*(f"[unused{i}]" for i in range(config.vocab_size - 1)), "qz"])
    file.add_token_merges(["q z"])  # the format requires one
    if config.tie_word_embeddings:
        weights = {name: weight for name, weight in weights.items() if name != "lm_head.weight"}
    for name, weight in weights.items():
        size = weight.numel()
        if weight.ndim == 2:
            block, nbytes = gguf.GGML_QUANT_SIZES[kind]
            size, as_kind = size // block * nbytes, kind
        else:
            size, as_kind = 4 * size, gguf.GGMLQuantizationType.F32
        to = names.get_name(name, try_suffixes=(".weight",))
        file.add_tensor_info(to, tuple(weight.shape), np.dtype(np.float32), size, as_kind)
    file.write_header_to_file()
    file.write_kv_data_to_file()
    file.write_ti_data_to_file()
    generator = torch.Generator().manual_seed(0)
    for name, weight in weights.items():
        if weight.is_meta:
            weight = torch.ones(weight.shape) if weight.ndim == 1 else torch.empty(weight.shape, dtype=torch.float16)
            if weight.ndim == 2:
                weight.normal_(0, 0.02, generator=generator)
        numbers = weight.numpy() if weight.dtype == torch.float16 else weight.float().numpy()
        if count := heads.get(name.split(".")[-2]):
            numbers = neighbours(numbers, count)
        if numbers.ndim == 2:
            numbers = gguf.quants.quantize(numbers, kind)
        file.write_tensor_data(numbers)
    file.close()


def random_file(shape: Mapping[str, Any], folder: Path) -> Path:
    """A random Llama of this shape in Q4_K_M."""
    from transformers import AutoModelForCausalLM, LlamaConfig

    config = LlamaConfig(**shape)
    with torch.device("meta"):
        weights = AutoModelForCausalLM.from_config(config).state_dict()
    write_gguf(folder / "f16.gguf", config, weights, "f16")
    file = quantised(folder / "f16.gguf", "Q4_K_M", folder / "q4_k_m.gguf")
    (folder / "f16.gguf").unlink()
    return file


def quantised(path: Path, kind: str, to: Path) -> Path:
    """A file of llama.cpp's own quantisation, as `Q4_K_M`."""
    import llama_cpp as api

    _silence(api)
    options = api.llama_model_quantize_default_params()
    options.ftype = getattr(api, f"LLAMA_FTYPE_MOSTLY_{kind}")
    options.nthread = os.cpu_count() or 1
    if api.llama_model_quantize(os.fsencode(path), os.fsencode(to), ctypes.byref(options)):
        raise RagkvError(f"llama.cpp could not write {path} as {kind}; is there enough space?")
    return to


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


class LlamaCpp:
    """One sequence in a context of llama.cpp with room for `cells` tokens, on one thread. It lives as long as the
    process."""

    def __init__(self, file: Path, cells: int, *, flash: bool, kv: str = "f16", sequences: int = 1) -> None:
        import llama_cpp as api

        self._api = api
        _silence(api)
        loading = api.llama_model_default_params()
        loading.use_extra_bufts = False  # on a processor with AMX, 0.3.36 crashes reading Q8_0 weights repacked for it
        self._model = api.llama_model_load_from_file(os.fsencode(file), loading)
        settings = api.llama_context_default_params()
        settings.n_ctx = cells
        settings.n_threads = settings.n_threads_batch = 1
        settings.n_seq_max, settings.kv_unified = sequences, sequences > 1
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

    def repeat(self, file: Path, at: Sequence[int]) -> None:
        """Let sequence 0 have the state in `file`, of sequence 0 from position 0, at these later positions too."""
        memory, none, count = self._api.llama_get_memory(self._context), (ctypes.c_int32 * 1)(), ctypes.c_size_t()
        for start in at:
            self._api.llama_state_seq_load_file(self._context, os.fsencode(file), 1, none, 1, ctypes.byref(count))
            self._api.llama_memory_seq_add(memory, 1, -1, -1, start)
            self._api.llama_memory_seq_cp(memory, 1, 0, -1, -1)
            self._api.llama_memory_seq_rm(memory, 1, -1, -1)

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

    return [
        row("first token", median["first half"], "ms", "f16, state from a file", best["state"]),
        row("first token, q8", median["first q8"], "ms", "f16, state from a file", best["state"]),
        row("first token", median["first half"], "ms", "f16, prefill", best["prefill"]),
        row("second token", median["second half"], "ms", "f16", best["f16"]),
        *(row("token", median["step half"], "ms", kind, best[kind]) for kind in kinds),
        row("token, q8", median["step q8"], "ms", eight, best[eight]),
        row("KV of a token", stored["half"], "bytes", "f16, state in a file", sizes["f16"]),
        row("KV of a token, q8", stored["q8"], "bytes", "q8_0, state in a file", sizes[eight]),
    ]


def _measure_runtime(file: Path, length: int, rounds: int, folder: Path) -> list[BenchRow]:
    """The runtime llama-cpp beside llama.cpp itself, with one file."""
    before, piece = PREFIX_TOKENS + length, min(length, PIECE_TOKENS) // 2 * 2
    cells = before + QUESTION_TOKENS + (rounds + 2) * (STEPS + 1) + 256
    states = {flash: folder / f"whole-{flash}.state" for flash in (False, True)}
    index = folder / f"{length}"
    ids = random_ids(256, torch.Generator().manual_seed(length), before + QUESTION_TOKENS)
    chunks = [ids[at : min(at + CHUNK_TOKENS, before)] for at in range(PREFIX_TOKENS, before, CHUNK_TOKENS)]
    prompt, question = [ids[:PREFIX_TOKENS], *chunks, ids[before:]], ids[before:]
    with answering(file, index, prompt) as (begin, stored):
        command = [sys.executable, "-m", llama_cpp_runtime.__name__, str(file), str(index), str(STEPS)]
        alone = subprocess.run(
            command, input=json.dumps(prompt).encode(), stdout=subprocess.PIPE, check=True, env=os.environ | _ONE_THREAD
        )
        peak = 1024 * int(alone.stdout)
        prefill: dict[bool, float] = {}
        for flash, state in states.items():
            maker = LlamaCpp(file, cells, flash=flash, sequences=2)
            prefill[flash] = seconds_of(partial(maker.read, ids[:piece]), processor=True)
            maker.save(state)
            maker.repeat(state, range(piece, before - piece + 1, piece))
            maker.read(ids[before // piece * piece : before])
            maker.save(state)
            maker.close()
        there = {flash: LlamaCpp(file, cells, flash=flash) for flash in states}
        streams: list[Stream] = []

        def first() -> None:
            streams.clear()  # its memory is reused, as llama.cpp's is
            streams.append(begin())
            streams[0].best()

        def steps() -> None:
            for _ in range(STEPS):
                streams[0].advance(streams[0].best())
                streams[0].best()

        def read(context: LlamaCpp) -> None:
            for _ in range(STEPS):
                context.read(question[:1])

        works: dict[str, Callable[[], object]] = {"first": first, "steps": steps}
        for flash, context in there.items():
            works[f"state {flash}"] = partial(_answer, context, partial(context.load, states[flash]), question)
            works[f"steps {flash}"] = partial(read, context)
        times = {name: 1000 * seconds for name, seconds in alternating(works, rounds, processor=True).items()}
        for context in there.values():
            context.close()
    whole, step = (min(times[f"{name} {flash}"] for flash in states) for name in ("state", "steps"))
    kv = states[False].stat().st_size
    most = file.stat().st_size + kv + MOST_BYTES

    def row(what: str, value: float, unit: str, baseline: str, other: float) -> BenchRow:
        return BenchRow.of(f"llama-cpp, {what}, {length} tokens", value, unit, baseline, other, digits=2)

    prefilled = f"llama.cpp, prefill of {piece} tokens" + f", {before / piece:.2g} times" * (before >= 2 * piece)
    return [
        row("first token", times["first"], "ms", "llama.cpp, state from a file", whole),
        row("first token", times["first"], "ms", prefilled, 1000 * min(prefill.values()) * before / piece),
        row("token", times["steps"] / STEPS, "ms", "llama.cpp", step / STEPS),
        row("KV of a token", stored, "bytes", "llama.cpp, state in a file", kv / before),
        row("resident memory", peak / 1e6, "MB", "file, KV and 600 MB", most / 1e6),
    ]


def _answer(there: LlamaCpp, restore: Callable[[], None] | None, ids: Sequence[int]) -> int:
    """From an empty context: restore the state, if any, read the tokens, and choose the next one."""
    there.clear()
    if restore is not None:
        restore()
    return int(there.read(ids).argmax())

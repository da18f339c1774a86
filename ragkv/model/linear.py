"""Linear layers and norms on a CPU, computed by ragkv's own kernels (`ragkv.model.layer_kernels`).

A decode step multiplies all weights by one row, so its time is that of reading them. They are therefore kept in the
fewest bytes that represent the checkpoint exactly, or in int8 if the user asks for that.
"""

from __future__ import annotations

import copy
import functools
import logging
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ragkv.attention.partial import by_torch, float_bits
from ragkv.attention.sequence import TokenSequence
from ragkv.errors import UnsupportedModelError
from ragkv.model.checkpoint import device_memory, int8_levels, processor_units
from ragkv.util import HUGE_PAGE, huge_memory
from ragkv.util.display import first_sentence
from ragkv.util.plugins import kernel_module

if TYPE_CHECKING:
    from ragkv.model.language_model import LanguageModel

logger = logging.getLogger(__name__)

LEAST_WEIGHTS = 1 << 14
"""A matrix with fewer weights, such as the router of experts, is not changed."""
_PRODUCTS_PER_STEP = 32
"""The kernel adds this many products of a row at a time; int8 weights are padded to twice that."""
_THREAD = 1 << 18
"""Multiply-adds that are worth a thread: 25 µs of work."""
_NUMBERS = 1 << 20
"""Elements of a norm's states that are worth a thread."""
_ROWS = 256  # weights are converted and compared this many rows at a time, which fit a cache
_EPSILONS = ("variance_epsilon", "eps", "epsilon", "norm_eps")
_MAX_MISMATCH_SHARE = 0.02
"""The accepted share of numbers that differ after rounding to bfloat16, from another order of summation; another form
of the norm changes a tenth."""


def _kernels() -> ModuleType | None:
    return kernel_module("ragkv.model.layer_kernels")


@functools.cache
def _compiled(weight: torch.dtype, rows: torch.dtype) -> tuple[ModuleType, Any, int]:
    """The kernels' module, its `product` for weights and rows of these dtypes, and the outputs per work unit."""
    kernels, names = _kernels(), [str(dtype).removeprefix("torch.") for dtype in (weight, rows)]
    assert kernels is not None
    return kernels, kernels.product(*names), kernels.tile_outputs(*names)


def _multiply(out: Tensor, rows: Tensor, weight: Tensor, bias: Tensor | None, count: int, *more: Tensor) -> None:
    """Fill `out` with W·x + b for each of `count` rows x; all tensors are contiguous. `more` are the arguments of
    `ragkv.model.layer_kernels` from SCALES on.
    """
    if not count:  # a kernel divides the rows by their number
        return
    kernels, kernel, outs = _compiled(weight.dtype, rows.dtype)
    out_features, in_features = weight.shape
    threads = kernels.kernels.threads_for(count * out_features * in_features, _THREAD)
    pointers = out.data_ptr(), rows.data_ptr(), weight.data_ptr(), 0 if bias is None else bias.data_ptr()
    others = [each.data_ptr() for each in more]
    sizes, held = (in_features, out_features, count), [out, rows, weight, *([] if bias is None else [bias]), *more]
    kernels.kernels.run(kernel, -(-out_features // outs), threads, *pointers, *sizes, *others, held=held)


@functools.cache
def most_rows(dtype: torch.dtype) -> float:
    """The kernel is faster than torch for weights of this dtype up to this many rows."""
    units = processor_units()
    if dtype != torch.bfloat16 or units.isdisjoint({"avx512_bf16", "amx_bf16"}):
        return float("inf")
    return 16 if "amx_bf16" in units else 64


class KernelLinear(nn.Linear):
    """A linear layer whose weights the kernel reads in place, in bfloat16 or float32.

    With 100M weights on one thread of an EPYC without matrix units, one row in bfloat16 takes 9 ms, as long as reading
    the weights, and 50 rows 48 (oneDNN: 20 and 59); in float32 one row takes 16 and 50 take 87 (MKL: 26 and 128).
    """

    def _weight(self) -> Tensor:
        """The weights in their stored dtype."""
        weight = self._parameters["weight"]
        assert weight is not None
        return weight

    def forward(self, input: Tensor) -> Tensor:
        weight, dtype = self._weight(), input.dtype
        bias: Tensor | None = self.bias
        count = input.numel() // self.in_features
        if not 0 < count <= most_rows(weight.dtype) or torch.is_grad_enabled() or not weight.is_contiguous():
            with by_torch():  # not by `self.weight`, which would make the weights of a `HalfLinear` float32 for ever
                return nn.functional.linear(input, weight.to(dtype), bias)
        rows = input.contiguous()
        if not (weight.dtype == dtype == torch.bfloat16 and _has_dot("bfloat16")):
            rows, bias = rows.float(), None if bias is None else bias.float()
        out = torch.empty((*input.shape[:-1], self.out_features), dtype=rows.dtype)
        _multiply(out, rows, weight, bias, count)
        return out.to(dtype)


def _has_dot(kind: str) -> bool:
    kernels = _kernels()
    return kernels is not None and bool(kernels.kernels.has_dot(kind))


class HalfLinear(KernelLinear):
    """A linear layer of a float32 model that keeps its weights in the checkpoint's 16 bits: half the memory, and half
    the time for a row.
    """

    def __getattr__(self, name: str) -> Any:
        """Who asks for `weight` may change it, or read it in every pass: from then on the layer has it in float32."""
        if name != "weight":
            return super().__getattr__(name)
        weight = self._weight()
        if weight.dtype != torch.float32:
            with torch.inference_mode(False), torch.no_grad():
                weight = self._parameters["weight"] = nn.Parameter(weight.float(), requires_grad=False)
        self.__class__ = KernelLinear  # type: ignore[assignment]
        return weight

    def float_weight(self) -> Tensor:
        """The weights in float32."""
        return self._weight().float()

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[f"{prefix}weight"] = self.float_weight()


class KernelNorm(nn.Module):
    """Mixed into an RMSNorm's class in front: one kernel instead of eight operations (`ragkv.model.layer_kernels`)."""

    form: str
    epsilon: float
    weight: Tensor

    def forward(self, hidden_states: Tensor, *args: Any, **options: Any) -> Any:
        ordinary = hidden_states.dtype == self.weight.dtype and hidden_states.is_contiguous()
        if args or options or torch.is_grad_enabled() or not ordinary:
            return super().forward(hidden_states, *args, **options)
        return _normalised(hidden_states, self.weight, self.epsilon, self.form)


def _normalised(states: Tensor, weight: Tensor, epsilon: float, form: str) -> Tensor:
    module = _kernels()
    assert module is not None
    out, width = torch.empty_like(states), len(weight)
    rows = states.numel() // width
    kernel = module.rms_norm(str(weight.dtype).removeprefix("torch."), form)
    threads = module.kernels.threads_for(states.numel(), _NUMBERS)
    pointers = states.data_ptr(), weight.data_ptr(), out.data_ptr()
    module.kernels.run(kernel, rows, threads, *pointers, width, float_bits(epsilon), held=(states, weight, out))
    return out


def _optimize_norms(model: LanguageModel) -> None:
    """Replace the RMSNorms of a checked model on a CPU, in place, by the kernel where it computes the same."""
    module = _kernels()
    if model.device.type != "cpu" or module is None:
        return
    if model.dtype != torch.float32 and not (model.dtype == torch.bfloat16 and _has_dot("bfloat16")):
        return
    forms: dict[Any, str | None] = {}
    for norm in model.network.modules():
        weight = getattr(norm, "weight", None)
        epsilon = next((getattr(norm, name) for name in _EPSILONS if hasattr(norm, name)), None)
        if "RMSNorm" not in type(norm).__name__ or not isinstance(weight, Tensor) or not isinstance(epsilon, float):
            continue
        if weight.dtype == model.dtype and weight.ndim == 1 and len(weight) % module.PIECE == 0:
            if type(norm) not in forms:
                forms[type(norm)] = _form(norm, weight, epsilon, module.FORMS)
            if (form := forms[type(norm)]) is not None:
                norm.form, norm.epsilon = form, epsilon
                kind: Any = type(norm)
                norm.__class__ = _with_kernel(kind)


@functools.cache
def _with_kernel(norm: type) -> type:
    return type(f"Kernel{norm.__name__}", (KernelNorm, norm), {})


@torch.inference_mode()
def _form(norm: nn.Module, weight: Tensor, epsilon: float, forms: Sequence[str]) -> str | None:
    """The form of the kernel that equals the norm up to the order of summation; None if none does."""
    states = 3 * torch.randn((8, len(weight)), generator=torch.Generator().manual_seed(0)).to(weight.dtype)
    states[1:3] *= 1e-3  # so that epsilon matters
    probe, some = copy.copy(norm), torch.linspace(-2, 2, len(weight)).to(weight.dtype)
    probe._parameters = norm._parameters | {"weight": nn.Parameter(some, requires_grad=False)}
    try:
        expected = probe(states)
        for form in forms:
            found = _normalised(states, some, epsilon, form)
            if expected.dtype == found.dtype and expected.shape == found.shape:
                wrong = (found.float() - expected.float()).abs() > 1e-6 * expected.float().abs()
                if wrong.float().mean() < _MAX_MISMATCH_SHARE:
                    return form
    except (TypeError, ValueError, RuntimeError, AttributeError) as error:
        logger.debug("a norm is not replaced: %s", error)
    return None


def optimize_layers(model: LanguageModel) -> None:
    """Replace the linear layers and norms of a checked model, in place, by the kernels that are fastest on its CPU.

    They compute with the same weights.
    """
    _optimize_norms(model)
    if model.device.type != "cpu" or model.dtype not in (torch.float32, torch.bfloat16) or _kernels() is None:
        return
    layers = [layer for layer in dict.fromkeys(layer for *_, layer in _large_layers(model.network)) if _fits(layer)]
    if model.dtype == torch.float32:
        memory = _memory([2 * layer.weight.numel() for layer in layers])
        with ThreadPoolExecutor(torch.get_num_threads()) as pool:
            list(pool.map(_halve, layers, memory))
    halved = any(isinstance(layer, HalfLinear) for layer in layers)
    for layer in layers:
        if type(layer) is nn.Linear:
            layer.__class__ = KernelLinear
    _gather([layer.weight for layer in layers if not isinstance(layer, HalfLinear)])
    if halved:  # only they need a pass that finds out whether something reads their weights directly
        _try_once(model)
    model.kernels_alone = _by_kernels(model)


_ALLOWED = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def _memory(sizes: Sequence[int]) -> Sequence[Tensor]:
    """Adjacent buffers of these sizes in bytes, in huge pages if possible.

    Every token reads the weights from first to last: one thread of an EPYC (Zen 4) reads huge pages half as fast again.
    """
    if not sum(sizes):
        return ()
    block = torch.frombuffer(huge_memory(sum(sizes)), dtype=torch.uint8)
    return torch.split(block[: sum(sizes)], [*sizes])


def _huge_pages() -> bool:
    """Whether a program may ask for huge pages."""
    try:
        return "[never]" not in _ALLOWED.read_text()
    except OSError:
        return False


@torch.no_grad()
def _gather(weights: Sequence[nn.Parameter]) -> None:
    """Copy weights into huge pages, if the system has them; each stays the same parameter.

    Weights that were mapped from a checkpoint's file then take memory of the process as well, so they are copied only
    if they take at most a quarter of the machine's memory.
    """
    size = sum(weight.nbytes for weight in weights)
    if not HUGE_PAGE <= size <= device_memory(torch.device("cpu")) // 4 or not _huge_pages():
        return
    try:
        memory = _memory([weight.nbytes for weight in weights])
    except MemoryError as error:
        logger.debug("weights are not moved to huge pages: %s", error)
        return
    for weight, piece in zip(weights, memory, strict=True):
        weight.data = piece.view(weight.dtype).view(weight.shape).copy_(weight)


def _by_kernels(model: LanguageModel) -> bool:
    """Whether ragkv's kernels compute all large layers of a model and its attention."""
    kinds = KernelLinear, Int8Linear, nn.Embedding
    others = (module for module in model.network.modules() if not isinstance(module, kinds))
    large = any(own.numel() >= LEAST_WEIGHTS for module in others for own in module.parameters(recurse=False))
    return not large and getattr(model.config, "attn_logit_softcapping", None) is None


def _fits(layer: Any) -> bool:
    """Whether the kernel can read a layer's weights."""
    whole_steps = layer.in_features % _PRODUCTS_PER_STEP == 0
    return bool(whole_steps and layer.weight.is_contiguous())


@torch.no_grad()
def _halve(layer: Any, memory: Tensor) -> None:
    """Turn the layer into a `HalfLinear` with its weights in this memory, if no weight loses precision."""
    for dtype in (torch.bfloat16, torch.float16):
        half = memory.view(dtype).view(layer.weight.shape)
        pairs = zip(torch.split(half, _ROWS), torch.split(layer.weight, _ROWS), strict=True)
        if all(torch.equal(part.copy_(rows).float(), rows) for part, rows in pairs):
            layer.weight = nn.Parameter(half, requires_grad=False)
            layer.__class__ = HalfLinear
            return


class Int8Linear(nn.Module):
    """A linear layer in float32 whose weights are int8, with a scale for each output.

    Processors multiply int8 by uint8 (VNNI), so an activation is the sum of two uint8: its rounding, and the rounding
    of the remainder. Together they have 14 bits (with one, of 7 bits, SmolLM2 gets about a tenth fewer tokens right).
    Without VNNI activations stay float32. Each token has its own scale, so a result does not depend on the rest of the
    batch.
    """

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        weight = layer.weight.detach().float()
        scales = weight.abs().amax(1).clamp_min_(torch.finfo(torch.float32).tiny).div_(127)
        rounded = (weight / scales[:, None]).round_().to(torch.int8)  # not in place: embeddings may be tied to them
        self.in_features, self.out_features = layer.in_features, layer.out_features
        self._more = -self.in_features % (2 * _PRODUCTS_PER_STEP)
        self.weight = nn.Parameter(nn.functional.pad(rounded, (0, self._more)), requires_grad=False)
        self.scales = nn.Parameter(scales, requires_grad=False)
        self.bias = None if layer.bias is None else nn.Parameter(layer.bias.detach().float(), requires_grad=False)
        self.zeros: Tensor | None = None
        if int8_levels() and _has_dot("int8"):
            self.zeros = nn.Parameter(128 * rounded.sum(1, dtype=torch.int32), requires_grad=False)

    def forward(self, input: Tensor) -> Tensor:
        rows = input.float()  # under torch.autocast the dtype may differ from the layer's
        rows = nn.functional.pad(rows, (0, self._more)) if self._more else rows
        rows = rows.contiguous().view(-1, self.weight.shape[1])
        out = torch.empty((*input.shape[:-1], self.out_features), dtype=torch.float32)
        if self.zeros is None or not len(rows):
            _multiply(out, rows, self.weight, self.bias, len(rows), self.scales)
            return out
        kernels, *_ = _compiled(self.weight.dtype, torch.uint8)
        steps = rows.abs().amax(1).div_(127)
        both = torch.empty((len(rows), 2, rows.shape[1]), dtype=torch.uint8)
        pointers = rows.data_ptr(), steps.data_ptr(), both.data_ptr()
        kernels.kernels.run(kernels.quantise(), len(rows), 1, *pointers, rows.shape[1], held=(rows, steps, both))
        _multiply(out, both, self.weight, self.bias, len(rows), self.scales, self.zeros, steps)
        return out


def int8_weights(model: LanguageModel) -> None:
    """Round the linear layers' weights of a checked model to int8, in place (`Int8Linear`), for faster decode steps.

    UnsupportedModelError if it is not on a CPU, if the CPU has no kernel for them, or if the model reads its weights
    directly. `ragkv doctor` measures what the rounding changes.
    """
    name = model.checkpoint.name
    if model.device.type != "cpu" or _kernels() is None:
        raise UnsupportedModelError(
            f"Model {name!r} cannot have int8 weights here: they need an x86 processor; use --dtype auto."
        )
    _optimize_norms(model)
    rounded: dict[Any, Int8Linear] = {}
    for parent, key, layer in _large_layers(model.network):
        rounded[layer] = rounded.get(layer) or Int8Linear(layer)
        setattr(parent, key, rounded[layer])
    _gather([layer.weight for layer in rounded.values()])
    model.int8 = True
    try:
        if not rounded:
            raise AttributeError("it has no linear layers of their size")
        _try_once(model)
    except (AttributeError, RuntimeError, TypeError) as error:
        raise UnsupportedModelError(
            f"Model {name!r} cannot have int8 weights ({first_sentence(error)}); use --dtype auto."
        ) from error
    model.kernels_alone = _by_kernels(model)


def ordinary_layers(model: nn.Module) -> nn.Module:
    """Turn the linear layers and norms of `model` back into transformers' own, in place, over the same weights; those
    of a `HalfLinear` become float32.
    """
    for parent in list(model.modules()):
        for key, layer in list(parent.named_children()):
            if isinstance(layer, KernelLinear):
                made = nn.Linear(layer.in_features, layer.out_features, bias=False, device="meta")
                made.weight, made.bias = nn.Parameter(layer.weight.detach(), requires_grad=False), layer.bias
                setattr(parent, key, made)
            elif isinstance(layer, KernelNorm):
                norm = copy.copy(layer)
                norm.__class__ = type(layer).__mro__[2]
                setattr(parent, key, norm)
    return model


def _large_layers(module: nn.Module) -> Iterator[tuple[nn.Module, str, Any]]:
    """Each linear layer of at least `LEAST_WEIGHTS` weights and four outputs, which kernels compute at a time, with its
    parent module and its name there.
    """
    for parent in list(module.modules()):
        for key, layer in list(parent.named_children()):
            if _large(layer):
                yield parent, key, layer


def _large(layer: Any) -> bool:
    plain = type(layer) is nn.Linear and type(layer.weight.data) is Tensor  # not torchao's packed weights
    return plain and layer.out_features >= 4 and layer.weight.numel() >= LEAST_WEIGHTS


def _try_once(model: LanguageModel) -> None:
    """Run a pass of two tokens, then a step of one."""
    model.encode([(0, 0)])
    model.step([TokenSequence.over((), position=0)], [(0,)])

"""Linear layers whose weights are read sooner on a processor: merged, in float16 or in int8.

A decode step multiplies all weights by one row, so it takes as long as reading them. What the processor has decides
which of these layers a model gets (`ragkv.model.self_check.load_model`).
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ragkv.attention.sequence import TokenSequence
from ragkv.errors import UnsupportedModelError
from ragkv.model.checkpoint import device_memory, int8_levels, processor_units
from ragkv.util.display import first_sentence

if TYPE_CHECKING:
    from ragkv.model.language_model import LanguageModel

SIBLINGS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Layers of one module that are given the same input, as transformers names them."""


class MergedLinear:
    """Linear layers that are given the same input: one `product` has the output of each, computed for the first of them
    that is asked.

    A pass in another thread may come between; then it is computed again.
    """

    def __init__(self, product: Callable[[Tensor], Sequence[Tensor]]) -> None:
        self._product = product
        self._latest: tuple[Tensor, Sequence[Tensor]] | None = None

    def __deepcopy__(self, _memo: Any) -> MergedLinear:
        return self  # copies of a model share their weights (`shallow_copy`)

    def output(self, index: int, input: Tensor) -> Tensor:
        """What layer `index` gives for `input`."""
        latest = self._latest
        if latest is None or latest[0] is not input:
            latest = self._latest = input, self._product(input)
        if index + 1 == len(latest[1]):
            self._latest = None  # it holds no memory between passes
        return latest[1][index]


def _siblings(model: nn.Module, eligible: Callable[[Any], bool]) -> Iterator[list[Any]]:
    """The layers that are given the same input: not those of cross-attention, whose keys are the encoder's."""
    for place, parent in model.named_modules():
        for names in () if "cross" in place or "encoder_attn" in place else SIBLINGS:
            layers: list[Any] = [getattr(parent, name, None) for name in names]
            if all(map(eligible, layers)) and len({(layer.bias is None, layer.in_features) for layer in layers}) == 1:
                yield layers


FEW = 16
"""Up to this many rows, which fill one tile, the product is soonest computed from the weights' side."""
MOST_WEIGHTS = 1 << 22
"""A matrix with more is not merged: a call of its own costs it nothing, and its memory may be that of a mapped file."""


class FewRowsLinear(nn.Linear):
    """A linear layer in bfloat16 whose product W·xᵀ of few rows is computed with the weights as the left matrix.

    oneDNN rearranges the right matrix of a product before it computes, each time. With the weights on the right, as in
    x·Wᵀ, it copies all of them for the few rows of a decode step: 25 ms instead of 18 for the 85 matrices of a Llama of
    100M parameters, on one thread. The sums are the same, in float32.

    Small matrices that are given the same input lie side by side, as one: each call of oneDNN takes 40 µs besides.
    """

    merged: tuple[MergedLinear, int, int] | None = None
    """The product that computes it, its index there, and where its weights lay when that was made."""

    def forward(self, input: Tensor) -> Tensor:
        rows = input.numel() // self.in_features
        few = 0 < rows <= FEW and self.weight.dtype == input.dtype == torch.bfloat16
        if not few or input.device.type != "cpu" or torch.is_grad_enabled():
            return super().forward(input)
        if self.merged is not None and self.merged[2] == self.weight.data_ptr():
            found = self.merged[0].output(self.merged[1], input)
        else:
            found = _of_few_rows(self.weight, self.bias, input)
        return found.t().reshape(*input.shape[:-1], self.out_features).contiguous()


def _of_few_rows(weight: Tensor, bias: Tensor | None, input: Tensor) -> Tensor:
    """The output of the rows of `input`, `(out_features, rows)`, or `(out_features,)` of one."""
    states = input.reshape(-1, weight.shape[1])
    if len(states) == 1:
        return torch.mv(weight, states[0]) if bias is None else torch.addmv(bias, weight, states[0])
    right = states.t()
    return torch.mm(weight, right) if bias is None else torch.addmm(bias[:, None], weight, right)


def read_few_rows(model: nn.Module) -> None:
    """Make the linear layers of `model` in bfloat16 `FewRowsLinear`, in place."""
    for module in model.modules():
        plain = type(module) is nn.Linear and type(module.weight.data) is Tensor  # not torchao's packed weights
        if plain and (module.weight.dtype, module.weight.device.type) == (torch.bfloat16, "cpu"):
            module.__class__ = FewRowsLinear
    for layers in _siblings(model, lambda each: type(each) is FewRowsLinear and each.weight.numel() <= MOST_WEIGHTS):
        _lie_side_by_side(layers)


def _lie_side_by_side(layers: Sequence[FewRowsLinear]) -> None:
    """Move the weights of these layers into one matrix, and compute them together."""
    weight = torch.cat([layer.weight.detach() for layer in layers])
    bias = None if layers[0].bias is None else torch.cat([layer.bias.detach() for layer in layers])
    sizes = [layer.out_features for layer in layers]
    merged = MergedLinear(lambda input: torch.split(_of_few_rows(weight, bias, input), sizes))
    for index, layer in enumerate(layers):
        layer.weight.data = torch.split(weight, sizes)[index]
        if bias is not None:
            layer.bias.data = torch.split(bias, sizes)[index]
        layer.merged = merged, index, layer.weight.data_ptr()


LEAST_WEIGHTS = 1 << 14
"""A matrix with fewer weights, such as a router of experts, stays in float32."""


class Int8Linear(nn.Module):
    """Linear layers in float32 that are given the same input, whose weights are int8, with a scale per output.

    The kernels multiply int8 by uint8, so the states become the sum of two: their rounding, and that of the rest, which
    together have 14 bits (one has 7, and SmolLM2 is then right about a tenth fewer tokens). Each token has a scale of
    its own, so a result does not depend on what else is in the pass.

    oneDNN's kernel is the sooner one where the processor has matrix units, FBGEMM's elsewhere: half the time of
    oneDNN's for one row. Without VNNI both add two products in 16 bits, which 8-bit states would overflow: `levels` is
    63 then (`int8_levels`).
    """

    def __init__(self, layers: Sequence[nn.Linear], levels: int) -> None:
        super().__init__()
        weight = torch.cat([layer.weight.detach().float() for layer in layers])
        scales = weight.abs().amax(1).clamp_min_(torch.finfo(torch.float32).tiny).div_(127)
        zeros = torch.zeros(len(scales), dtype=torch.int32)
        rounded = (weight / scales[:, None]).round_().to(torch.int8)  # not in place: embeddings may be tied to them
        self.in_features, self.out_features = weight.shape[1], weight.shape[0]
        biases = [layer.bias.detach().float() for layer in layers if layer.bias is not None]
        self.bias = nn.Parameter(torch.cat(biases), requires_grad=False) if biases else None
        self._levels = levels
        self._onednn: tuple[Tensor, Tensor, Tensor] | None = None
        if "amx_bf16" in processor_units() or not _has_fbgemm():
            self._onednn = torch.ops.onednn.qlinear_prepack(rounded, None), scales, zeros
        else:
            with warnings.catch_warnings():  # torch warns that its quantised tensors will go; oneDNN's kernel stays
                warnings.simplefilter("ignore", UserWarning)
                whole = torch._make_per_channel_quantized_tensor(rounded, scales.double(), zeros.long(), 0)
                self._packed = torch.ops.quantized.linear_prepack(whole, None)

    def __deepcopy__(self, _memo: Any) -> Int8Linear:
        return self  # it never changes, and copies of a model share their weights (`shallow_copy`)

    def forward(self, input: Tensor) -> Tensor:
        states = input.reshape(-1, self.in_features)
        step = states.abs().amax(-1, keepdim=True).clamp_min_(1e-30).div_(self._levels)
        both = states.new_empty((2, *states.shape))
        coarse, rest = both.unbind()
        torch.round(torch.div(states, step, out=rest), out=coarse)
        rest.sub_(coarse).mul_(2 * self._levels)
        found, more = self._product(both.view(-1, self.in_features)).view(2, len(states), -1).unbind()
        found = found.add_(more, alpha=0.5 / self._levels).mul_(step)
        if self.bias is not None:
            found += self.bias
        return found.view(*input.shape[:-1], self.out_features)

    def _product(self, states: Tensor) -> Tensor:
        """`(rows, out_features)` from states between -`levels` and `levels`, which are rounded."""
        zero = self._levels + 1
        if self._onednn is None:
            product = torch.ops.quantized.linear_with_input_q_dq_qweight_dq_output_fp32
            found: Tensor = product(states, 1.0, zero, self._packed)
            return found
        weight, scales, zeros = self._onednn
        whole = states.round_().add_(zero).to(torch.uint8)
        result: Tensor = torch.ops.onednn.qlinear_pointwise(
            whole, 1.0, zero, weight, scales, zeros, None, 1.0, 0, torch.float32, "none", [], ""
        )
        return result


class Int8Part(nn.Module):
    """One layer of an `Int8Linear` of several."""

    def __init__(self, merged: MergedLinear, index: int) -> None:
        super().__init__()
        self._merged, self._index = merged, index

    def forward(self, input: Tensor) -> Tensor:
        return self._merged.output(self._index, input)


def _merged_int8(layers: Sequence[nn.Linear]) -> Iterator[Int8Part]:
    whole = Int8Linear(layers, int8_levels())
    sizes = [layer.out_features for layer in layers]
    merged = MergedLinear(lambda input: torch.split(whole(input), sizes, -1))
    for index in range(len(layers)):
        yield Int8Part(merged, index)


def int8_weights(model: LanguageModel) -> None:
    """Round the linear layers' weights of a checked model to int8, in place: `Int8Linear`, for sooner decode steps.

    `UnsupportedModelError` if it runs on a device, on a processor without a kernel for them, or reads its weights by
    itself; `ragkv doctor` says what the rounding changes.
    """
    name = model.checkpoint.name
    if model.device.type != "cpu" or not (int8_levels() == 127 or _has_fbgemm()):
        raise UnsupportedModelError(
            f"Model {name!r} cannot have int8 weights here: they need an x86 processor; use --dtype auto."
        )
    made: dict[Any, nn.Module] = {}
    for layers in _siblings(model.module, _large):
        made |= zip(layers, _merged_int8(layers), strict=True)
    for parent, key, layer in _large_layers(model.module):
        made[layer] = made.get(layer) or Int8Linear([layer], int8_levels())
        setattr(parent, key, made[layer])
    model.int8 = True
    model.packed_bytes = sum(layer.weight.numel() + 4 * layer.out_features for layer in made)
    try:
        if not made:
            raise AttributeError("it has no linear layers of their size")
        _try_once(model)
    except (AttributeError, RuntimeError, TypeError) as error:
        raise UnsupportedModelError(
            f"Model {name!r} cannot have int8 weights ({first_sentence(error)}); use --dtype auto."
        ) from error


MOST_OFF = 2.0**-25
"""What float16 may change of a row whose largest number lies between 2^14 and 2^15: half of its smallest number."""
FEW_IN_FLOAT16 = 10
"""Up to this many rows, float16 weights are sooner than bfloat16 ones on a processor without matrix units, and two of
them than a float32 one."""
SPARE = 8
"""A second copy of a model's weights takes at most this part of the memory."""
_ROWS = 256  # so many are tried at a time, in a cache
_REST = 2.0**11  # what is left of a number after float16 is less than 2^-11 of it


class Float16Weights:
    """A matrix `(out_features, in_features)` and a bias in float16, which FBGEMM multiplies in float32.

    Each output's row is multiplied by a power of two before it is rounded, so nothing of a checkpoint in bfloat16 or
    float16 is lost. A float32 number becomes the sum of two, which have 22 bits of its 24. A token's result does not
    depend on what other tokens there are.
    """

    def __init__(self, parts: Sequence[Tensor], bias: Tensor | None, scales: Tensor) -> None:
        self._scales = 1 / scales
        self._bias = None if bias is None else bias.detach().float()
        self._packed, *self._rest = (torch.ops.quantized.linear_prepack_fp16(part, None) for part in parts)
        self.nbytes = 2 * sum(part.numel() for part in parts)

    @classmethod
    def of(cls, weight: Tensor, bias: Tensor | None, *, most: int = 1) -> Float16Weights | None:
        """In one float16 for each number; if that changes a number of less than 2^-29 of its row's largest one by more
        than 2^-39 of that, or any other at all, in two, if `most` is 2. Else None, as for infinities.
        """
        scales, parts = torch.empty(len(weight)), [torch.empty(weight.shape) for _ in range(most)]
        blocks = (torch.split(tensor, _ROWS) for tensor in (weight.detach(), scales, *parts))
        lost = 0.0
        for rows, scale, scaled, *rest in zip(*blocks, strict=True):
            wide = rows.float()
            exponents = torch.frexp(wide.abs().amax(1)).exponent
            torch.ldexp(torch.ones(len(rows)), (15 - exponents).clamp_max_(126), out=scale)
            off = torch.mul(wide, scale[:, None], out=scaled) - scaled.half().float()
            lost = max(float(off.abs().amax()), lost)
            if not math.isfinite(lost) or (lost > MOST_OFF and most < 2):
                return None
            for out in rest:
                torch.mul(off, _REST, out=out)
        return cls(parts[: 1 if lost <= MOST_OFF else 2], bias, scales)

    def unpacked(self) -> Tensor:
        """The matrix in float32."""
        first, *rest = (torch.ops.quantized.linear_unpack_fp16(each)[0].float() for each in (self._packed, *self._rest))
        weight: Tensor = first.add_(rest[0], alpha=1 / _REST) if rest else first
        return weight.mul_(self._scales[:, None])

    def product(self, input: Tensor) -> Tensor:
        """`(…, out_features)` from `(…, in_features)`, in the dtype of `input`."""
        if input.dim() == 1:
            return self.product(input[None])[0]
        states = input.float()
        found: Tensor = torch.ops.quantized.linear_dynamic_fp16(states, self._packed)
        for rest in self._rest:
            found.add_(torch.ops.quantized.linear_dynamic_fp16(states, rest), alpha=1 / _REST)
        found = found.mul_(self._scales) if self._bias is None else torch.addcmul(self._bias, found, self._scales)
        return found.to(input.dtype)

    def __deepcopy__(self, _memo: Any) -> Float16Weights:
        return self  # copies of a model share their weights (`shallow_copy`)


@dataclass(frozen=True, eq=False)
class Float16Part:
    """One of the layers whose `Float16Weights` are `whole`."""

    whole: Float16Weights
    merged: MergedLinear
    index: int
    sizes: Sequence[int]

    def product(self, input: Tensor) -> Tensor:
        return self.merged.output(self.index, input)

    def unpacked(self) -> Tensor:
        return torch.split(self.whole.unpacked(), list(self.sizes))[self.index].clone()

    def __deepcopy__(self, _memo: Any) -> Float16Part:
        return self


class Float16Linear(nn.Linear):
    """A linear layer in float32 whose weights are `Float16Weights`: half the memory, and a row takes half the time."""

    packed: Float16Weights | Float16Part
    read = False
    """Whether something has asked for the weights by themselves: then it is better off as an ordinary layer."""

    @property
    def weight(self) -> Tensor:  # type: ignore[override]
        self.read = True
        return self.packed.unpacked()

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[f"{prefix}weight"] = self.packed.unpacked()

    def forward(self, input: Tensor) -> Tensor:
        return self.packed.product(input)


class BesideFloat16Linear(nn.Linear):
    """A linear layer with a second copy of its weights, `Float16Weights`, for few rows.

    On an EPYC without matrix units a row reads a bfloat16 matrix at 9 GB/s by oneDNN, a float32 one at 13 by MKL, and
    float16 ones at 25 by FBGEMM. From 16 rows on bfloat16 is sooner, and one float32 matrix than two in float16.
    """

    packed: tuple[Float16Weights | Float16Part, int, int]
    """The copy; where the weights lay and how often they had been changed when it was made."""

    def forward(self, input: Tensor) -> Tensor:
        few = 0 < input.numel() <= FEW_IN_FLOAT16 * self.in_features and not torch.is_grad_enabled()
        if few and input.dtype == self.weight.dtype:
            packed, place, version = self.packed
            if self.weight.data_ptr() == place and self.weight._version == version:
                return packed.product(input)
        return super().forward(input)


def optimize_linear_layers(model: LanguageModel) -> None:
    """Make the linear layers of a checked model what reads its weights soonest on its processor, in place.

    In float32 `Float16Linear`, where that loses nothing; in bfloat16 `FewRowsLinear` with matrix units; others
    `BesideFloat16Linear`, if the memory is there (`SPARE`). The numbers stay those of the same weights.
    """
    if model.device.type != "cpu":
        return
    if model.dtype == torch.bfloat16 and "amx_bf16" in processor_units():
        read_few_rows(model.module)
        return
    if model.dtype not in (torch.float32, torch.bfloat16) or not _has_fbgemm():
        return
    layers = list(dict.fromkeys(layer for _, _, layer in _large_layers(model.module)))
    groups = list(_siblings(model.module, _large))
    grouped = {layer for group in groups for layer in group}
    groups += [[layer] for layer in layers if layer not in grouped]
    with ThreadPoolExecutor(torch.get_num_threads()) as pool:
        if model.dtype == torch.float32:
            model.packed_bytes = sum(pool.map(_become_float16, groups))
        groups = [group for group in groups if not isinstance(group[0], Float16Linear)]
        if sum(layer.weight.nbytes for group in groups for layer in group) <= device_memory(model.device) // SPARE:
            model.packed_bytes += sum(pool.map(_stand_beside_float16, groups))
    made = [layer for layer in layers if isinstance(layer, Float16Linear)]
    if made:  # the others keep their weights, and need no pass to see who reads them
        _try_once(model)
    for layer in made:
        if layer.read:
            _become_ordinary(layer)


def _pack(layers: Sequence[nn.Linear], most: int) -> tuple[int, Sequence[Float16Weights | Float16Part]]:
    """The bytes of float16 weights for these layers, which are given the same input, and those of each; none of them
    if they cannot be had (`Float16Weights.of`).
    """
    weight: Tensor = layers[0].weight
    bias: Tensor | None = layers[0].bias
    if len(layers) > 1:
        weight = torch.cat([layer.weight for layer in layers])
        bias = None if bias is None else torch.cat([layer.bias for layer in layers])
    whole, sizes = Float16Weights.of(weight, bias, most=most), [layer.out_features for layer in layers]
    if whole is None:
        return 0, ()
    if len(layers) == 1:
        return whole.nbytes, [whole]
    merged = MergedLinear(lambda input: torch.split(whole.product(input), sizes, -1))
    return whole.nbytes, [Float16Part(whole, merged, index, sizes) for index in range(len(layers))]


@torch.no_grad()
def _become_float16(layers: Sequence[nn.Linear]) -> int:
    """Make them `Float16Linear` if they lose nothing by that; returns the bytes of the new weights."""
    nbytes, packed = _pack(layers, 1)
    for layer, its in zip(layers, packed, strict=False):
        del layer.weight
        layer.__class__ = Float16Linear
        layer.packed = its  # type: ignore[assignment]
    return nbytes


def _become_ordinary(layer: nn.Linear) -> None:
    weight, layer.__class__ = layer.weight, nn.Linear
    layer.weight = nn.Parameter(weight, requires_grad=False)


@torch.no_grad()
def _stand_beside_float16(layers: Sequence[nn.Linear]) -> int:
    """Make them `BesideFloat16Linear`; returns the bytes of the copy."""
    nbytes, packed = _pack(layers, 2)
    for layer, its in zip(layers, packed, strict=False):
        layer.__class__ = BesideFloat16Linear
        layer.packed = its, layer.weight.data_ptr(), layer.weight._version  # type: ignore[assignment]
    return nbytes


def ordinary_layers(model: nn.Module) -> nn.Module:
    """`model` after its linear layers were made transformers' own again, in place, over the same weights; those of a
    `Float16Linear` are unpacked.
    """
    for parent in list(model.modules()):
        for key, layer in list(parent.named_children()):
            if isinstance(layer, (FewRowsLinear, Float16Linear, BesideFloat16Linear)):
                made = nn.Linear(layer.in_features, layer.out_features, bias=False, device="meta")
                made.weight, made.bias = nn.Parameter(layer.weight.detach(), requires_grad=False), layer.bias
                setattr(parent, key, made)
    return model


def _has_fbgemm() -> bool:
    return "fbgemm" in torch.backends.quantized.supported_engines


def _large_layers(module: nn.Module) -> Iterator[tuple[nn.Module, str, Any]]:
    """Each linear layer with `LEAST_WEIGHTS`, with the module that has it and its name there."""
    for parent in list(module.modules()):
        for key, layer in list(parent.named_children()):
            if _large(layer):
                yield parent, key, layer


def _large(layer: Any) -> bool:
    plain = type(layer) in (nn.Linear, FewRowsLinear) and type(layer.weight.data) is Tensor  # not torchao's packed ones
    return plain and layer.weight.numel() >= LEAST_WEIGHTS


def _try_once(model: LanguageModel) -> None:
    """A pass of two tokens, and a step of one."""
    model.encode([(0, 0)])
    model.step([TokenSequence.over((), position=0)], [(0,)])

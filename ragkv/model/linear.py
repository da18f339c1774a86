"""Linear layers that read few rows, on a processor with matrix units (AMX)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ragkv.model.checkpoint import processor_units

FEW = 16
"""Up to this many rows, which fill one tile, the product is soonest computed from the weights' side."""


class FewRowsLinear(nn.Linear):
    """A linear layer in bfloat16 whose product W·xᵀ of few rows is computed with the weights as the left matrix.

    oneDNN rearranges the right matrix of a product before it computes, each time. With the weights on the right, as in
    x·Wᵀ, it copies all of them for the few rows of a decode step: 25 ms instead of 18 for the 85 matrices of a Llama of
    100M parameters, on one thread. The sums are the same, in float32.
    """

    def forward(self, input: Tensor) -> Tensor:
        weight, bias, rows = self.weight, self.bias, input.numel() // self.in_features
        few = 0 < rows <= FEW and weight.dtype == input.dtype == torch.bfloat16
        if not few or input.device.type != "cpu" or torch.is_grad_enabled():
            return super().forward(input)
        states = input.reshape(rows, -1)
        if rows == 1:
            found = torch.mv(weight, states[0]) if bias is None else torch.addmv(bias, weight, states[0])
        else:
            right = states.t()
            found = (torch.mm(weight, right) if bias is None else torch.addmm(bias[:, None], weight, right)).t()
        return found.reshape(*input.shape[:-1], self.out_features).contiguous()


def read_few_rows(model: nn.Module) -> None:
    """Make the linear layers of `model` `FewRowsLinear`, in place, where that is sooner."""
    if "amx_bf16" not in processor_units():
        return
    for module in model.modules():
        if type(module) is nn.Linear and (module.weight.dtype, module.weight.device.type) == (torch.bfloat16, "cpu"):
            module.__class__ = FewRowsLinear

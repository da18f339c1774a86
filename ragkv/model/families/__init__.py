"""What single families of models do in a way of their own, each a few lines; most need none of it."""

from typing import Any

from ragkv.model.families.falcon import adapt_falcon
from ragkv.model.families.inner import adapt_inner

__all__ = ["adapt"]


def adapt(model: Any) -> None:
    """Lead the attention of families that call it by code of their own through transformers' interface, in place.

    With its own attention ("eager", "sdpa") the model computes as before.
    """
    if not (adapt_inner(model) | adapt_falcon(model)):
        return
    for module in model.modules():
        if hasattr(module, "set_attn_implementation"):  # which looks for the interface in the family's source
            module._can_set_attn_implementation = _yes


def _yes() -> bool:
    return True

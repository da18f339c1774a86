"""Latent attention: what is stored per token. Its results are tested with deepseek3, like those of any family."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from ragkv.attention.partial import LayerCall
from ragkv.errors import UnsupportedModelError
from ragkv.model.attention_hook import (
    LatentAttention,
    LatentProjection,
    latent_bytes,
    latents_of,
)
from ragkv.types import LayerShape

RANK, NOPE, ROPE, VALUE, HEADS = 6, 5, 4, 3, 2


def layer(**changes):
    """The parts of transformers' attention module that ragkv reads."""
    found = nn.Module()
    found.kv_b_proj = nn.Linear(RANK, HEADS * (NOPE + VALUE), bias=False)
    found.kv_lora_rank, found.qk_nope_head_dim, found.v_head_dim = RANK, NOPE, VALUE
    found.expand_kv = None
    for name, value in changes.items():
        setattr(found, name, value)
    return found


def test_other_attention_is_left_alone():
    assert latents_of(nn.Sequential(nn.Linear(2, 2))) == {}


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"kv_b_proj": nn.Linear(RANK, HEADS * (NOPE + VALUE))}, "more than a matrix"),
        ({"qk_nope_head_dim": None, "kv_b_proj": None}, "does not have the usual modules"),
    ],
)
def test_latent_attention_of_another_build_is_refused(changes, reason):
    module = layer(**changes)
    if changes.get("kv_b_proj", 0) is None:
        del module.qk_nope_head_dim
    with pytest.raises(UnsupportedModelError, match=reason):
        LatentProjection(module)


class Halves(nn.Module):
    """A matrix in another format, as in quantised checkpoints: bytes and a scale."""

    def __init__(self, matrix):
        super().__init__()
        self.weight = nn.Parameter((matrix * 2).to(torch.int8), requires_grad=False)
        self.norm = nn.Parameter(torch.ones(1))

    def forward(self, states):
        return states @ (self.weight.float() / 2).T


def test_a_quantised_matrix_is_taken_apart():
    matrix = torch.randint(-9, 9, (HEADS * (NOPE + VALUE), RANK)) / 2
    latent = LatentProjection(layer(kv_b_proj=Halves(matrix)))
    assert torch.equal(latent.weight, matrix.view(HEADS, NOPE + VALUE, RANK))


class Doubled(nn.Module):
    """A module around another, as LoRA puts one there."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, states):
        return 2 * self.inner(states)


def scaled(parent):
    parent.kv_b_proj.weight.data.mul_(2)


def replaced(parent):
    parent.kv_b_proj.weight = nn.Parameter(parent.kv_b_proj.weight.detach() * 2)


def wrapped(parent):
    parent.kv_b_proj = Doubled(parent.kv_b_proj)


def hooked(parent):
    parent.kv_b_proj.register_forward_hook(lambda module, inputs, out: 2 * out)


@pytest.mark.parametrize(
    ("quantised", "change"),
    [(False, scaled), (False, replaced), (False, wrapped), (False, hooked), (True, wrapped), (True, hooked)],
)
def test_latents_are_expanded_as_the_layer_does_now(quantised, change):
    matrix = torch.randint(-9, 9, (HEADS * (NOPE + VALUE), RANK)) / 2
    parent = layer(kv_b_proj=Halves(matrix)) if quantised else layer()
    latent = LatentProjection(parent)
    before = latent.weight.clone()
    change(parent)
    torch.testing.assert_close(latent.weight, 2 * before)


def test_a_layer_that_gives_its_cache_nothing_is_refused():
    absorbing = LatentAttention(
        SimpleNamespace(), {0: LatentProjection(layer())}, SimpleNamespace(given=(1, None, None))
    )
    nothing = torch.zeros(1, 1, 1, 1)
    call = LayerCall(layer=0, query=nothing, key=nothing, value=nothing, scale=1.0)
    with pytest.raises(UnsupportedModelError, match="passes no latents to its cache"):
        absorbing.attend(call)


def test_a_token_is_kept_as_its_latent_and_its_rope_key(make_model):
    model = make_model("deepseek3")
    [kv] = model.encode([[5, 6, 7]])
    assert kv.shape.layers == (LayerShape(1, 20 + 8, 0),) * model.layers
    kept, expanded = latent_bytes(model.config, 4)
    assert kv.shape.token_bytes == kept == model.layers * 28 * 4
    assert expanded == model.layers * 4 * (12 + 8 + 14) * 4
    assert kv.nbytes == 3 * kept


def test_only_the_rope_part_of_a_latents_key_moves(make_model):
    """What has no position must not hide from the self-check how the rest is rotated."""
    model = make_model("deepseek3")
    assert model.rotary.moving(0, 28, model.device).tolist() == [False] * 20 + [True] * 8


def test_transformers_own_model_is_as_it_was(make_model):
    """ragkv gets the latents from the cache: no module has an attribute or a forward method of ragkv's."""
    model = make_model("deepseek3")
    names = {name for module in model.module.modules() for name in vars(module)}
    assert not [name for name in names if "ragkv" in name or name in ("expand_kv", "forward")]


def test_tokens_that_meet_other_experts_in_half_types_refuse_no_engine(make_model):
    model = make_model("deepseek3-experts", "bfloat16")
    assert model.missing_capabilities == {}
    assert model.moves_within is None

"""Packets: their KV and answers against the model's own forward pass, and files that are refused."""

import copy
import os

import oracle
import pytest
import torch
from asking import CHUNKS, PREFIX, STEPS, SUFFIX, continues, request, run
from safetensors.torch import save_file

from ragkv.engines import make_engine
from ragkv.engines.base import require_supported
from ragkv.errors import ConfigError, ModelLoadError, UnsupportedModelError
from ragkv.model.language_model import weights_digest
from ragkv.model.packet import load_packet, make_packet, wrap


def packet_of(model, header=3, trailer=2, **settings):
    """A packet of seeded vectors for a test model, which has no files to compute a digest of."""
    width = model.module.get_input_embeddings().weight.shape[1]
    drawn = torch.randn(header + trailer, width, generator=torch.Generator().manual_seed(header)) * 0.3
    name = model.companion(weights_digest, lambda it: it.checkpoint.name)
    return make_packet(drawn[:header], drawn[header:], name, **settings)


@pytest.fixture
def saved(tmp_path):
    def save(model, *sizes, **settings):
        path = tmp_path / "packet.safetensors"
        packet_of(model, *sizes, **settings).save(path)
        return str(path)

    return save


def test_vectors_are_numbered_around_the_chunk():
    assert wrap([7, 8], 2, 1) == (-1, -2, 7, 8, -3)
    assert wrap([7], 0, 0) == (7,)


@pytest.mark.parametrize("over", ["standalone", "prefixed"])
def test_the_engine_reads_packets_as_one_masked_forward_does(unlike_family, make_model, saved, over):
    model = make_model(unlike_family)
    path = saved(model, over=over)
    packet = load_packet(path)
    found, expected = [], []
    ids, _ = run(model, "block", tuning={"packet": path}, trace=found)
    with model.plain() as plain:
        wrapped = [list(packet.wrap(chunk)) for chunk in CHUNKS]
        how = {"over": over, "vectors": packet.vectors, "trace": expected}
        literal = oracle.block(plain, PREFIX, wrapped, SUFFIX, STEPS, **how)
    assert ids == literal
    reach = float(torch.stack(expected).abs().max())
    torch.testing.assert_close(torch.stack(found), torch.stack(expected), atol=3e-5 * reach, rtol=0)
    without: list[torch.Tensor] = []
    run(model, "block", trace=without)
    assert not torch.allclose(torch.stack(found), torch.stack(without), atol=1e-3 * reach)


def test_transformers_own_generate_continues_from_the_cache(make_model, saved):
    model = make_model("llama")
    assert continues(model, {"packet": saved(model)}) == len(PREFIX) + sum(len(c) + 5 for c in CHUNKS)


def test_a_packet_without_vectors_is_block(make_model, saved):
    model = make_model("qwen3")
    path = saved(model, 0, 0)
    [plain], [wrapped] = model.encode(CHUNKS[:1]), model.encode(CHUNKS[:1], packet=load_packet(path))
    for one, other in zip((*plain.keys, *plain.values), (*wrapped.keys, *wrapped.values), strict=True):
        assert torch.equal(one, other)
    assert run(model, "block", tuning={"packet": path}) == run(model, "block")


def test_a_packets_sink_is_read_unless_overruled(make_model, saved):
    model = make_model("llama")
    path = saved(model, sink="none")
    found = run(model, "block", tuning={"packet": path})[0]
    assert found == run(model, "block", tuning={"packet": path, "sink": "none"})[0]
    assert found != run(model, "block", tuning={"packet": path, "sink": "prefix"})[0]
    engine = make_engine("block", {"block": {"packet": saved(model, sink="drain")}})
    with pytest.raises(ConfigError, match="names the sink 'drain'"):
        list(engine.program(request(model, engine), model))


def test_the_same_vectors_are_the_same_file_and_others_are_not(make_model, saved):
    model = make_model("llama")
    first = load_packet(saved(model))
    assert load_packet(saved(model)).digest == first.digest == packet_of(model).digest
    assert first.words([5, 6]) == first.words([]) == (*first.words([])[:8], 0, 3, 2)
    behind = load_packet(saved(model, over="prefixed"))
    assert behind.words([5, 6]) == (*behind.words([5, 6])[:8], 2, 3, 2)
    assert len({behind.words(ids)[:8] for ids in ([5, 6], [6, 5], [5])} | {first.words([])[:8]}) == 4
    others = {load_packet(saved(model, *sizes)).digest for sizes in ((2, 3), (4, 2), (3, 2))}
    assert len(others | {load_packet(saved(model, sink="none")).digest}) == 4  # same name, read again
    assert torch.equal(first.vectors, packet_of(model).vectors)


def test_a_packet_of_another_model_is_refused(make_model, saved):
    path = saved(make_model("qwen2"))
    model = make_model("llama")
    packet_of(model)
    engine = make_engine("block", {"block": {"packet": path}})
    with pytest.raises(ModelLoadError, match="trained for another model than 'llama'; train one for it by ragkv fine"):
        require_supported(engine, model)
    with pytest.raises(ModelLoadError, match="trained for another model"):
        model.encode(CHUNKS, packet=engine.packet)


def test_a_model_that_reads_the_token_itself_is_refused_by_name(make_model):
    model = copy.copy(make_model("gemma3n"))
    model._companions, model._model = {}, copy.deepcopy(model._model)
    with torch.no_grad():
        for name, weight in model.module.named_parameters():
            if name.endswith("correct_output_scale"):
                weight.fill_(1.0)  # 0 in a fresh model, which would then ignore the token itself
    with pytest.raises(UnsupportedModelError, match="Model 'gemma3n' cannot read packets: it "):
        model.encode(CHUNKS, packet=packet_of(model))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "cannot be read"),
        (b"", "is damaged or not a packet"),
        (b"\x10\0\0\0\0\0\0\0{}", "is damaged or not a packet"),
        ({"header": torch.zeros(1, 4)}, "is not a packet of ragkv"),
        ({"header": torch.zeros(1, 4), "trailer": torch.zeros(1, 3)}, "is not a packet of ragkv"),
        ({"header": torch.zeros(1, 4), "trailer": torch.full((1, 4), torch.nan)}, "is not a packet of ragkv"),
        ({"header": torch.zeros(1, 4).half(), "trailer": torch.zeros(1, 4).half()}, "is not a packet of ragkv"),
        ({"header": torch.zeros(4), "trailer": torch.zeros(4)}, "is not a packet of ragkv"),
    ],
)
def test_what_is_no_packet_is_said_in_one_sentence(tmp_path, content, message):
    path = tmp_path / "packet.safetensors"
    if isinstance(content, bytes):
        path.write_bytes(content)
    elif content is not None:
        save_file(content, path, {"format": "ragkv-packet-1", "model": "m", "sink": "prefix", "over": "standalone"})
    with pytest.raises(ConfigError, match=message) as refused:
        load_packet(str(path))
    assert "\n" not in str(refused.value)


def test_a_model_that_looks_tokens_up_is_refused_by_name(make_model, monkeypatch):
    """Gemma 4 looks up the token of an input vector, and raises if there is none."""
    model = copy.copy(make_model("llama"))
    model._companions, model._model = {}, copy.deepcopy(model._model)
    forward = model._model.model.forward

    def looking_up(*given, inputs_embeds=None, **others):
        if inputs_embeds is not None:
            table = model._model.get_input_embeddings().weight
            if not (inputs_embeds[0, :, None] == table).all(-1).any(-1).all():
                raise RuntimeError("they match no token")
        return forward(*given, inputs_embeds=inputs_embeds, **others)

    monkeypatch.setattr(model._model.model, "forward", looking_up)
    with pytest.raises(UnsupportedModelError, match=r"cannot read packets: it takes token ids alone \(they match no"):
        model.encode(CHUNKS, packet=packet_of(model))


def test_a_damaged_byte_is_another_packet_or_none(make_model, saved):
    path = saved(make_model("llama"))
    packet = load_packet(path)
    with open(path, "r+b") as file:  # noqa: PTH123
        file.seek(-1, os.SEEK_END)
        file.write(b"\x3e")
    assert load_packet(path).digest != packet.digest

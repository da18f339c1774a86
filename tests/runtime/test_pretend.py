"""The pretend device itself: it computes as the CPU does, refuses what CUDA refuses, and tells what crosses."""

from __future__ import annotations

import threading

import pretend
import pytest
import torch

MODES = pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode], ids=["no_grad", "inference_mode"])


@pytest.fixture
def there(pretend_device):
    """A small tensor on the device."""
    return torch.arange(12.0).reshape(3, 4).to(pretend_device)


@MODES
def test_it_computes_as_the_cpu_does(mode, pretend_device):
    def compute(device):
        made = torch.arange(24, device=device, dtype=torch.float32).view(2, 3, 4)
        made[:, :, 1:3] += torch.tensor([1.0, 2.0], device=device)
        turned = (made.transpose(1, 2) @ made.new_ones(2, 3, 5)).softmax(-1).contiguous()
        turned[0, 1] = torch.full((5,), 7.0, device=device)
        best, at = torch.cat([turned, turned.flip(0)], 1).max(-1)
        held = torch.zeros(2, 8, device=device)
        held[:, :8].copy_(best)
        return held.masked_fill_(at == 0, 9.0), torch.eye(3, device=device), at.tolist()

    with mode():
        expected, found = compute("cpu"), compute(pretend_device)
    assert str(found[0].device) == pretend_device
    assert torch.equal(found[0].cpu(), expected[0])
    assert torch.equal(found[1].cpu(), expected[1])
    assert found[2] == expected[2]


def test_a_tensor_made_outside_is_viewed_and_written_within_inference_mode(there):
    with torch.inference_mode():
        there[1:, :2].mul_(2.0)
    assert there[1].tolist() == [8.0, 10.0, 6.0, 7.0]


@MODES
@pytest.mark.parametrize(
    "meet",
    [
        lambda there: there + torch.ones(3, 4),
        lambda there: there @ torch.ones(4, 2),
        lambda there: torch.cat([there, torch.ones(1, 4)]),
        lambda there: torch.stack([there.sum(), torch.tensor(1.0)]),
        lambda there: there.index_select(0, torch.tensor([0])),
        lambda there: torch.where(torch.ones(3, 4, dtype=torch.bool), there, 0.0),
        lambda there: torch.ones(3, 4).add_(there),
        lambda there: torch.tensor(1.0).add_(there.sum()),
        lambda there: torch.add(there, there, out=torch.empty(3, 4)),
        lambda there: there.softmax(-1).multinomial(1, generator=torch.Generator()),
        lambda there: torch.nn.functional.embedding(torch.tensor([1]), there),
    ],
)
def test_host_and_device_do_not_mix(mode, meet, there):
    with mode(), pytest.raises(RuntimeError, match=r"Expected .*device"):
        meet(there)


def test_what_cuda_takes_from_the_host(there, pretend_device):
    with pretend.counting() as waits:
        assert (there * torch.tensor(2.0))[0, 3].item() == 6.0  # a number, passed by value
        there[there > 20] = 0.0
        there.masked_fill_(there > 20, torch.tensor(1.0))
    assert (len(waits.reads), waits.uploads) == (1, [])
    with pretend.counting() as waits:
        assert there[torch.tensor([2, 0])].shape == (2, 4)  # indices, which are copied
    assert [(crossing.op, crossing.bytes) for crossing in waits.uploads] == [("index", 16)]


@MODES
@pytest.mark.parametrize(
    ("read", "op", "size"),
    [
        (lambda there: there.sum().item(), "_local_scalar_dense", 4),
        (lambda there: int(there.argmax()), "_local_scalar_dense", 8),
        (lambda there: bool((there > 3).any()), "_local_scalar_dense", 1),
        (lambda there: there.tolist(), "_to_copy", 48),
        (lambda there: there[0].cpu(), "_to_copy", 16),
        (lambda there: torch.empty(3, 4).copy_(there), "copy_", 48),
        (lambda there: torch.equal(there, there), "equal", 1),
        (lambda there: (there > 3).nonzero(), "nonzero", 128),
        (lambda there: torch.where(there > 3), "nonzero", 128),
        (lambda there: there[there > 3], "index", 32),
        (lambda there: there.masked_select(there > 3), "masked_select", 32),
        (lambda there: there.__setitem__(there > 3, there[0, 0].expand(8)), "index_put_", 48),
        (lambda there: there.unique(), "_unique2", 48),
        (lambda there: there.repeat_interleave(there[:, 1].long(), 0), "repeat_interleave", 120),
        (lambda there: torch.multinomial(there, 1), "multinomial", 24),
    ],
)
def test_a_read_is_told_with_its_line(mode, read, op, size, there):
    with mode(), pretend.counting() as waits:
        read(there)
    assert [(crossing.op, crossing.bytes) for crossing in waits.reads] == [(op, size)]
    (one,) = waits.blocking
    assert one.place.rpartition("/")[2].startswith("test_pretend.py:")
    assert one.function.endswith("<lambda>")
    assert waits.uploads == []


@MODES
def test_uploads_and_whether_the_host_waits(mode, there, pretend_device):
    here = torch.ones(3, 4)
    with mode(), pretend.counting() as waits:
        torch.tensor([1, 2], device=pretend_device)
        here.to(pretend_device)
        there.copy_(here)
        here.to(pretend_device, non_blocking=True)
        there.copy_(here, non_blocking=True)
        torch.arange(4, device=pretend_device).repeat_interleave(torch.zeros_like(there[0]).long(), output_size=0)
        there.to(pretend_device).clone().to(torch.float64)
    assert [(crossing.bytes, crossing.blocking) for crossing in waits.uploads] == [
        (16, True),
        (48, True),
        (48, True),
        (48, False),
        (48, False),
    ]
    assert waits.reads == []
    assert [crossing.shape for crossing in waits.blocking] == [(2,), (3, 4), (3, 4)]


def test_steps_are_the_passes_of_a_module(there, pretend_device):
    layer = torch.nn.Linear(4, 2).to(pretend_device)
    with pretend.counting(layer) as waits, torch.inference_mode():
        there.sum().item()
        for _ in range(2):
            int(layer(there).sum() > 0)
        layer(there)
    layer(there).sum().item()  # no longer counted
    assert [len(step.reads) for step in waits.steps] == [1, 1, 1, 0]


def test_other_threads_are_counted(there):
    with pretend.counting() as waits:
        thread = threading.Thread(target=lambda: there.sum().item())
        thread.start()
        thread.join()
    assert len(waits.reads) == 1


def test_draws_are_those_of_the_cpu(pretend_device):
    def draw(device):
        generator = torch.Generator(device=device)
        generator.manual_seed(5)
        shares = torch.full((1, 50), 0.02).to(device)
        return [int(torch.multinomial(shares, 1, generator=generator)) for _ in range(4)]

    assert draw(pretend_device) == draw("cpu")
    assert isinstance(torch.Generator(), torch.Generator)


def test_nobody_else_notices(pretend_device):
    """Registered for good, but what asks torch for an accelerator, draws, saves or trains on the CPU is as before."""
    assert not torch.accelerator.is_available()
    assert "pretend" not in str(torch.accelerator.current_accelerator())
    torch.manual_seed(3)
    with torch.random.fork_rng():
        torch.rand(2)
    layer = torch.nn.Linear(2, 1)
    layer(torch.ones(1, 2)).sum().backward()
    torch.optim.AdamW(layer.parameters()).step()
    assert layer.weight.grad.tolist() == [[1.0, 1.0]]

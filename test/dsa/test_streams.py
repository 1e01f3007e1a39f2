"""The launch scope with a CUDA runtime that only keeps a log: what is entered, in which order, and what is left out.

What it does to real streams is in test_gpu_interface.py.
"""

from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

from cudnn_dsa.streams import launch_scope, stream_or_handle

DEVICE = torch.device("cuda", 0)


class FakeStream:
    def __init__(self, number, device=DEVICE):
        self.number = number
        self.device = device

    def __eq__(self, other):
        return self.number == other.number

    __hash__ = None


class Tensor:
    def __init__(self, log):
        self.log = log

    def record_stream(self, stream):
        self.log.append(f"record on {stream.number}")


@pytest.fixture
def cuda(monkeypatch):
    """A machine with several devices; ``current`` is (device, stream), ``log`` what was asked of the runtime."""
    fake = SimpleNamespace(current=(0, 5), log=[])

    @contextmanager
    def logged(name, value, after):
        before, fake.current = fake.current, after
        fake.log.append(f"{name} {value}")
        yield
        fake.current = before
        fake.log.append(f"leave {name} {value}")

    replacements = {
        "Stream": FakeStream,
        "current_device": lambda: fake.current[0],
        "current_stream": lambda device: FakeStream(fake.current[1]),
        "default_stream": lambda device: FakeStream(0),
        "ExternalStream": lambda handle, device: FakeStream(handle),
        "device": lambda device: logged("device", device.index, (device.index, fake.current[1])),
        "stream": lambda stream: logged("stream", stream.number, (fake.current[0], stream.number)),
    }
    for name, value in replacements.items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(torch.cuda.nvtx, "range_push", lambda name: fake.log.append(f"push {name}"))
    monkeypatch.setattr(torch.cuda.nvtx, "range_pop", lambda: fake.log.append("pop"))
    return fake


def test_on_the_ambient_stream_of_the_current_device_nothing_is_entered(cuda):
    for stream in (None, 5, FakeStream(5)):
        cuda.log.clear()
        with launch_scope("name", DEVICE, stream, [Tensor(cuda.log), None]) as got:
            assert got.number == 5
            cuda.log.append("body")
        assert cuda.log == ["push name", "body", "pop"]


def test_the_device_guard_comes_first_and_goes_last(cuda):
    cuda.current = (1, 5)
    with launch_scope("name", DEVICE, FakeStream(7), [Tensor(cuda.log), None]):
        assert cuda.current == (0, 7)
        cuda.log.append("body")
    assert cuda.log == [
        "device 0", "stream 7", "record on 7", "push name", "body", "pop", "leave stream 7", "leave device 0",
    ]  # fmt: skip
    assert cuda.current == (1, 5)


def test_another_device_is_entered_on_its_ambient_stream_too(cuda):
    cuda.current = (3, 5)
    with launch_scope("name", DEVICE, None, [Tensor(cuda.log)]):
        assert cuda.current == (0, 5)
    assert "record on 5" not in cuda.log
    assert cuda.current == (3, 5)


@pytest.mark.parametrize("kind", ["torch", "handle", "__cuda_stream__", "__int__", "null"])
def test_every_kind_of_stream_is_entered_and_recorded(cuda, kind):
    class Core:
        def __cuda_stream__(self):
            return 0, 9

    class Bindings:
        def __int__(self):
            return 9

    given = {"torch": FakeStream(9), "handle": 9, "__cuda_stream__": Core(), "__int__": Bindings(), "null": 0}[kind]
    number = 0 if kind == "null" else 9
    with launch_scope("name", DEVICE, given, [Tensor(cuda.log)] * 2) as got:
        assert got.number == number
        assert cuda.current == (0, number)
    assert cuda.log.count(f"record on {number}") == 2


def test_a_stream_of_another_device_is_refused_and_everything_undone(cuda):
    cuda.current = (1, 5)
    scope = launch_scope("name", DEVICE, FakeStream(7, torch.device("cuda", 1)), [])
    with pytest.raises(ValueError, match="stream: expected a stream of cuda:0, got one of cuda:1"):
        scope.__enter__()
    assert cuda.current == (1, 5)
    assert cuda.log == ["device 0", "leave device 0"]
    assert torch.is_grad_enabled()


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_an_error_in_the_body_leaves_nothing_behind(cuda, device, grad):
    cuda.current = (1, 5)

    def body():
        assert not torch.is_grad_enabled()
        assert not torch.is_autocast_enabled(device)
        raise KeyError("body")

    torch.set_autocast_enabled(device, True)
    try:
        with torch.set_grad_enabled(grad):
            with pytest.raises(KeyError), launch_scope("name", torch.device(device, 0), None, []):
                body()
            assert torch.is_grad_enabled() == grad
            assert torch.is_autocast_enabled(device)
    finally:
        torch.set_autocast_enabled(device, False)
    assert cuda.current == (1, 5)
    assert cuda.log.count("pop") == (device == "cuda")


def test_off_cuda_the_runtime_is_not_touched(cuda):
    with launch_scope("name", torch.device("cpu"), 7, [Tensor(cuda.log)]) as stream:
        assert stream is None
    assert cuda.log == []


@pytest.mark.parametrize("stream", ["abc", 1.0, True, [1], object()])
def test_what_is_no_stream(stream):
    with pytest.raises(TypeError, match="stream: expected a torch stream, an integer handle, a CUstream or None"):
        stream_or_handle(stream)

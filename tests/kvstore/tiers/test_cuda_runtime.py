"""What of the torch runtime can be tested without a device; the rest is in ``test_device``."""

import contextlib
from types import SimpleNamespace

import pytest
import torch

from kvstore.tiers.cuda_runtime import TorchCudaRuntime, _cpus_near


@pytest.fixture
def runtime(monkeypatch):
    streams = []

    @contextlib.contextmanager
    def stream(stream):
        streams.append(stream)
        yield

    monkeypatch.setattr(torch.cuda, "stream", stream)
    runtime = TorchCudaRuntime(torch.device("cuda:0"))
    runtime.entered = streams
    return runtime


@pytest.mark.parametrize("has_foreach", [True, False], ids=["foreach", "loop"])
def test_copies_are_submitted_to_the_given_stream(runtime, has_foreach, monkeypatch):
    if not has_foreach:
        monkeypatch.setattr(runtime, "_foreach_copy", None)
    targets, sources = [torch.zeros(3), torch.zeros(2)], [torch.ones(3), torch.full((2,), 5.0)]
    runtime.copy("a stream", targets, sources)
    assert [target.tolist() for target in targets] == [[1, 1, 1], [5, 5]]
    assert runtime.entered == ["a stream"]


def test_a_torch_without_the_private_call_copies_in_a_loop(monkeypatch):
    monkeypatch.delattr(torch, "_foreach_copy_")
    assert TorchCudaRuntime(torch.device("cuda:0"))._foreach_copy is None


def test_a_kernel_is_launched_with_its_stream_current(runtime):
    seen = []
    runtime.launch("a stream", lambda *arguments: seen.append((*runtime.entered, *arguments)), 1, 2)
    assert seen == [("a stream", 1, 2)]


def test_processors_near_a_device_are_those_the_system_names(tmp_path):
    place = tmp_path / "0000:3b:00.0"
    place.mkdir()
    (place / "local_cpulist").write_text("0-2,8,10-11\n")
    properties = SimpleNamespace(pci_domain_id=0, pci_bus_id=0x3B, pci_device_id=0)
    assert _cpus_near(properties, tmp_path) == {0, 1, 2, 8, 10, 11}
    for unknown in (SimpleNamespace(), SimpleNamespace(**{**vars(properties), "pci_bus_id": 1})):
        assert _cpus_near(unknown, tmp_path) == set()
    (place / "local_cpulist").write_text("\n")
    assert _cpus_near(properties, tmp_path) == set()

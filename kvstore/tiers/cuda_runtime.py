"""Every CUDA call of the copy path, behind one small seam.

The copier is written against ``CudaRuntime``. ``TorchCudaRuntime`` is the real one; the fake of
``kvstore.testing.cuda`` plays any order of events on a CPU.
"""

import contextlib
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

Stream = Any  # opaque: only the runtime that made one looks inside
Event = Any


class CudaRuntime(Protocol):
    """Streams, events and page-locking on one device. Any thread; only ``synchronize`` waits."""

    def current_stream(self) -> Stream:
        """The calling thread's."""

    def create_stream(self, *, is_urgent: bool) -> Stream:
        """A stream that no other work orders itself against."""

    def record(self, stream: Stream) -> Event:
        """A new event that comes to pass when all work submitted to ``stream`` so far is done."""

    def wait_event(self, stream: Stream, event: Event) -> None:
        """Work submitted to ``stream`` from now on starts after ``event``."""

    def query(self, event: Event) -> bool:
        """Whether ``event`` has come to pass. Raises RuntimeError when work before it failed."""

    def synchronize(self, stream: Stream) -> None:
        """Wait for all work submitted to ``stream``. Never on the owner's or the loop's thread
        while the store is open."""

    def copy(self, stream: Stream, targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
        """Submit copies between contiguous tensors of pairwise equal sizes, in any order.

        A side in host memory must lie in one registered piece, or in none: then the call waits for
        its copy.
        """

    def launch(self, stream: Stream, function: Callable[..., object], *arguments: object) -> None:
        """Call ``function`` with ``stream`` as the current stream."""

    def host_register(self, address: int, num_bytes: int) -> None:
        """Page-lock host memory, near the device where it has not been touched yet.

        Raises RuntimeError when the system does not allow it; nothing has changed then.
        """

    def host_unregister(self, address: int) -> None: ...


class TorchCudaRuntime:
    """The CUDA runtime as torch exposes it."""

    def __init__(self, device: torch.device) -> None:
        index = torch.cuda.current_device() if device.index is None else device.index
        self._device = torch.device("cuda", index)
        # Private in torch, so it may be gone one day: one call, and the loop over pairs is in C++.
        self._foreach_copy: Callable[..., object] | None = getattr(torch, "_foreach_copy_", None)

    def current_stream(self) -> Stream:
        return torch.cuda.current_stream(self._device)

    def create_stream(self, *, is_urgent: bool) -> Stream:
        return torch.cuda.Stream(self._device, -1 if is_urgent else 0)  # type: ignore[no-untyped-call]

    def record(self, stream: Stream) -> Event:
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(stream)
        return event

    def wait_event(self, stream: Stream, event: Event) -> None:
        stream.wait_event(event)

    def query(self, event: Event) -> bool:
        return bool(event.query())

    def synchronize(self, stream: Stream) -> None:
        stream.synchronize()

    def copy(self, stream: Stream, targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
        with torch.cuda.stream(stream):
            if self._foreach_copy is not None:
                self._foreach_copy(targets, sources, non_blocking=True)
                return
            for target, source in zip(targets, sources, strict=True):
                target.copy_(source, non_blocking=True)

    def launch(self, stream: Stream, function: Callable[..., object], *arguments: object) -> None:
        with torch.cuda.stream(stream):
            function(*arguments)

    def host_register(self, address: int, num_bytes: int) -> None:
        # On a thread that ends with the call. CUDA keeps the last error of each thread, and a
        # failed registration would be reported again by the next kernel launch of this one; and
        # only that thread moves to processors near the device.
        with ThreadPoolExecutor(1, "kv-register") as thread:
            thread.submit(self._register, address, num_bytes).result()

    def host_unregister(self, address: int) -> None:
        runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        with torch.cuda.device(self._device):
            torch.cuda.check_error(runtime.cudaHostUnregister(address))

    def _register(self, address: int, num_bytes: int) -> None:
        runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        # Registration touches the pages, which puts them into the memory of this processor's node.
        cpus = _cpus_near(torch.cuda.get_device_properties(self._device)) & os.sched_getaffinity(0)
        if cpus:
            os.sched_setaffinity(0, cpus)  # of this thread
        with torch.cuda.device(self._device):
            torch.cuda.check_error(runtime.cudaHostRegister(address, num_bytes, 0))


def _cpus_near(properties: Any, root: Path = Path("/sys/bus/pci/devices")) -> set[int]:
    """Processors of the node that a device hangs on; empty where the system does not say."""
    with contextlib.suppress(AttributeError, OSError, ValueError):
        place = f"{properties.pci_domain_id:04x}:{properties.pci_bus_id:02x}"
        name = f"{place}:{properties.pci_device_id:02x}.0"
        cpus: set[int] = set()
        for part in (root / name / "local_cpulist").read_text().strip().split(","):
            first, _, last = part.partition("-")
            cpus.update(range(int(first), int(last or first) + 1))
        return cpus
    return set()

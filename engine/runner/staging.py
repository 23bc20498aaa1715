"""A step's arrays on their way to the device, through page-locked memory that is used again.

A copy from ordinary memory makes the host wait for the device. Page-locking takes longer than such
a copy, so the memory is kept: two buffers in turn, because the device may still read the previous
step's while this one's is written. Before a buffer is written again its last copy is waited for; as
a step has been sampled since, there is nothing left to wait for.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

import numpy as np
import torch


class Event(Protocol):
    def synchronize(self) -> None: ...


class Staging:
    """For one thread and one kind of array.

    device   where the arrays go. On the CPU they stay where they are
    lock     makes a page-locked uint8 tensor of so many bytes; torch's when None
    record   makes an event of what was submitted to the device's current stream; torch's when None
    """

    def __init__(
        self,
        device: torch.device,
        *,
        lock: Callable[[int], torch.Tensor] | None = None,
        record: Callable[[], Event] | None = None,
    ) -> None:
        self._device = device
        self._is_needed = device.type == "cuda" or lock is not None
        self._lock = lock or _page_locked
        self._record = record or partial(_recorded_event, device)
        self._turns = [_Turn(), _Turn()]

    def send(self, array: np.ndarray, target: torch.Tensor | None = None) -> torch.Tensor:
        """The array on the device: in ``target``, of its shape and dtype, or in a new tensor.

        Enqueued on the current stream. On the CPU without a target the tensor is the array.
        """
        source = torch.from_numpy(array)
        if self._is_needed:
            turn = self._turns[0]
            self._turns.reverse()
            source = turn.hold(source, self._lock)
        if target is None:
            if not self._is_needed:
                return source
            target = torch.empty(source.shape, dtype=source.dtype, device=self._device)
        target.copy_(source, non_blocking=True)
        if self._is_needed:
            turn.event = self._record()
        return target


class _Turn:
    """One buffer, and the event of the copy that read it last."""

    def __init__(self) -> None:
        self.event: Event | None = None
        self._memory: torch.Tensor | None = None

    def hold(self, source: torch.Tensor, lock: Callable[[int], torch.Tensor]) -> torch.Tensor:
        if self.event is not None:
            self.event.synchronize()
        if self._memory is None or self._memory.numel() < source.nbytes:
            self._memory = lock(1 << max(12, (source.nbytes - 1).bit_length()))
        held = self._memory[: source.nbytes].view(source.dtype).view(source.shape)
        return held.copy_(source)


def _page_locked(num_bytes: int) -> torch.Tensor:
    return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)


def _recorded_event(device: torch.device) -> Any:
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record(torch.cuda.current_stream(device))
    return event

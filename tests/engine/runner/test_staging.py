import numpy as np
import torch

from engine.runner.staging import Staging

CPU = torch.device("cpu")


class Device:
    """Copies happen when the host waits for them, as late as a device may do them."""

    def __init__(self) -> None:
        self.locked: list[torch.Tensor] = []
        self.events: list[Event] = []

    def lock(self, num_bytes: int) -> torch.Tensor:
        self.locked.append(torch.zeros(num_bytes, dtype=torch.uint8))
        return self.locked[-1]

    def record(self) -> "Event":
        self.events.append(Event())
        return self.events[-1]


class Event:
    is_awaited = False

    def synchronize(self) -> None:
        self.is_awaited = True


def staging(device: Device) -> Staging:
    return Staging(CPU, lock=device.lock, record=device.record)


def test_a_buffer_is_written_again_only_after_its_last_copy_was_waited_for():
    device = Device()
    stage = staging(device)
    for step in range(6):
        stage.send(np.full(10, step))
        awaited = [event.is_awaited for event in device.events]
        assert awaited == [True] * (step - 1) + [False] * min(step + 1, 2)
    assert len(device.locked) == 2


def test_a_larger_array_gets_a_larger_buffer():
    device = Device()
    stage = staging(device)
    for size in (10, 10, 5000, 5000, 4000):
        got = stage.send(np.arange(size))
        assert torch.equal(got, torch.arange(size))
    assert len(device.locked) == 4
    assert all(event.is_awaited for event in device.events[:-2])


def test_what_was_sent_does_not_follow_the_array():
    stage, array = staging(Device()), np.zeros(3, np.int32)
    got = stage.send(array)
    array[:] = 7
    assert got.tolist() == [0, 0, 0]


def test_an_array_goes_into_the_tensor_it_is_meant_for():
    target = torch.zeros(3, dtype=torch.int32)
    for stage in (Staging(CPU), staging(Device())):
        array = np.array([3, 1, 2], np.int32)
        assert stage.send(array, target) is target
        assert target.tolist() == [3, 1, 2]


def test_on_the_cpu_the_tensor_is_the_array():
    array = np.zeros(3)
    Staging(CPU).send(array)[0] = 5
    assert array[0] == 5

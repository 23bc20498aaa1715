"""What a kernel has to do at least: operations, bytes, and the time that takes on a given GPU.

Predictions are the floor divided by the part of the peak that comparable kernels reach in published
measurements (docs/kernels.md names them); they are guesses until the GPU suite has measured them.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Device:
    """Peaks of the data sheet: dense bf16 operations per second, bytes per second of HBM.

    prefill_part, decode_part, copy_part: the part of the peak that is predicted.
    """

    flops: float
    bandwidth: float
    prefill_part: float
    decode_part: float = 0.75
    copy_part: float = 0.8


DEVICES = {
    "A100": Device(312e12, 2.04e12, prefill_part=0.55),
    "H100": Device(989e12, 3.35e12, prefill_part=0.40),
    "H200": Device(989e12, 4.8e12, prefill_part=0.40),
    "B200": Device(2250e12, 8.0e12, prefill_part=0.27),
}


@dataclass(frozen=True, slots=True)
class Work:
    """``flops`` counts a multiplication and an addition as two; ``bytes`` reads and writes."""

    flops: float
    bytes: float

    def predicted_s(self, device: Device, kind: str) -> float:
        """``kind``: prefill, decode or copy; attention is held by what takes longer of the two."""
        part = {"decode": device.decode_part, "copy": device.copy_part, "prefill": 1.0}[kind]
        products = self.flops / (device.flops * device.prefill_part)
        return max(products, self.bytes / (device.bandwidth * part))


def attention_work(
    num_seqs: int,
    num_new: int,
    prefix: int,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    itemsize: int = 2,
) -> Work:
    """Causal attention of ``num_new`` tokens of each sequence, keys and values read once."""
    seen = num_new * prefix + num_new * (num_new + 1) // 2
    keys_and_values = 2 * (prefix + num_new) * num_kv_heads * head_dim
    queries_and_results = 2 * num_new * num_heads * head_dim
    return Work(
        flops=4.0 * num_seqs * seen * num_heads * head_dim,
        bytes=float(num_seqs * (keys_and_values + queries_and_results) * itemsize),
    )


def copy_work(num_bytes: int) -> Work:
    """Read once, written once."""
    return Work(0.0, 2.0 * num_bytes)

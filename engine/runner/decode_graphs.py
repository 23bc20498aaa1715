"""Decode steps as CUDA graphs: hundreds of kernel launches of a step become one.

A graph replays fixed kernels on fixed addresses. So there is one for each of a few batch sizes
(``bucket_sizes``), and all read the same tensors, which a step fills before it replays the smallest
graph it fits in:

    header   int64, one copy a step: slots ‖ token ids ‖ positions ‖ sequence lengths (int32)
    tables   int32 [largest bucket, blocks of the longest sequence], of which only the entries that
             changed are sent: sent whole it would be 2 MB for 64 sequences of 128k tokens

and leaves float32 logits in a third. Rows beyond the batch are padding: sequence length 0, slot -1,
so attention gives zeros for them and nothing is written. Grids and splits follow the bucket and the
longest sequence there may be, never the lengths.

A graph holds what a forward of decoding does and nothing else. Prefill and mixed steps, sampling,
and waiting for promoted blocks stay outside. A model whose forward looks at values cannot be
captured (``find_obstacle``), nor can an attention library that plans on the host.
"""

import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from engine.runner.forward_context import StepMetadata
from engine.runner.staging import Staging

if TYPE_CHECKING:
    from engine.runner.model_runner import SequenceStep

logger = logging.getLogger(__name__)

# Token ids [n], positions [n] and metadata of a decode step to float32 logits [n, vocab_size].
DecodeForward = Callable[[torch.Tensor, torch.Tensor, StepMetadata], torch.Tensor]


class Graph(Protocol):
    def replay(self) -> None: ...


class GraphApi(Protocol):
    """Captures and replays on one device."""

    def capture(self, run: Callable[[], None]) -> Graph:
        """Warms ``run`` up and captures it. It must read and write the same addresses whenever it
        is called, and make the host wait for nothing."""


class TorchGraphs:
    """CUDA graphs that share one memory pool, so capture the largest first."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._memory: Any = torch.cuda.graph_pool_handle()

    def capture(self, run: Callable[[], None]) -> Graph:
        stream, current = self._stream, torch.cuda.current_stream(self._device)
        stream.wait_stream(current)
        with torch.cuda.stream(stream):
            # Compiles kernels and makes the libraries' workspaces of this stream, which would end
            # a capture; twice, as some decide at their second call.
            run()
            run()
        graph = torch.cuda.CUDAGraph()
        # Another thread may copy blocks or lock memory meanwhile: not this capture's business.
        mode = "thread_local"
        with torch.cuda.graph(graph, pool=self._memory, stream=stream, capture_error_mode=mode):
            run()
        current.wait_stream(stream)
        return graph


def bucket_sizes(max_num_seqs: int) -> tuple[int, ...]:
    """Batch sizes, ascending: powers of two, and the largest batch."""
    powers = [1 << i for i in range(max_num_seqs.bit_length()) if 1 << i < max_num_seqs]
    return (*powers, max_num_seqs)


class DecodeGraphs:
    """Captured when it is made; owned by the runner's thread.

    forward      the model, called while capturing
    buckets      batch sizes, ascending
    table_width  columns of the block tables, enough for the longest sequence
    """

    def __init__(
        self,
        forward: DecodeForward,
        api: GraphApi,
        *,
        device: torch.device,
        buckets: Sequence[int],
        block_size: int,
        table_width: int,
        vocab_size: int,
    ) -> None:
        self._forward = forward
        self._block_size = block_size
        self._largest = buckets[-1]
        # Whatever kernels read begins at a multiple of 16 bytes.
        self._capacity = capacity = -(-self._largest // 4) * 4
        self._header = torch.zeros(3 * capacity + capacity // 2, dtype=torch.int64, device=device)
        self._tables = torch.zeros(capacity, table_width, dtype=torch.int32, device=device)
        self._starts = torch.arange(capacity + 1, dtype=torch.int32, device=device)
        self._logits = torch.zeros(self._largest, vocab_size, device=device)
        # What the device has: of each row the blocks it was told.
        self._known: list[list[int]] = [[] for _ in range(capacity)]
        self._header_staging, self._delta_staging = Staging(device), Staging(device)
        self._header_staging.send(self._padding(), self._header)
        self._graphs: dict[int, Graph] = {}
        with torch.inference_mode():
            for size in sorted(buckets, reverse=True):
                self._graphs[size] = api.capture(lambda size=size: self._run(size))  # type: ignore[misc]
        logger.info("captured decode graphs sizes=%s", ",".join(map(str, buckets)))

    def takes(self, steps: "Sequence[SequenceStep]") -> bool:
        """Whether ``run`` can: every sequence decodes, and none only fills the cache."""
        return len(steps) <= self._largest and all(
            len(step.token_ids) == 1 and step.num_logits == 1 for step in steps
        )

    def run(self, steps: "Sequence[SequenceStep]") -> torch.Tensor:
        """Float32 logits [num_seqs, vocab_size], in place until the next ``run``.

        One copy to the device, two when a sequence has a new block. Does not wait for the device.
        """
        size = next(size for size in sorted(self._graphs) if size >= len(steps))
        with torch.inference_mode():
            self._send_tables(steps)
            self._header_staging.send(self._fill(steps), self._header)
            self._graphs[size].replay()
        return self._logits[: len(steps)]

    def _run(self, size: int) -> None:
        """What is captured."""
        slots, token_ids, positions, seq_lens = self._parts(self._header)
        metadata = StepMetadata(
            slot_mapping=slots[:size],
            block_tables=self._tables[:size],
            cu_seqlens_q=self._starts[: size + 1],
            seq_lens=seq_lens[:size],
            is_decode=True,
        )
        self._logits[:size].copy_(self._forward(token_ids[:size], positions[:size], metadata))

    def _parts(self, header: Any) -> tuple[Any, Any, Any, Any]:
        """Views of a header, a tensor or an array."""
        capacity = self._capacity
        slots, token_ids, positions = (header[i * capacity :][:capacity] for i in range(3))
        int32 = torch.int32 if isinstance(header, torch.Tensor) else np.int32
        return slots, token_ids, positions, header[3 * capacity :].view(int32)

    def _padding(self) -> np.ndarray:
        header = np.zeros(self._header.shape[0], np.int64)
        header[: self._capacity] = -1
        return header

    def _fill(self, steps: "Sequence[SequenceStep]") -> np.ndarray:
        header, size = self._padding(), self._block_size
        slots, token_ids, positions, seq_lens = self._parts(header)
        for row, step in enumerate(steps):
            position = step.num_prefix
            slots[row] = step.block_ids[position // size] * size + position % size
            token_ids[row] = step.token_ids[0]
            positions[row] = position
            seq_lens[row] = position + 1
        return header

    def _send_tables(self, steps: "Sequence[SequenceStep]") -> None:
        """The entries of the block tables that the device does not have yet."""
        places: list[int] = []
        blocks: list[int] = []
        columns = self._tables.shape[1]
        for row, step in enumerate(steps):
            used = list(step.block_ids[: step.num_prefix // self._block_size + 1])
            known = self._known[row]
            if used == known[: len(used)]:
                continue
            # A sequence that goes on has the old blocks and a new one; others are sent in full.
            first = len(known) if used[: len(known)] == known else 0
            places += range(row * columns + first, row * columns + len(used))
            blocks += used[first:]
            self._known[row] = used
        if places:
            delta = self._delta_staging.send(np.array([places, blocks], np.int64))
            self._tables.view(-1).index_copy_(0, delta[0], delta[1].int())


def find_obstacle(forward: DecodeForward, device: torch.device) -> str | None:
    """What in a forward of decoding makes the host wait for the device, or None.

    Runs it on tensors without values: looking at one, or a shape that depends on one, fails. So the
    attention of ``forward`` must be one that needs none.
    """
    try:
        with FakeTensorMode(allow_non_fake_inputs=True), torch.inference_mode():
            ints = torch.zeros(4, dtype=torch.int64, device=device)
            metadata = StepMetadata(
                slot_mapping=ints,
                block_tables=ints.int()[:, None],
                cu_seqlens_q=torch.zeros(5, dtype=torch.int32, device=device),
                seq_lens=ints.int(),
                is_decode=True,
            )
            forward(ints, ints, metadata)
    except Exception as error:
        return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
    return None

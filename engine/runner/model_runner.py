"""Runs one step of any number of sequences as one packed forward on the device pool.

All new tokens of all sequences form one row ``[1, num_tokens]``. Which token belongs to which
sequence, and where its K and V lie, is known to the attention function alone; everything else in a
transformer works token by token. In deterministic mode a step is several forwards, each of a fixed
shape. On CUDA a step in which every sequence decodes replays a graph (``decode_graphs``).

Does not know requests, prefixes or sampling, and does not decide which blocks are used.
"""

import logging
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from engine.runner.attention_backends import find_backend
from engine.runner.backend_choice import choose_backend
from engine.runner.cpu_threads import on_threads
from engine.runner.decode_graphs import (
    DecodeGraphs,
    GraphApi,
    TorchGraphs,
    bucket_sizes,
    find_obstacle,
)
from engine.runner.determinism import FixedShapes
from engine.runner.forward_context import (
    AttentionBackend,
    ForwardContext,
    LayerCache,
    StepMetadata,
    forward_context,
)
from engine.runner.free_cores import FreeCores
from engine.runner.staging import Staging

if TYPE_CHECKING:
    from engine.model.loader import LoadedModel

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class SequenceStep:
    """One sequence's part of a step.

    token_ids     its new tokens, at least one
    num_prefix    positions before them, whose K and V are in the pool
    block_ids     blocks of all its positions in order, those of the new tokens included
    wants_logits  whether the logits of its last token are needed
    wants_all     whether those of every token are
    """

    token_ids: Sequence[int]
    num_prefix: int
    block_ids: Sequence[int]
    wants_logits: bool
    wants_all: bool = False

    @property
    def num_logits(self) -> int:
        return len(self.token_ids) if self.wants_all else int(self.wants_logits)


# Positions of all sequences of a decode step from which on attention takes all threads of a CPU. It
# mostly copies: two cores of one memory gain nothing at any length (8 x 2,500 positions: 185 ms a
# step on one thread, 222 on two). For more of them this is a guess.
_LONG_POSITIONS = 4096

# A sequence of length 0: its token is computed and thrown away, its K and V are not stored.
_PADDING = SequenceStep((0,), -1, (), False)


class ModelRunner:
    """A model on its device pool. Not thread-safe; several runners may share one model.

    loaded             its attention must be set to ``attention.PAGED``, as the loader does
    pool               [num_blocks, num_layers, 2, block_size, num_kv_heads, head_dim], the
                       caller's, on the model's device and in its dtype
    attention_backend  as in ``engine.runner.attention_backends``
    max_num_seqs       sequences in a step at most, for which decode graphs are captured
    enforce_eager      capture none
    fixed_shapes       in deterministic mode the shapes of all forwards of ``execute``, else None
    graphs             who captures and replays; None: torch on CUDA, nobody elsewhere
    """

    def __init__(
        self,
        loaded: "LoadedModel",
        pool: torch.Tensor,
        *,
        attention_backend: str = "auto",
        max_num_seqs: int = 64,
        enforce_eager: bool = False,
        fixed_shapes: FixedShapes | None = None,
        graphs: GraphApi | None = None,
    ) -> None:
        if tuple(pool.shape[1:]) != loaded.layout.shape or pool.dtype != loaded.dtype:
            raise ValueError(
                f"pool: expected [num_blocks, {', '.join(map(str, loaded.layout.shape))}] "
                f"{loaded.dtype}, got {list(pool.shape)} {pool.dtype}"
            )
        self._loaded = loaded
        self._pool = pool
        self._attention_backend = attention_backend
        self._max_num_seqs = max_num_seqs
        self._enforce_eager = enforce_eager
        self._fixed_shapes = fixed_shapes
        self._graph_api = graphs
        self._graphs: DecodeGraphs | None = None
        # With another number of threads the bits may be others.
        adapts = pool.is_cpu and fixed_shapes is None
        self._free_cores = FreeCores(torch.get_num_threads()) if adapts else None
        self._staging = Staging(pool.device), Staging(pool.device)
        self._block_size = loaded.layout.block_size
        self._widest_table = _aligned(loaded.layout.blocks_for(loaded.max_model_len))
        layers = {
            module: LayerCache(pool[:, layer, 0], pool[:, layer, 1], window)
            for module, layer, window in zip(
                loaded.attention_modules, loaded.layer_order, loaded.windows, strict=True
            )
        }
        backend = find_backend(
            attention_backend,
            pool.device,
            loaded.layout,
            is_deterministic=fixed_shapes is not None,
        )
        self._context = ForwardContext(layers, backend)

    @property
    def has_graphs(self) -> bool:
        """Whether steps of decoding alone are replayed."""
        return self._graphs is not None

    @property
    def max_model_len(self) -> int:
        """Positions a sequence may have."""
        return self._loaded.max_model_len

    def execute(self, steps: Sequence[SequenceStep]) -> torch.Tensor:
        """Run the new tokens of all ``steps``; their K and V are in the pool afterwards.

        Returns float32 logits [number that steps want, vocab_size] in order, an inference tensor
        on the device, which the next call may overwrite. A block may be in several steps as long as
        only one writes to it. On CUDA it enqueues and waits for nothing.

        With fixed shapes a step of more than one token begins at a multiple of ``chunk_tokens``,
        has at most as many, and its block ids cover a whole chunk: what lies behind its tokens
        there is overwritten.
        """
        if self._fixed_shapes is not None:
            with self._fixed_shapes.in_force():
                return self._execute_apart(steps, self._fixed_shapes)
        if self._graphs is not None and self._graphs.takes(steps):
            return self._graphs.run(steps)
        kept: list[int] = []
        num_tokens = 0
        for step in steps:
            num_tokens += len(step.token_ids)
            kept += range(num_tokens - step.num_logits, num_tokens)
        return self._forward(steps, kept)

    def score(self, steps: Sequence[SequenceStep]) -> torch.Tensor:
        """Like ``execute``, but logits of every new token [num_tokens, vocab_size]."""
        return self._forward(steps, range(sum(len(step.token_ids) for step in steps)))

    def warm_up(self, num_tokens: int | None = None, *, is_rehearsal: bool = False) -> None:
        """A prefill of ``num_tokens`` and a decode step on blocks of its own: compiles kernels,
        loads libraries. On CUDA the attention of "auto" is chosen before, and decode graphs are
        captured after that.

        A rehearsal, which is to take the memory that a runner takes and no more time than it must,
        chooses nothing and captures the largest graph only.
        """
        is_open = self._attention_backend == "auto" and self._fixed_shapes is None
        if is_open and self._pool.is_cuda and not is_rehearsal:
            self._context.backend = choose_backend(
                self._context.backend,
                self._loaded.layout,
                self._pool,
                num_heads=self._loaded.model.config.get_text_config().num_attention_heads,
                max_model_len=self._loaded.max_model_len,
            )
        longest = num_tokens or 4 * self._block_size - 1
        if self._fixed_shapes is not None:
            longest = self._fixed_shapes.chunk_tokens
        longest = min(longest, self._loaded.max_model_len - 1)
        num_blocks = self._loaded.layout.blocks_for(longest + 1)
        if self._fixed_shapes is not None:  # the chunk is padded, and the token is behind it
            num_blocks = self._loaded.layout.blocks_for(self._fixed_shapes.chunk_tokens) + 1
        runner = ModelRunner(
            self._loaded,
            self._pool.new_zeros((num_blocks, *self._pool.shape[1:])),
            attention_backend=self._attention_backend,
            fixed_shapes=self._fixed_shapes,
        )
        runner._context.backend = self._context.backend
        table = range(num_blocks)
        runner.execute([SequenceStep([0] * longest, 0, table, True)])
        logits = runner.execute([SequenceStep([0], longest, table, True)])
        logits.argmax().item()  # waits for the device
        self._capture(is_rehearsal)

    def _capture(self, is_rehearsal: bool) -> None:
        """Decode graphs, unless they are not wanted or cannot be."""
        if self._graph_api is None and self._pool.is_cuda:
            self._graph_api = TorchGraphs(self._pool.device)
        if self._enforce_eager or self._graph_api is None:
            return
        obstacle = f"{self._context.backend.name} attention plans on the host"
        if self._context.backend.is_capturable:
            obstacle = self.find_obstacle() or ""
        if obstacle:
            logger.info("decode steps are not captured as graphs: %s", obstacle)
            return
        shapes = self._fixed_shapes
        buckets = (shapes.decode_rows,) if shapes else bucket_sizes(self._max_num_seqs)
        with shapes.in_force() if shapes else nullcontext():
            self._graphs = DecodeGraphs(
                self._forward_decode,
                self._graph_api,
                device=self._pool.device,
                buckets=buckets[-1:] if is_rehearsal else buckets,
                block_size=self._block_size,
                table_width=self._widest_table,
                vocab_size=self._loaded.vocab_size,
            )

    def find_obstacle(self) -> str | None:
        """What in the model's forward, attention apart, waits for the device; None for nothing."""
        real = self._context.backend
        self._context.backend = _NO_ATTENTION
        try:
            return find_obstacle(self._forward_decode, self._pool.device)
        finally:
            self._context.backend = real

    def _execute_apart(self, steps: Sequence[SequenceStep], shapes: FixedShapes) -> torch.Tensor:
        """Each chunk of several tokens by itself, single tokens ``decode_rows`` at a time."""
        logits: dict[int, torch.Tensor] = {}
        singles: list[int] = []
        for index, step in enumerate(steps):
            num_tokens = len(step.token_ids)
            if num_tokens == 1:
                singles.append(index)
                continue
            assert step.num_prefix % shapes.chunk_tokens == 0, "a chunk begins off the grid"
            padding = (0,) * (shapes.chunk_tokens - num_tokens)
            chunk = replace(step, token_ids=(*step.token_ids, *padding))
            last = [num_tokens - 1] if step.wants_logits else []
            logits[index] = self._forward([chunk], last)
            if step.wants_all:  # apart, or the last row would have other bits than without them
                others = self._forward([chunk], range(num_tokens - len(last)))
                logits[index] = torch.cat([others, logits[index]])
        # The width of the table decides how a GPU adds up the parts of a sequence.
        widest = self._widest_table
        for first in range(0, len(singles), shapes.decode_rows):
            group = singles[first : first + shapes.decode_rows]
            batch = [steps[index] for index in group]
            if self._graphs is not None and self._graphs.takes(batch):
                rows = self._graphs.run(batch).clone()  # which the next group's would overwrite
            else:
                batch += [_PADDING] * (shapes.decode_rows - len(group))
                rows = self._forward(batch, range(shapes.decode_rows), table_width=widest)
            logits.update((index, rows[i : i + 1]) for i, index in enumerate(group))
        wanted = [logits[index] for index, step in enumerate(steps) if step.num_logits]
        if not wanted:
            return torch.empty(0, self._loaded.vocab_size, device=self._pool.device)
        return torch.cat(wanted)

    def _forward(
        self, steps: Sequence[SequenceStep], keep: Sequence[int], table_width: int = 1
    ) -> torch.Tensor:
        token_ids, positions, kept, metadata = self._build(steps, keep, table_width)
        with (
            torch.inference_mode(),
            forward_context(self._context, metadata),
            self._threads(metadata),
        ):
            output = self._loaded.model(
                input_ids=token_ids[None],
                position_ids=positions[None],
                use_cache=False,
                logits_to_keep=kept,
            )
            logits: torch.Tensor = output.logits[0].float()
        return logits

    def _threads(self, step: StepMetadata) -> AbstractContextManager[None]:
        """Around a forward on a CPU: the threads of its operators."""
        if not self._pool.is_cpu:
            return nullcontext()
        count = self._free_cores.count() if self._free_cores else torch.get_num_threads()
        # In a decode step small operators would wait for threads more than these save them.
        return on_threads(count, is_narrow=self._loaded.is_packed and step.is_decode)

    def _forward_decode(
        self, token_ids: torch.Tensor, positions: torch.Tensor, metadata: StepMetadata
    ) -> torch.Tensor:
        """The forward of a decode step, for a capture: float32 logits of every row."""
        with torch.inference_mode(), forward_context(self._context, metadata):
            output = self._loaded.model(
                input_ids=token_ids[None], position_ids=positions[None], use_cache=False
            )
            logits: torch.Tensor = output.logits[0].float()
        return logits

    def _build(
        self, steps: Sequence[SequenceStep], keep: Sequence[int], table_width: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, StepMetadata]:
        """Tensors of a step, in two copies to the device.

            int64  slot_mapping [n] ‖ token_ids [n] ‖ positions [n] ‖ kept logits
            int32  block_tables [s, widest] ‖ seq_lens [s] ‖ cu_seqlens_q [s + 1]

        ``table_width``: least number of columns of the block tables.
        Parts that kernels read begin at multiples of 16 bytes: another alignment would be
        another binary.
        """
        num_seqs = len(steps)
        num_new = np.fromiter((len(step.token_ids) for step in steps), np.int32, num_seqs)
        prefix = np.fromiter((step.num_prefix for step in steps), np.int32, num_seqs)
        seq_lens = prefix + num_new
        num_blocks = -(-seq_lens // self._block_size)
        widest, num_tokens = max(int(num_blocks.max()), table_width), int(num_new.sum())

        lens_at = _aligned(num_seqs * widest)
        cu_at = lens_at + _aligned(num_seqs)
        small = np.zeros(cu_at + num_seqs + 1, np.int32)
        tables = small[: num_seqs * widest].reshape(num_seqs, widest)
        cu_seqlens = small[cu_at:]
        small[lens_at : lens_at + num_seqs] = seq_lens
        np.cumsum(num_new, out=cu_seqlens[1:])

        large = np.empty(3 * num_tokens + len(keep), np.int64)
        slots, token_ids, positions = large[: 3 * num_tokens].reshape(3, num_tokens)
        large[3 * num_tokens :] = keep
        for row, step in enumerate(steps):
            used = num_blocks[row]
            if len(step.block_ids) < used:  # numpy would repeat a single id without a word
                raise ValueError(f"block_ids: expected {used}, got {len(step.block_ids)}")
            tables[row, :used] = step.block_ids[:used]
            token_ids[cu_seqlens[row] : cu_seqlens[row + 1]] = step.token_ids
        # A token's position is its sequence's prefix plus its rank among the new tokens.
        positions[:] = np.arange(num_tokens) + np.repeat(prefix - cu_seqlens[:-1], num_new)
        blocks = tables[np.repeat(np.arange(num_seqs), num_new), positions // self._block_size]
        slots[:] = blocks.astype(np.int64) * self._block_size + positions % self._block_size
        slots[positions < 0] = -1
        # Padding has positions that no sequence reaches; a model may keep a table of the others.
        np.clip(positions, 0, self._loaded.max_model_len - 1, out=positions)

        ints64, ints32 = self._staging[0].send(large), self._staging[1].send(small)
        metadata = StepMetadata(
            slot_mapping=ints64[:num_tokens],
            block_tables=ints32[: num_seqs * widest].view(num_seqs, widest),
            cu_seqlens_q=ints32[cu_at:],
            seq_lens=ints32[lens_at : lens_at + num_seqs],
            is_decode=num_tokens == num_seqs,
            is_long=int(seq_lens.sum()) >= _LONG_POSITIONS and torch.get_num_threads() > 2,
        )
        rows = ints64[: 3 * num_tokens].view(3, num_tokens)
        return rows[1], rows[2], ints64[3 * num_tokens :], metadata


def _no_attention(*_: Any, out: torch.Tensor, **__: Any) -> torch.Tensor:
    return out


_NO_ATTENTION = AttentionBackend("none", lambda *_: None, _no_attention, _no_attention)


def _aligned(num_int32: int) -> int:
    return -(-num_int32 // 4) * 4

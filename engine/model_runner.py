"""Runs one step of any number of sequences as one packed forward on the device pool.

All new tokens of all sequences form one row ``[1, num_tokens]``. Which token belongs to which
sequence, and where its K and V lie, is known to the attention function alone; everything else in a
transformer works token by token. In deterministic mode a step is several forwards, each of a fixed
shape.

Does not know requests, prefixes or sampling, and does not decide which blocks are used.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import torch

from engine.attention_backends import find_backend
from engine.backend_choice import choose_backend
from engine.determinism import FixedShapes
from engine.forward_context import ForwardContext, LayerCache, StepMetadata, forward_context

if TYPE_CHECKING:
    from engine.model_loader import LoadedModel


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


# A sequence of length 0: its token is computed and thrown away, its K and V are not stored.
_PADDING = SequenceStep((0,), -1, (), False)


class ModelRunner:
    """A model on its device pool. Not thread-safe; several runners may share one model.

    loaded             its attention must be set to ``engine.attention.PAGED``, as the loader does
    pool               [num_blocks, num_layers, 2, block_size, num_kv_heads, head_dim], the
                       caller's, on the model's device and in its dtype
    attention_backend  as in ``engine.attention_backends``
    enforce_eager      has no effect yet: CUDA graphs are not captured
    fixed_shapes       in deterministic mode the shapes of all forwards of ``execute``, else None
    """

    def __init__(
        self,
        loaded: "LoadedModel",
        pool: torch.Tensor,
        *,
        attention_backend: str = "auto",
        enforce_eager: bool = False,
        fixed_shapes: FixedShapes | None = None,
    ) -> None:
        if tuple(pool.shape[1:]) != loaded.layout.shape or pool.dtype != loaded.dtype:
            raise ValueError(
                f"pool: expected [num_blocks, {', '.join(map(str, loaded.layout.shape))}] "
                f"{loaded.dtype}, got {list(pool.shape)} {pool.dtype}"
            )
        self._loaded = loaded
        self._pool = pool
        self._attention_backend = attention_backend
        self._enforce_eager = enforce_eager
        self._fixed_shapes = fixed_shapes
        self._block_size = loaded.layout.block_size
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
    def max_model_len(self) -> int:
        """Positions a sequence may have."""
        return self._loaded.max_model_len

    def execute(self, steps: Sequence[SequenceStep]) -> torch.Tensor:
        """Run the new tokens of all ``steps``; their K and V are in the pool afterwards.

        Returns float32 logits [number that steps want, vocab_size] in order, an inference tensor
        on the device. A block may be in several steps as long as only one writes to it.

        With fixed shapes a step of more than one token begins at a multiple of ``chunk_tokens``,
        has at most as many, and its block ids cover a whole chunk: what lies behind its tokens
        there is overwritten.
        """
        if self._fixed_shapes is not None:
            with self._fixed_shapes.in_force():
                return self._execute_apart(steps, self._fixed_shapes)
        kept: list[int] = []
        num_tokens = 0
        for step in steps:
            num_tokens += len(step.token_ids)
            kept += range(num_tokens - step.num_logits, num_tokens)
        return self._forward(steps, kept)

    def score(self, steps: Sequence[SequenceStep]) -> torch.Tensor:
        """Like ``execute``, but logits of every new token [num_tokens, vocab_size]."""
        return self._forward(steps, range(sum(len(step.token_ids) for step in steps)))

    def warm_up(self) -> None:
        """A prefill and a decode step on blocks of its own: compiles kernels, loads libraries.

        Before that, on CUDA, the attention of "auto" is chosen.
        """
        is_open = self._attention_backend == "auto" and self._fixed_shapes is None
        if is_open and self._pool.is_cuda:
            self._context.backend = choose_backend(
                self._context.backend,
                self._loaded.layout,
                self._pool,
                num_heads=self._loaded.model.config.get_text_config().num_attention_heads,
                max_model_len=self._loaded.max_model_len,
            )
        num_blocks, longest = 4, 4 * self._block_size - 1
        if self._fixed_shapes is not None:
            longest = self._fixed_shapes.chunk_tokens
            num_blocks = longest // self._block_size + 1
        pool = self._pool.new_zeros((num_blocks, *self._pool.shape[1:]))
        runner = ModelRunner(
            self._loaded,
            pool,
            attention_backend=self._attention_backend,
            enforce_eager=self._enforce_eager,
            fixed_shapes=self._fixed_shapes,
        )
        runner._context.backend = self._context.backend
        num_tokens = min(longest, self._loaded.max_model_len - 1)
        table = range(num_blocks)
        runner.execute([SequenceStep([0] * num_tokens, 0, table, True)])
        logits = runner.execute([SequenceStep([0], num_tokens, table, True)])
        logits.argmax().item()  # waits for the device

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
        widest = -(-self._loaded.max_model_len // self._block_size)
        for first in range(0, len(singles), shapes.decode_rows):
            group = singles[first : first + shapes.decode_rows]
            padding_rows = [_PADDING] * (shapes.decode_rows - len(group))
            batch = [*(steps[index] for index in group), *padding_rows]
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
        with torch.inference_mode(), forward_context(self._context, metadata):
            output = self._loaded.model(
                input_ids=token_ids[None],
                position_ids=positions[None],
                use_cache=False,
                logits_to_keep=kept,
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

        ints64, ints32 = self._to_device(large), self._to_device(small)
        metadata = StepMetadata(
            slot_mapping=ints64[:num_tokens],
            block_tables=ints32[: num_seqs * widest].view(num_seqs, widest),
            cu_seqlens_q=ints32[cu_at:],
            seq_lens=ints32[lens_at : lens_at + num_seqs],
            is_decode=num_tokens == num_seqs,
        )
        rows = ints64[: 3 * num_tokens].view(3, num_tokens)
        return rows[1], rows[2], ints64[3 * num_tokens :], metadata

    def _to_device(self, array: np.ndarray) -> torch.Tensor:
        tensor = torch.from_numpy(array)
        if self._pool.device.type != "cuda":
            return tensor
        # Page-locked, or the copy would make the host wait for the device. The caching allocator
        # keeps the memory until the copy has run.
        return tensor.pin_memory().to(self._pool.device, non_blocking=True)


def _aligned(num_int32: int) -> int:
    return -(-num_int32 // 4) * 4

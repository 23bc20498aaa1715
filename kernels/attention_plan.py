"""How the twins go through a batch: read once per step, used by every layer.

``block_tables``, ``cu_seqlens_q`` and ``seq_lens`` are the same for all layers of a step. Turning
them into Python numbers and into runs of adjacent blocks takes about a millisecond per hundred
sequences, so the last plans are kept and reused while the metadata is equal.

Knows nothing of keys, values or queries.
"""

import itertools
import threading
from dataclasses import dataclass

import torch
from torch import Tensor

# Decode batches sequences of similar length into one padded product; the part that may be padding.
MAX_PADDING = 0.25
# Most positions gathered for one padded decode product, padding included. Batching saves the fixed
# cost of a sequence's calls, which counts for short contexts only; long ones fit the cache better
# one by one (64 sequences of 300: 8 ms a layer against 16 one by one; 4 of 3,000: 4.7 against 2.6).
MAX_GROUP_POSITIONS = 1 << 12
# Least positions that sequences have in common for these to be gathered once for all of them.
MIN_SHARED_POSITIONS = 256
# Kept plans: a step has one per window (alternating layers) and per kind of call.
MAX_PLANS = 8


@dataclass(frozen=True, slots=True)
class Blocks:
    """The blocks that some queries see, in order of position.

    ids   int64 block ids
    runs  (first block id, index of the first block in ``ids``, number of blocks), adjacent ids
          merged; empty when so fragmented that picking block by block is cheaper
    """

    ids: Tensor
    runs: tuple[tuple[int, int, int], ...]


@dataclass(frozen=True, slots=True)
class Chunk:
    """Several query tokens of one sequence: rows ``first_row`` to ``last_row`` of q.

    origin   position of the first slot of the first block
    length   positions from the origin to the end of the sequence
    """

    first_row: int
    last_row: int
    origin: int
    length: int
    blocks: Blocks


@dataclass(frozen=True, slots=True)
class Group:
    """One query token each of several sequences, padded to the same number of blocks.

    rows         rows of q, int64 [num_seqs], ascending
    is_whole     these are all of them
    length       gathered positions per sequence
    hidden       bool [num_seqs, length]: positions that the query does not see; None for none
    hidden_rows  the same as indices into [num_seqs · length]
    blocks       the sequences' blocks, one sequence after the other
    shared       blocks that all of them see whole and before their own; None for none
    """

    rows: Tensor
    is_whole: bool
    length: int
    hidden: Tensor | None
    hidden_rows: Tensor | None
    blocks: Blocks
    shared: Blocks | None


@dataclass(frozen=True, slots=True)
class Plan:
    """``zero_rows``: rows of q that belong to a sequence of length 0."""

    chunks: tuple[Chunk, ...]
    groups: tuple[Group, ...]
    zero_rows: Tensor | None


@dataclass(frozen=True, slots=True)
class WritePlan:
    """``kept``: rows that are not padding, None for all; ``where``: their blocks, and offsets."""

    kept: Tensor | None
    where: tuple[Tensor, Tensor]


class _KeptPlans(threading.local):
    def __init__(self) -> None:
        self.by_kind: dict[object, tuple[tuple[Tensor | None, ...], Plan]] = {}
        self.write: tuple[Tensor, int, WritePlan] | None = None


_kept = _KeptPlans()


def plan_attention(
    block_tables: Tensor,
    cu_seqlens_q: Tensor | None,
    seq_lens: Tensor,
    num_new_each: int,
    block_size: int,
    window: int | None,
    *,
    may_batch: bool = True,
) -> Plan:
    """The plan of this metadata, from the previous call when the metadata is equal.

    ``cu_seqlens_q`` None means ``num_new_each`` query tokens per sequence. Without ``may_batch``
    every sequence is a product of its own shape, whatever stands beside it.

    Equal by content, not by identity: a caller may rewrite the same tensors every step (through
    numpy even, where no version counter moves), and a stale plan would be a wrong answer. Comparing
    takes a few microseconds.
    Raises ValueError when a sequence has more new tokens than tokens.
    """
    kind = (block_size, window, num_new_each if cu_seqlens_q is None else None, may_batch)
    metadata = (block_tables, cu_seqlens_q, seq_lens)
    kept = _kept.by_kind.get(kind)
    if kept is not None and all(map(_same, kept[0], metadata)):
        return kept[1]
    lengths = seq_lens.tolist()
    if cu_seqlens_q is None:
        firsts = [seq * num_new_each for seq in range(len(lengths) + 1)]
    else:
        firsts = cu_seqlens_q.tolist()
    plan = _make_plan(block_tables, firsts, lengths, block_size, window, may_batch)
    if len(_kept.by_kind) >= MAX_PLANS:
        _kept.by_kind.clear()
    _kept.by_kind[kind] = (tuple(None if t is None else t.clone() for t in metadata), plan)
    return plan


def plan_write(slot_mapping: Tensor, block_size: int) -> WritePlan:
    """Where new keys and values go, from the previous call when the slots are equal."""
    kept = _kept.write
    if kept is not None and kept[1] == block_size and _same(kept[0], slot_mapping):
        return kept[2]
    slots, rows = slot_mapping, None
    if bool((slots < 0).any()):
        rows = (slots >= 0).nonzero().squeeze(1)
        slots = slots[rows]
    plan = WritePlan(rows, (slots // block_size, slots % block_size))
    _kept.write = slot_mapping.clone(), block_size, plan
    return plan


def _same(a: Tensor | None, b: Tensor | None) -> bool:
    if a is None or b is None:
        return a is b
    return a.device == b.device and torch.equal(a, b)


@dataclass(frozen=True, slots=True)
class _Single:
    """A sequence with one query token. Fields in the order in which groups are sorted."""

    num_blocks: int  # that the query sees
    seq: int
    row: int
    origin: int
    length: int  # from the origin

    def behind(self, num_blocks: int, block_size: int) -> "_Single":
        """Without its first blocks."""
        skipped = num_blocks * block_size
        rest = (self.seq, self.row, self.origin + skipped, self.length - skipped)
        return _Single(self.num_blocks - num_blocks, *rest)


@dataclass(frozen=True, slots=True)
class _Family:
    """Sequences whose first ``num_shared`` blocks are the same."""

    members: list[_Single]
    num_shared: int


def _make_plan(
    block_tables: Tensor,
    firsts: list[int],
    lengths: list[int],
    block_size: int,
    window: int | None,
    may_batch: bool,
) -> Plan:
    device, tables = block_tables.device, block_tables.to("cpu").long()
    chunks: list[Chunk] = []
    singles: list[_Single] = []
    zero_rows: list[int] = []
    for seq, seq_len in enumerate(lengths):
        first, last = firsts[seq], firsts[seq + 1]
        num_new = last - first
        if seq_len == 0:
            zero_rows.extend(range(first, last))
            continue
        if num_new > seq_len:
            raise ValueError(
                f"seq_lens: expected at least the {num_new} new tokens of sequence {seq}, "
                f"got {seq_len}"
            )
        if num_new == 0:
            continue
        first_seen = 0 if window is None else max(0, seq_len - num_new - window + 1)
        begin, end = first_seen // block_size, -(-seq_len // block_size)
        origin = begin * block_size
        if num_new == 1:
            singles.append(_Single(end - begin, seq, first, origin, seq_len - origin))
        else:
            blocks = _make_blocks(tables[seq, begin:end], device)
            chunks.append(Chunk(first, last, origin, seq_len - origin, blocks))
    groups: list[Group] = []

    def add(members: list[_Single], shared: Blocks | None) -> None:
        groups.append(_make_group(members, tables, firsts[-1], block_size, window, device, shared))

    if may_batch and window is None:
        families, singles = _families(singles, tables, block_size)
        for family in families:
            shared = _make_blocks(tables[family.members[0].seq, : family.num_shared], device)
            own = [single.behind(family.num_shared, block_size) for single in family.members]
            for members in _group_by_length(own, block_size, most_padding=1.0):
                add(members, shared)
    for members in _group_by_length(singles, block_size) if may_batch else [[s] for s in singles]:
        add(members, None)
    rows = torch.tensor(zero_rows, device=device) if zero_rows else None
    return Plan(tuple(chunks), tuple(groups), rows)


def _make_blocks(ids: Tensor, device: torch.device) -> Blocks:
    breaks = (ids[1:] - ids[:-1] != 1).nonzero().squeeze(1) + 1
    runs: list[tuple[int, int, int]] = []
    # A copy per run costs as much as picking about eight blocks one by one.
    if len(breaks) < max(1, len(ids) // 8):
        for first, last in itertools.pairwise([0, *breaks.tolist(), len(ids)]):
            runs.append((int(ids[first]), first, last - first))
    return Blocks(ids.to(device), tuple(runs))


def _families(
    singles: list[_Single], tables: Tensor, block_size: int
) -> tuple[list[_Family], list[_Single]]:
    """Families, and those who have none: what saves the most gathering of all cuts of the tree
    that their block tables form."""
    least = MIN_SHARED_POSITIONS // block_size
    ids = tables.numpy()

    def split(members: list[_Single], depth: int) -> list[_Family]:
        """Of members that share ``depth`` blocks."""
        # The last block of a sequence is its own: nothing would be left behind the shared ones.
        most = min(single.num_blocks for single in members) - 1
        rows = ids[[single.seq for single in members], depth:most]
        is_same = (rows == rows[0]).all(axis=0)
        num_shared = most if is_same.all() else depth + int(is_same.argmin())
        children: dict[int, list[_Single]] = {}
        for single in members:
            if num_shared < single.num_blocks - 1:
                children.setdefault(int(ids[single.seq, num_shared]), []).append(single)
        parts = [each for each in children.values() if 1 < len(each) < len(members)]
        deeper = [family for part in parts for family in split(part, num_shared)]
        whole = [_Family(members, num_shared)] if num_shared >= max(1, least) else []
        return max(whole, deeper, key=_saved)

    able = [single for single in singles if single.num_blocks > least]
    families = split(able, 0) if len(able) > 1 else []
    related = {single.seq for family in families for single in family.members}
    return families, [single for single in singles if single.seq not in related]


def _saved(families: list[_Family]) -> int:
    return sum((len(family.members) - 1) * family.num_shared for family in families)


def _group_by_length(
    singles: list[_Single], block_size: int, most_padding: float = MAX_PADDING
) -> list[list[_Single]]:
    """Cut the list, sorted by length, where padding or the buffer would grow too large."""
    groups: list[list[_Single]] = []
    used = 0
    for single in sorted(singles, key=lambda single: single.num_blocks):
        padded = single.num_blocks * (len(groups[-1]) + 1) if groups else 0
        used += single.num_blocks
        too_padded = padded - used > most_padding * padded
        if not groups or too_padded or padded * block_size > MAX_GROUP_POSITIONS:
            groups.append([])
            used = single.num_blocks
        groups[-1].append(single)
    return [sorted(group, key=lambda single: single.row) for group in groups]


def _make_group(
    members: list[_Single],
    tables: Tensor,
    num_rows: int,
    block_size: int,
    window: int | None,
    device: torch.device,
    shared: Blocks | None,
) -> Group:
    width = max(single.num_blocks for single in members)
    ids = []
    for single in members:
        begin = single.origin // block_size
        seen = tables[single.seq, begin : begin + single.num_blocks]
        ids.append(torch.cat([seen, seen[-1:].expand(width - single.num_blocks)]))
    length = members[0].length if len(members) == 1 else width * block_size
    ends = torch.tensor([[single.length] for single in members])
    positions = torch.arange(length)
    hidden = positions >= ends
    if window is not None:
        hidden |= positions < ends - window
    hides = bool(hidden.any())
    return Group(
        rows=torch.tensor([single.row for single in members], device=device),
        is_whole=len(members) == num_rows,
        length=length,
        hidden=hidden.to(device) if hides else None,
        hidden_rows=hidden.flatten().nonzero()[:, 0].to(device) if hides else None,
        blocks=_make_blocks(torch.cat(ids), device),
        shared=shared,
    )

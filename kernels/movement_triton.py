"""Moving keys and values in Triton: new tokens into slots, whole blocks in and out of the pool.

``write_kernel``: grid ``(num_tokens,)``; a program copies one token's keys and values of one layer.

``move_kernel``: grid ``(num_copies, chunks of a block)``; a program copies one chunk of one block.
Where the chunk is one run in source and destination, 16 bytes at a time; what has no order at all
still works, element by element.

Operands are integers of the element's size: bits in, bits out, for any dtype. A masked load without
``other`` is stored under the same mask only.
"""

# mypy: ignore-errors
# (the language of kernels has no types that a checker knows)

import triton
import triton.language as tl


@triton.jit(do_not_specialize_on_alignment=["slot_mapping_ptr"])
def write_kernel(
    k_ptr,
    v_ptr,
    k_pool_ptr,
    v_pool_ptr,
    slot_mapping_ptr,
    stride_kt,
    stride_kh,
    stride_vt,
    stride_vh,
    stride_kpb,
    stride_kps,
    stride_kph,
    stride_vpb,
    stride_vps,
    stride_vph,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEADS: tl.constexpr,  # the next two rounded up to powers of two
    D: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_mapping_ptr + token)
    if slot < 0:  # padding
        return
    block = slot // BLOCK_SIZE
    offset = slot % BLOCK_SIZE
    head = tl.arange(0, HEADS)[:, None]
    d = tl.arange(0, D)[None, :]
    mask = (head < NUM_HEADS) & (d < HEAD_DIM)
    k = tl.load(k_ptr + token * stride_kt + head * stride_kh + d, mask=mask)
    v = tl.load(v_ptr + token * stride_vt + head * stride_vh + d, mask=mask)
    k_slot = k_pool_ptr + block * stride_kpb + offset * stride_kps
    v_slot = v_pool_ptr + block * stride_vpb + offset * stride_vps
    tl.store(k_slot + head * stride_kph + d, k, mask=mask)
    tl.store(v_slot + head * stride_vph + d, v, mask=mask)


@triton.jit(
    do_not_specialize_on_alignment=["src_ids_ptr", "dst_ids_ptr", "counts_ptr"],
)
def move_kernel(
    src_ptr,
    dst_ptr,
    src_ids_ptr,
    dst_ids_ptr,
    counts_ptr,
    num_elements,  # of a block
    sizes,  # tuples of NUM_AXES: one block's merged axes
    src_strides,
    dst_strides,
    src_stride_block,
    dst_stride_block,
    token_elements,  # of one position of one layer's keys or values
    block_size,
    NUM_AXES: tl.constexpr,
    HAS_SRC_IDS: tl.constexpr,
    HAS_DST_IDS: tl.constexpr,
    HAS_COUNTS: tl.constexpr,
    CHUNK: tl.constexpr,
):
    copy = tl.program_id(0)
    element = tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)
    mask = element < num_elements
    if HAS_COUNTS:
        count = tl.load(counts_ptr + copy)
        mask = mask & (element // token_elements % block_size < count)
    src_block = tl.load(src_ids_ptr + copy) if HAS_SRC_IDS else copy
    dst_block = tl.load(dst_ids_ptr + copy) if HAS_DST_IDS else copy
    src = src_ptr + src_block.to(tl.int64) * src_stride_block
    dst = dst_ptr + dst_block.to(tl.int64) * dst_stride_block
    if NUM_AXES == 1:
        src_offset = element.to(tl.int64) * src_strides[0]
        dst_offset = element.to(tl.int64) * dst_strides[0]
    else:
        src_offset = tl.zeros([CHUNK], dtype=tl.int64)
        dst_offset = tl.zeros([CHUNK], dtype=tl.int64)
        rest = element
        for i in tl.static_range(NUM_AXES):
            index = (rest % sizes[NUM_AXES - 1 - i]).to(tl.int64)
            rest = rest // sizes[NUM_AXES - 1 - i]
            src_offset += index * src_strides[NUM_AXES - 1 - i]
            dst_offset += index * dst_strides[NUM_AXES - 1 - i]
    tl.store(dst + dst_offset, tl.load(src + src_offset, mask=mask), mask=mask)

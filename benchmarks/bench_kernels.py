"""The attention twin on this CPU, beside torch's SDPA as transformers calls it.

    python benchmarks/bench_kernels.py [--json] [--dtype float32] [--runs 7] [--model]

The shapes are those of the demo model (SmolLM2-135M: 9 heads, 3 KV heads, head_dim 64), one layer:
a prompt of 3,000 tokens in chunks of 2,048 and 952, a question of 40 on a cached prefix of 3,000,
decoding at 3,000 alone and for 16 sequences. With ``--model`` also whole forwards of a random
model of that shape, which is the ratio that counts.

Ours and theirs take turns, so that what else the machine does hits both; each answer is checked
against float64 on sampled rows before anything is timed. The baseline repeats the KV heads as
transformers does, because that is part of what a request pays there.
"""

import copy
import time
from argparse import Namespace
from collections.abc import Callable
from typing import Any

import harness
import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.cache_write import write_kv
from kernels.paged_decode import paged_decode
from kernels.paged_prefill import paged_prefill
from kernels.roofline import attention_work

OPTIONS = {"runs": 7, "dtype": "bfloat16", "model": False}
NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE, NUM_LAYERS = 9, 3, 64, 16, 30
CASES = {  # name: (sequences, prefix, new tokens)
    "prefill 2048 on 0": (1, 0, 2048),
    "prefill 952 on 2048": (1, 2048, 952),
    "question 40 on 3000": (1, 3000, 40),
    "decode at 3000": (1, 3000, 1),
    "decode 16 at 1000": (16, 1000, 1),
}


def int32(values: Any) -> Tensor:
    return torch.as_tensor(values, dtype=torch.int32)


def timed(run: Callable[[], Any]) -> Callable[[], float]:
    def seconds() -> float:
        start = time.perf_counter()
        run()
        return time.perf_counter() - start

    return seconds


def compare(runs: int, ours: Callable[[], Any], theirs: Callable[[], Any]) -> dict[str, Any]:
    samples = harness.alternate({"ours": timed(ours), "sdpa": timed(theirs)}, runs)
    return {
        "over": "sdpa",
        "ratio": harness.paired_ratio(samples["ours"], samples["sdpa"]),
        **{f"{name}_s": harness.summarize(values) for name, values in samples.items()},
    }


def bench_attention(name: str, dtype: torch.dtype, runs: int) -> dict[str, Any]:
    num_seqs, prefix, num_new = CASES[name]
    length = prefix + num_new
    count = -(-length // BLOCK_SIZE)
    shape = (num_seqs * count, NUM_LAYERS, 2, BLOCK_SIZE, NUM_KV_HEADS, HEAD_DIM)
    pool = torch.empty(shape, dtype=dtype)  # the other layers are never touched
    pool[:, 1].normal_()
    k_pool, v_pool = pool[:, 1, 0], pool[:, 1, 1]
    # A pool in use for a while: runs of eight blocks, in no order.
    pieces = torch.arange(num_seqs * count).split(8)
    order = torch.randperm(len(pieces)).tolist()
    tables = int32(torch.cat([pieces[i] for i in order]).view(num_seqs, count))
    lens = int32([length] * num_seqs)
    cu = int32([i * num_new for i in range(num_seqs + 1)])
    q = torch.randn(num_seqs * num_new, NUM_HEADS, HEAD_DIM, dtype=dtype)

    def ours() -> Tensor:
        if num_new == 1:
            return paged_decode(q, k_pool, v_pool, tables, lens)
        return paged_prefill(q, k_pool, v_pool, tables, cu, lens)

    keys, values = (
        pool[tables.long()].flatten(1, 2)[:, :length].transpose(1, 2) for pool in (k_pool, v_pool)
    )
    queries = q.view(num_seqs, num_new, NUM_HEADS, HEAD_DIM).transpose(1, 2)
    mask = torch.ones(num_new, length, dtype=torch.bool).tril(prefix)
    masked = prefix > 0 and num_new > 1
    group = NUM_HEADS // NUM_KV_HEADS

    def theirs() -> Tensor:
        return F.scaled_dot_product_attention(
            queries,
            keys.repeat_interleave(group, 1),
            values.repeat_interleave(group, 1),
            attn_mask=mask if masked else None,
            is_causal=not masked and num_new > 1,
        )

    rows = torch.randperm(num_new)[:32]
    expected = F.scaled_dot_product_attention(
        queries[:, :, rows].double(),
        keys.repeat_interleave(group, 1).double(),
        values.repeat_interleave(group, 1).double(),
        attn_mask=mask[rows],
    ).transpose(1, 2)
    errors = [
        (answer[:, rows].double() - expected).abs().max().item()
        for answer in (
            ours().view(num_seqs, num_new, NUM_HEADS, HEAD_DIM),
            theirs().transpose(1, 2),
        )
    ]
    bound = 1e-5 if dtype == torch.float32 else 2e-2
    assert errors[0] < bound, f"{name}: error {errors[0]:.1e} exceeds {bound}"
    work = attention_work(num_seqs, num_new, prefix, NUM_HEADS, NUM_KV_HEADS, HEAD_DIM)
    # What takes a millisecond or two is decided by the scheduler, once in a while.
    row = compare(runs if num_new > 100 else 5 * runs, ours, theirs)
    return {
        "case": name,
        "dtype": str(dtype).removeprefix("torch."),
        **row,
        # 4 operations per seen key, head and element of head_dim
        "gflops_per_s": work.flops / row["ours_s"]["median"] / 1e9,
        "error_ours": errors[0],
        "error_sdpa": errors[1],
    }


def bench_model(dtype: torch.dtype, runs: int) -> list[dict[str, Any]]:
    """Whole forwards of a random model of the demo model's shape, ours paged and theirs SDPA."""
    from transformers import AttentionInterface, DynamicCache, LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=NUM_LAYERS,
        num_attention_heads=NUM_HEADS,
        num_key_value_heads=NUM_KV_HEADS,
        head_dim=HEAD_DIM,
        vocab_size=49152,
        max_position_embeddings=8192,
        tie_word_embeddings=True,
    )
    model = LlamaForCausalLM(config).to(dtype).eval()
    pool = torch.empty(256, NUM_LAYERS, 2, BLOCK_SIZE, NUM_KV_HEADS, HEAD_DIM, dtype=dtype)
    table = int32(torch.arange(10, 210))[None]
    step: dict[str, Tensor] = {}

    def paged(
        module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Any, **kwargs: Any
    ) -> tuple[Tensor, None]:
        pools = pool[:, module.layer_idx, 0], pool[:, module.layer_idx, 1]
        write_kv(k[0].transpose(0, 1), v[0].transpose(0, 1), *pools, step["slots"])
        q = q[0].transpose(0, 1)
        if q.shape[0] == 1:
            return paged_decode(q, *pools, table, step["lens"])[None], None
        return paged_prefill(q, *pools, table, step["cu"], step["lens"])[None], None

    AttentionInterface.register("bench_paged", paged)
    tokens = torch.randint(0, 49152, (1, 3100))

    def ours(first: int, last: int) -> Tensor:
        model.set_attn_implementation("bench_paged")
        position = torch.arange(first, last)
        slots = table[0].long()[position // BLOCK_SIZE] * BLOCK_SIZE + position % BLOCK_SIZE
        step.update(slots=slots, cu=int32([0, last - first]), lens=int32([last]))
        return model(
            tokens[:, first:last], position_ids=position[None], use_cache=False, logits_to_keep=1
        ).logits

    def theirs(first: int, last: int, cache: Any) -> Tensor:
        model.set_attn_implementation("sdpa")
        return model(tokens[:, first:last], cache=cache, use_cache=True, logits_to_keep=1).logits

    def chunked() -> Tensor:
        ours(0, 2048)
        return ours(2048, 3000)

    cache = DynamicCache(config=config)
    difference = (chunked() - theirs(0, 3000, cache)).abs().max().item()
    assert difference < (1e-3 if dtype == torch.float32 else 0.2), f"logits differ by {difference}"
    at = iter(range(3000, 3100))
    rows = {
        "model prefill 3000": compare(
            runs, chunked, lambda: theirs(0, 3000, DynamicCache(config=config))
        ),
        "model decode at 3000": compare(
            20, lambda: ours(3000, 3001), lambda: theirs(i := next(at), i + 1, cache)
        ),
        "model question 40 on 3000": compare(
            runs, lambda: ours(3000, 3040), lambda: theirs(3000, 3040, copy.deepcopy(cache))
        ),
    }
    dtype_name = str(dtype).removeprefix("torch.")
    return [{"case": name, "dtype": dtype_name, **row} for name, row in rows.items()]


def measure(arguments: Namespace) -> list[harness.Record]:
    torch.manual_seed(0)
    dtype = getattr(torch, arguments.dtype)
    with torch.inference_mode():
        records = [bench_attention(name, dtype, arguments.runs) for name in CASES]
        if arguments.model:
            records += bench_model(dtype, arguments.runs)
    return records


if __name__ == "__main__":
    harness.main(__doc__, measure, OPTIONS)

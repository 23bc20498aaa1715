"""Everything that only a GPU can tell, in one command of under five minutes.

    python benchmarks/gpu_suite.py                on a CUDA device
    python benchmarks/gpu_suite.py --toy          here, interpreted, at toy sizes: the harness only

correctness  every kernel and dtype on the device: attention against its torch twin in float64,
             movement bit for bit
attention    prefill and decode beside torch's SDPA and what attention library can be imported; the
             same kernel over block-major and layer-major strides, and with blocks of a whole tile
copies       host to device and back by fragment size, gathers and scatters in device memory
decode       a random model of 1B shape through the engine: decode steps with and without graphs,
             deterministic, with attention "auto"
ttft         the same model: cold, device, host, disk

Each row stands beside its prediction (``kernels/roofline.py``, docs/kernels.md) and its accept
line. Writes ``benchmarks/results/gpu_suite-<device>.json`` and ``.md``; exit status 1 if a row
fails.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import harness
import torch
import torch.nn.functional as F
from torch import Tensor

from kernels import reference
from kernels.block_copy import copy_blocks, gather_blocks, scatter_blocks
from kernels.cache_write import write_kv
from kernels.paged_decode import paged_decode
from kernels.paged_prefill import paged_prefill
from kernels.roofline import DEVICES, Device, attention_work, copy_work

IS_TOY = "--toy" in sys.argv
if IS_TOY:
    os.environ["TRITON_INTERPRET"] = "1"  # nothing above imports triton, which reads it
DEVICE = torch.device("cpu" if IS_TOY else "cuda")
RESULTS = Path(__file__).parent / "results"
ACCEPTED_ERROR = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
Row = dict[str, Any]


def row(
    section: str,
    case: str,
    value: float | None,
    unit: str,
    predicted: str = "",
    accept: tuple[str, bool] | None = None,
) -> Row:
    """``accept``: the line in words, and whether the value meets it. Toy times prove nothing."""
    words, is_met = accept or ("", True)
    judged = accept is not None and not (IS_TOY and section != "correctness")
    return {
        "section": section,
        "case": case,
        "value": value,
        "unit": unit,
        "predicted": predicted,
        "accept": words,
        "ok": is_met if judged else None,
    }


def seconds(run: Callable[[], Any]) -> float:
    """Median time of one call, with the caches of the device flushed between calls."""
    if IS_TOY:
        start = time.perf_counter()
        run()
        return time.perf_counter() - start
    from triton.testing import do_bench

    return do_bench(run, warmup=20, rep=80, return_mode="median") / 1e3


def this_device() -> tuple[str, Device]:
    """The data-sheet entry of this GPU; an unknown one is held to the H200's predictions."""
    name = "toy" if IS_TOY else torch.cuda.get_device_name()
    known = next((entry for entry in DEVICES if entry in name), "H200")
    return name, DEVICES[known]


class Problem:
    """One attention problem on the device: every sequence of one length, blocks in random order."""

    def __init__(
        self,
        num_seqs: int,
        prefix: int,
        num_new: int,
        *,
        num_heads: int = 32,
        num_kv_heads: int = 8,
        head_dim: int = 128,
        block_size: int = 16,
        dtype: torch.dtype = torch.bfloat16,
        layer_major: bool = False,
        shuffled: bool = True,
        **options: Any,
    ) -> None:
        length = prefix + num_new
        count = -(-length // block_size)
        num_layers = 2
        shape = [num_seqs * count, num_layers, 2, block_size, num_kv_heads, head_dim]
        if layer_major:
            shape[0], shape[1] = shape[1], shape[0]
        pool = torch.randn(shape, dtype=torch.float32, device=DEVICE).to(dtype)
        if layer_major:
            pool = pool.transpose(0, 1)
        ids = torch.randperm(shape[0] if not layer_major else shape[1])
        if not shuffled:
            ids = ids.sort().values
        self.k_pool, self.v_pool = pool[:, 1, 0], pool[:, 1, 1]
        self.q = torch.randn(num_seqs * num_new, num_heads, head_dim, device=DEVICE).to(dtype)
        self.tables = ids.int().view(num_seqs, count).to(DEVICE)
        starts = torch.arange(num_seqs + 1, dtype=torch.int32) * num_new
        self.cu = starts.to(DEVICE)
        self.lens = torch.full((num_seqs,), length, dtype=torch.int32, device=DEVICE)
        self.sizes = (num_seqs, prefix, num_new)
        self.options = options
        self.work = attention_work(
            num_seqs, num_new, prefix, num_heads, num_kv_heads, head_dim, q_itemsize(dtype)
        )

    def run(self) -> Tensor:
        pools = (self.k_pool, self.v_pool, self.tables)
        if self.sizes[2] == 1:
            return paged_decode(self.q, *pools, self.lens, **self.options)
        return paged_prefill(self.q, *pools, self.cu, self.lens, **self.options)

    def error(self) -> float:
        """Largest difference to the twin in float64."""
        exact = [tensor.double() for tensor in (self.q, self.k_pool, self.v_pool)]
        options = {"window": None, "softcap": None, "sinks": None} | self.options
        expected = reference.attend(
            *exact,
            self.tables,
            self.cu,
            self.lens,
            self.q.shape[-1] ** -0.5,
            *options.values(),
            None,
            torch.empty_like(exact[0]),
        )
        return float((self.run().double() - expected).abs().max())

    def dense(self) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys, values as ``[num_seqs, heads, positions, head_dim]``, gathered before."""
        num_seqs, prefix, num_new = self.sizes
        length = prefix + num_new
        keys, values = (
            pool[self.tables.long()].flatten(1, 2)[:, :length].transpose(1, 2).contiguous()
            for pool in (self.k_pool, self.v_pool)
        )
        return self.q.unflatten(0, (num_seqs, num_new)).transpose(1, 2), keys, values


def q_itemsize(dtype: torch.dtype) -> int:
    return torch.empty(0, dtype=dtype).element_size()


def correctness() -> Iterator[Row]:
    dtypes = (torch.float16,) if IS_TOY else tuple(ACCEPTED_ERROR)
    small = {"num_heads": 6, "num_kv_heads": 2}
    sinks = torch.randn(6, device=DEVICE)
    cases: dict[str, tuple[tuple[int, int, int], dict[str, Any]]] = {
        f"prefill head_dim {dim}": ((2, 131, 70), {"head_dim": dim})
        for dim in ((64, 80) if IS_TOY else (64, 80, 96, 128, 192, 256))
    }
    cases |= {
        "prefill window softcap sinks": (
            (2, 131, 70),
            {"window": 50, "softcap": 20.0, "sinks": sinks},
        ),
        "prefill blocks of 64": ((2, 131, 70), {"block_size": 64}),
        "question on a long prefix": ((1, 1200 if IS_TOY else 9000, 5), {"head_dim": 64}),
        "decode": ((5, 700, 1), {}),
        "decode window sinks": ((3, 700, 1), {"window": 300, "sinks": sinks}),
    }
    for dtype in dtypes:
        bound = ACCEPTED_ERROR[dtype]
        name = str(dtype).removeprefix("torch.")
        for case, (sizes, options) in cases.items():
            error = Problem(*sizes, dtype=dtype, **small, **options).error()
            accept = (f"<= {bound:g}", error <= bound)
            yield row("correctness", f"{case}, {name}", error, "largest error", "", accept)
        is_same = movement_is_exact(dtype)
        accept = ("bits equal", is_same)
        yield row("correctness", f"write, gather, scatter, copy, {name}", None, "", "", accept)


def movement_is_exact(dtype: torch.dtype) -> bool:
    pools = [torch.randn(9, 3, 2, 16, 2, 64).to(dtype).to(DEVICE)]
    pools.append(pools[0].clone())
    ids = torch.tensor([7, 2, 5], dtype=torch.int32, device=DEVICE)
    others = torch.tensor([0, 1, 3], dtype=torch.int32, device=DEVICE)
    counts = torch.tensor([16, 0, 9], dtype=torch.int32, device=DEVICE)
    k, v = torch.randn(2, 3, 2, 64, device=DEVICE).to(dtype)
    slots = torch.tensor([3, -1, 140], device=DEVICE)
    staged = gather_blocks(pools[0], ids)
    if not torch.equal(staged, pools[0][ids.long()]):
        return False
    scatter_blocks(staged, pools[0], others)
    copy_blocks(pools[0], ids[:2], others[1:], 7)
    copy_blocks(pools[0], others, ids, counts)
    write_kv(k, v, pools[0][:, 1, 0], pools[0][:, 1, 1], slots)
    reference.scatter_blocks(staged, pools[1], others)
    reference.copy_blocks(pools[1], ids[:2], others[1:], 7)
    reference.copy_blocks(pools[1], others, ids, counts)
    reference.write_kv(k, v, pools[1][:, 1, 0], pools[1][:, 1, 1], slots)
    return torch.equal(pools[0], pools[1])


def attention(device: Device) -> Iterator[Row]:
    prefills = {"prefill 2048 on 30720": (1, 30720, 2048), "prefill 8192": (1, 0, 8192)}
    decodes = {"decode 16 at 4096": (16, 4095, 1), "decode 1 at 30720": (1, 30719, 1)}
    questions = {"question 64 on 30720": (1, 30720, 64)}
    if IS_TOY:
        prefills = {"prefill 20 on 100": (1, 100, 20)}
        decodes = {"decode 2 at 130": (2, 129, 1)}
        questions = {"question 4 on 600": (1, 600, 4)}
    small: dict[str, Any] = {"num_heads": 2, "num_kv_heads": 1, "head_dim": 64}
    shape = small | {"dtype": torch.float16} if IS_TOY else {}
    for case, sizes in (prefills | questions | decodes).items():
        problem = Problem(*sizes, **shape)
        kind = "decode" if sizes[2] == 1 else "prefill"
        ours = seconds(problem.run)
        predicted = problem.work.predicted_s(device, kind)
        if kind == "decode":
            bandwidth = problem.work.bytes / ours / 1e9
            share = bandwidth * 1e9 / device.bandwidth
            accept = (">= 0.6 of HBM peak", share >= 0.6) if sizes[0] > 1 else None
            goal = f"{problem.work.bytes / predicted / 1e9:.0f}"
            yield row("attention", case, bandwidth, "GB/s", goal, accept)
        else:
            rate = problem.work.flops / ours / 1e12
            goal = f"{problem.work.flops / predicted / 1e12:.0f}"
            yield row("attention", case, rate, "TFLOP/s", goal)
        yield from against_others(case, problem, ours)
    sizes = next(iter(prefills.values()))
    base = seconds(Problem(*sizes, **shape).run)
    for case, options, line in (
        ("over layer-major strides", {"layer_major": True}, 1.03),
        ("over an identity table", {"shuffled": False}, 1.15),
        ("over blocks of a whole tile", {"block_size": 64}, None),
    ):
        ratio = base / seconds(Problem(*sizes, **shape | options).run)
        accept = (f"<= {line}", ratio <= line) if line else None
        yield row("attention", f"prefill {case}", ratio, "time ratio", "1.00 to 1.08", accept)


def against_others(case: str, problem: Problem, ours: float) -> Iterator[Row]:
    """Time of the others over ours, on keys and values that lie dense already."""
    _, prefix, num_new = problem.sizes
    q, k, v = problem.dense()
    if prefix == 0:
        options: dict[str, Any] = {"is_causal": True}
    elif num_new == 1:
        options = {}
    else:
        from torch.nn.attention.bias import causal_lower_right

        options = {"attn_mask": causal_lower_right(num_new, prefix + num_new)}
    sdpa = seconds(lambda: F.scaled_dot_product_attention(q, k, v, enable_gqa=True, **options))
    accept = (">= 0.9", sdpa / ours >= 0.9) if num_new > 1 else None
    yield row("attention", f"{case}: SDPA's time over ours", sdpa / ours, "ratio", "", accept)
    try:
        from flash_attn import flash_attn_with_kvcache
    except ImportError:
        return
    dense = [tensor.transpose(1, 2).contiguous() for tensor in (q, k, v)]
    flash = seconds(lambda: flash_attn_with_kvcache(*dense, causal=True))
    line = 0.45 if num_new > 1 else 0.6
    accept = (f">= {line}", flash / ours >= line)
    yield row(
        "attention", f"{case}: flash-attn's time over ours", flash / ours, "ratio", "", accept
    )


def copies(device: Device) -> Iterator[Row]:
    """Fragments between page-locked memory and the device; blocks inside the device."""
    total = (1 << 16) if IS_TOY else (512 << 20)
    host = torch.empty(total, dtype=torch.uint8, pin_memory=not IS_TOY)
    near = torch.empty(total, dtype=torch.uint8, device=DEVICE)
    whole: dict[str, float] = {}
    for direction, source, target in (("H2D", host, near), ("D2H", near, host)):
        rate = total / stream_seconds(lambda s=source, t=target: t.copy_(s, True)) / 1e9
        whole[direction] = rate
        accept = (">= 48, else report the host's link", rate >= 48)
        yield row("copies", f"{direction} one memcpy", rate, "GB/s", "50 to 56", accept)
    lines = {2 << 20: 0.95, 512 << 10: 0.85, 256 << 10: 0.7, 64 << 10: None, 16 << 10: None}
    for size, line in lines.items():
        size = size >> 7 if IS_TOY else size
        # Small fragments cost time, not bytes: fewer of them tell the same.
        count = min(total // size, 4096)
        order = torch.randperm(total // size)[:count].tolist()
        pieces = {"host": host.view(-1, size), "device": near.view(-1, size)}
        for direction, source, target in (("H2D", "host", "device"), ("D2H", "device", "host")):
            sources = [pieces[source][i] for i in order]
            targets = [pieces[target][i] for i in order]
            run = stream_seconds(
                lambda s=sources, t=targets: torch._foreach_copy_(t, s, non_blocking=True)
            )
            rate = count * size / run / 1e9
            share = rate / whole[direction]
            accept = (f">= {line} of the memcpy", share >= line) if line else None
            yield row(
                "copies", f"{direction} fragments of {size / 1024:g} KiB", rate, "GB/s", "", accept
            )
    block_shape = (4, 2, 16, 2, 16) if IS_TOY else (32, 2, 16, 8, 128)
    count = 8 if IS_TOY else 256
    pool = torch.randn(2 * count, *block_shape, device=DEVICE).half()
    ids = torch.randperm(2 * count)[:count].int().to(DEVICE)
    out = torch.empty(count, *block_shape, dtype=torch.float16, device=DEVICE)
    work = copy_work(out.numel() * 2)
    for case, call in (
        ("gather_blocks", lambda: gather_blocks(pool, ids, out)),
        ("scatter_blocks", lambda: scatter_blocks(out, pool, ids)),
    ):
        rate = work.bytes / seconds(call) / 1e9
        predicted = f"{work.bytes / work.predicted_s(device, 'copy') / 1e9:.0f}"
        accept = (">= 0.75 of HBM peak", rate * 1e9 >= 0.75 * device.bandwidth)
        yield row("copies", case, rate, "GB/s read and written", predicted, accept)


def stream_seconds(run: Callable[[], Any]) -> float:
    """Median of five, by events on the device's own clock."""
    if IS_TOY:
        return max(seconds(run), 1e-9)
    times = []
    for _ in range(6):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1e3)
    return statistics.median(times[1:])


def save_random_model(directory: str) -> int:
    """Of Llama-3.2-1B's shape, few tokens; returns the bytes of one position's keys and values."""
    from transformers import LlamaConfig, LlamaForCausalLM

    shape = {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16}
    heads = {"num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 64}
    if IS_TOY:
        shape = {"hidden_size": 128, "intermediate_size": 128, "num_hidden_layers": 2}
        heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 64}
    config = LlamaConfig(
        **shape,
        **heads,
        vocab_size=1000,
        max_position_embeddings=16384,
        initializer_range=0.1,
        tie_word_embeddings=True,
    )
    with torch.device(DEVICE):
        model = LlamaForCausalLM(config).to(torch.float32 if IS_TOY else torch.bfloat16)
    model.save_pretrained(directory)
    itemsize = 4 if IS_TOY else 2
    return shape["num_hidden_layers"] * 2 * heads["num_key_value_heads"] * 64 * itemsize


def random_prompts(count: int, length: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(0)
    prompts: list[list[int]] = torch.randint(5, 1000, (count, length), generator=generator).tolist()
    return prompts


def decoding() -> Iterator[Row]:
    """Decode steps with and without graphs; the same bits in deterministic mode, cold and cached;
    the attention that "auto" chooses."""
    from engine import LLM, SamplingParams

    batch, length, count = (2, 20, 2) if IS_TOY else (16, 500, 64)
    prompts = random_prompts(batch, length)
    settings: dict[str, Any] = {"skip_tokenizer_init": True, "load_policy": "always"}
    settings |= {"max_model_len": 64 if IS_TOY else 8192, "max_num_seqs": 4 if IS_TOY else 64}
    settings |= {"device_cache": "1MiB" if IS_TOY else "8GiB", "host_cache": 0}
    params = SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True, logprobs=1)

    def answers(llm: LLM, num_seqs: int, settings: SamplingParams = params) -> list[Any]:
        outputs = llm.generate(prompts[:num_seqs], settings, use_tqdm=False)
        return [output.outputs[0] for output in outputs]

    def step_seconds(llm: LLM, num_seqs: int) -> float:
        few = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
        many = SamplingParams(temperature=0.0, max_tokens=1 + count, ignore_eos=True)
        times = []
        # The first round reads the prompts and warms up.
        for each in (few, many) * (1 if IS_TOY else 2):
            start = time.perf_counter()
            answers(llm, num_seqs, each)
            times.append(time.perf_counter() - start)
        return max(times[-1] - times[-2], 1e-9) / count

    with tempfile.TemporaryDirectory() as directory:
        save_random_model(directory)
        steps: dict[str, dict[int, float]] = {}
        tokens: dict[str, list[list[int]]] = {}
        for kind in ("eager", "graphs"):
            start = time.perf_counter()
            with LLM(directory, enforce_eager=kind == "eager", **settings) as llm:
                yield row("decode", f"{kind}: start", time.perf_counter() - start, "s")
                has_graphs = llm._core.runner.has_graphs
                expected = kind == "graphs" and not IS_TOY
                accept = (f"captured: {expected}", has_graphs == expected)
                yield row("decode", f"{kind}: graphs captured", float(has_graphs), "", "", accept)
                steps[kind] = {each: step_seconds(llm, each) for each in (1, batch)}
                tokens[kind] = [answer.token_ids for answer in answers(llm, batch)]
            for each, took in steps[kind].items():
                yield row("decode", f"{kind}: step of {each}", 1e3 * took, "ms")
        same = sum(a == b for a, b in zip(tokens["eager"], tokens["graphs"], strict=True))
        accept = ("all, but for ties", same >= 0.75 * batch)
        yield row("decode", "graphs: answers as eager ones", same / batch, "share", "1", accept)
        for each, line in ((1, 1.5), (batch, 1.2)):
            gain = steps["eager"][each] / steps["graphs"][each]
            accept = (f">= {line}", gain >= line)
            yield row("decode", f"eager step of {each} over graph", gain, "ratio", "2 to 4", accept)

        more = {"max_num_batched_tokens": 4096, "max_model_len": 256 if IS_TOY else 8192}
        with LLM(directory, deterministic=True, **settings | more) as llm:
            several = 1 if IS_TOY else batch  # a chunk takes seconds to interpret
            runs = [answers(llm, count) for count in (several, several, 1)]
        cold, warm, alone = ([bits(answer) for answer in run] for run in runs)
        accept = ("bits equal", cold == warm and alone == cold[:1])
        yield row("decode", "deterministic: cold, cached, alone", None, "", "", accept)
        if IS_TOY:  # "auto" is what has run above: nothing to choose from without a device
            return
        with LLM(directory, attention_backend="auto", **settings) as llm:
            name = llm._core.runner._context.backend.name
            auto = [answer.token_ids[0] for answer in answers(llm, batch)]
        same = sum(a == b[0] for a, b in zip(auto, tokens["eager"], strict=True))
        accept = ("all, but for ties", same >= 0.75 * batch)
        yield row("decode", f"auto attention: {name}", same / batch, "share", "1", accept)


def bits(answer: Any) -> list[tuple[int, float]]:
    """Tokens and their log-probabilities, which differ when any bit of the logits does."""
    chosen = zip(answer.token_ids, answer.logprobs, strict=True)
    return [(token, step[token].logprob) for token, step in chosen]


def ttft() -> Iterator[Row]:
    """A random model of Llama-3.2-1B's shape; a prefix of 8,192 tokens, then one question each."""
    from engine import LLM, SamplingParams

    length = 100 if IS_TOY else 8192
    params = SamplingParams(temperature=0.0, max_tokens=1)
    prefix, other = random_prompts(2, length)
    with tempfile.TemporaryDirectory() as directory:
        token_bytes = save_random_model(directory)
        with LLM(
            directory,
            skip_tokenizer_init=True,
            disk_cache=f"{directory}/cache",
            load_policy="always",
            max_model_len=length + 64,
            # Room for one prompt and a bit: two others push all of it into host memory.
            device_cache=(length + 96) * token_bytes,
            host_cache=4 * length * token_bytes,
        ) as llm:

            def ask(prompt: list[int]) -> tuple[float, dict[str, int], list[int]]:
                prompts = [{"prompt_token_ids": [*prompt, 7, 8, 9]}]
                answer = llm.generate(prompts, params, use_tqdm=False)[0]
                metrics = answer.metrics
                return metrics.ttft_s, metrics.cached_tokens, list(answer.outputs[0].token_ids)

            def reset_memory() -> None:
                llm.flush()
                llm.reset_prefix_cache("device")
                llm.reset_prefix_cache("host")

            cold, _, expected = ask(prefix)
            yield row("ttft", "cold", cold, "s")
            make_way = {
                "device": lambda: None,
                "host": lambda: (ask(other), ask(other[::-1])),
                "disk": reset_memory,
            }
            for tier, prepare in make_way.items():
                prepare()
                took, found, tokens = ask(prefix)
                is_right = found[tier] > 0.8 * length and tokens == expected
                assert is_right, f"{tier}: served from {found}, tokens {tokens} for {expected}"
                accept = ("<= 0.25 of cold", took <= 0.25 * cold)
                yield row("ttft", tier, took, "s", f"{0.15 * cold:.4f}", accept)


def as_table(rows: list[Row], machine: dict[str, Any]) -> str:
    lines = ["| section | case | measured | predicted | accept | |", "|---|---|---|---|---|---|"]
    for one in rows:
        value = "" if one["value"] is None else f"{one['value']:.4g} {one['unit']}"
        verdict = {True: "ok", False: "**fails**", None: ""}[one["ok"]]
        cells = (one["section"], one["case"], value, one["predicted"], one["accept"], verdict)
        lines.append(f"| {' | '.join(cells)} |")
    about = ", ".join(f"{key} {value}" for key, value in machine.items())
    return "\n".join([f"GPU suite on {machine['device']} ({about})", "", *lines, ""])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--toy", action="store_true", help="interpreted, at toy sizes, on the CPU")
    parser.add_argument("--json", action="store_true", help="the object on stdout")
    parser.add_argument("--out", type=Path, default=RESULTS, help=f"folder, default {RESULTS.name}")
    parser.add_argument(
        "--only", choices=("correctness", "attention", "copies", "decode", "ttft"), action="append"
    )
    arguments = parser.parse_args()
    if not IS_TOY and not torch.cuda.is_available():
        parser.error("no CUDA device; --toy runs the harness without one")
    torch.manual_seed(0)
    name, device = this_device()
    sections = {
        "correctness": correctness,
        "attention": lambda: attention(device),
        "copies": lambda: copies(device),
        "decode": decoding,
        "ttft": ttft,
    }
    rows: list[Row] = []
    took: dict[str, float] = {}
    for section, run in sections.items():
        if arguments.only and section not in arguments.only:
            continue
        start = time.perf_counter()
        try:
            rows += run()
        except Exception as error:  # one broken section must not cost the others their minutes
            accept = ("runs", False)
            rows.append(row(section, f"{type(error).__name__}: {error}", None, "", "", accept))
            rows[-1]["ok"] = False
        took[section] = time.perf_counter() - start
        harness.say(f"{section}: {took[section]:.1f} s")
    machine = harness.machine() | {"device": name, "seconds": took}
    result = {"machine": machine, "rows": rows}
    arguments.out.mkdir(parents=True, exist_ok=True)
    stem = arguments.out / f"gpu_suite-{name.replace(' ', '-')}"
    stem.with_suffix(".json").write_text(json.dumps(result, indent=1) + "\n")
    stem.with_suffix(".md").write_text(as_table(rows, machine))
    print(json.dumps(result, indent=1) if arguments.json else as_table(rows, machine))
    return 1 if any(one["ok"] is False for one in rows) else 0


if __name__ == "__main__":
    sys.exit(main())

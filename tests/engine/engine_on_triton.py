"""Run by test_engine_on_triton.py with TRITON_INTERPRET=1, as Triton reads it when it is imported.

Serves one prompt cold and from every tier with the engine on the Triton kernels, and prints as JSON
what came out and what a spy saw. The spy stands between the model and the prefill kernel: at each
launch it looks at every block that the sequences reuse, and compares its bytes with those that were
computed at first. Between requests all free device blocks are filled with NaN, so a block that is
read before it has arrived cannot look like itself.
"""

import json
import random
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

import torch
import transformers

from engine import LLM, SamplingParams
from kernels import attention_launch, movement_launch, reference
from kvstore.index import NONE, VALID

NUM_NEW, BLOCK_SIZE = 4, 16
GREEDY = SamplingParams(temperature=0.0, max_tokens=NUM_NEW, ignore_eos=True)


def save_model(path: Path) -> None:
    config = transformers.LlamaConfig(
        vocab_size=128,
        hidden_size=128,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=128,
        initializer_range=0.3,
        bos_token_id=1,
        eos_token_id=2,
    )
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(config).save_pretrained(path)


def expected_tokens(path: Path, prompt: list[int]) -> list[int]:
    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    model.generation_config.eos_token_id = None
    output = model.generate(torch.tensor([prompt]), do_sample=False, max_new_tokens=NUM_NEW)
    return output[0, len(prompt) :].tolist()


class Spy:
    """What the launches of one engine read and run."""

    def __init__(self, llm: LLM) -> None:
        self._store, self._rows = llm._core.store, llm._core.store.device.rows
        self.computed: dict[bytes, bytes] = {}  # bytes of each block by key, as first computed
        self.launches: Counter[str] = Counter()
        self.reused = 0
        self.problems: list[str] = []
        context = llm._core.runner._context
        self.backend = context.backend.name
        prefill = context.backend.paged_prefill

        def paged_prefill(*arguments, **options):
            self._look()
            return prefill(*arguments, **options)

        context.backend = replace(context.backend, paged_prefill=paged_prefill)
        for module, name in ((attention_launch, "attend"), (movement_launch, "write_kv")):
            setattr(module, name, self._counted(name, getattr(module, name)))

    def _counted(self, name, function):
        def counted(*arguments, **options):
            self.launches[name] += 1
            return function(*arguments, **options)

        return counted

    def _look(self) -> None:
        """On the step thread, right before a launch."""
        index = self._store.index
        for lease in self._store.leases:
            cached = slice(lease.num_cached)
            for slot, block_id in zip(lease.slots[cached], lease.block_ids[cached], strict=True):
                self.reused += 1
                if index.device[slot] != block_id or index.loading[slot] != VALID:
                    self.problems.append(f"block {block_id} is read and has not arrived")
                elif self._rows[block_id].tobytes() != self.computed[index.key[slot]]:
                    self.problems.append(f"block {block_id} is read and holds something else")

    def remember(self) -> None:
        index = self._store.index
        for slot in index.used_slots():
            if index.device[slot] != NONE:
                block = self._rows[index.device[slot]].tobytes()
                self.computed.setdefault(index.key[slot], block)

    def poison(self) -> None:
        for block_id in self._store.device.free_ids():
            self._rows[block_id] = 0xFF  # float32 NaN


def main(directory: Path) -> None:
    save_model(directory / "model")
    rng = random.Random(0)
    prompt, other = ([rng.randrange(3, 128) for _ in range(count)] for count in (100, 120))

    def never(*_, **__):
        raise AssertionError("a torch twin ran in the place of a kernel")

    reference.attend = reference.write_kv = never
    layer_bytes = 2 * BLOCK_SIZE * 2 * 64 * 4
    with LLM(
        str(directory / "model"),
        dtype="float32",
        block_size=BLOCK_SIZE,
        device_cache=8 * 2 * layer_bytes,  # one sequence: another prompt pushes its blocks out
        host_cache=20 * 2 * layer_bytes,
        disk_cache=directory / "cache",
        load_policy="always",
        max_num_seqs=4,
        max_num_batched_tokens=64,
        skip_tokenizer_init=True,
    ) as llm:
        spy, runs = Spy(llm), []

        def ask(tokens: list[int]) -> None:
            llm._core.call(spy.poison)
            spy.reused = 0
            (output,) = llm.generate([tokens], GREEDY, use_tqdm=False)
            llm._core.call(spy.remember)
            cached = {tier: n for tier, n in output.metrics.cached_tokens.items() if n}
            runs.append([cached, output.outputs[0].token_ids, spy.reused])

        ask(prompt)
        ask(prompt)
        ask(other)
        ask(prompt)
        llm.flush()
        llm.reset_prefix_cache("device")
        llm.reset_prefix_cache("host")
        ask(prompt)
        problems = spy.problems + llm.check()
    report = {
        "backend": spy.backend,
        "launches": spy.launches,
        "runs": runs,
        "problems": problems,
        "expected": [expected_tokens(directory / "model", each) for each in (prompt, other)],
    }
    print(json.dumps(report))


if __name__ == "__main__":
    main(Path(sys.argv[1]))

"""Every architecture of docs/models.md answers as transformers does, whichever tier its blocks are
in. What the model runner alone does with them is in test_model_runner.py."""

import re
from pathlib import Path

import pytest
import transformers
from architectures import BLOCK, MAX_LEN, SUPPORTED, Eager, make_network, tokens

from engine import LLM, SamplingParams

pytestmark = pytest.mark.usefixtures("one_torch_thread")

EVERY_LOGPROB = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True, logprobs=-1)
PROMPT_LEN = 61  # seven blocks and five tokens, and beyond every window
CACHED = PROMPT_LEN // BLOCK * BLOCK


def test_documented_architectures_are_the_tested_ones():
    document = Path(__file__).parents[2] / "docs" / "models.md"
    supported = document.read_text().partition("## Refused")[0]
    rows = re.findall(r"^\| `(.+?)` \|", supported, re.MULTILINE)
    assert rows == list(SUPPORTED)


@pytest.mark.parametrize("name", SUPPORTED)
def test_answers_equal_transformers_cold_and_from_every_tier(name, tmp_path):
    make_network(name).save_pretrained(tmp_path / "model")
    network = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    eager = Eager(network, MAX_LEN)
    prompt = tokens(PROMPT_LEN, 5)
    assert_depends_on_the_cached_part(eager, prompt)
    answers = []

    def ask(llm: LLM, served_from: str | None) -> None:
        (output,) = llm.generate([prompt], EVERY_LOGPROB)
        found = {tier: count for tier, count in output.metrics.cached_tokens.items() if count}
        assert found == ({served_from: CACHED} if served_from else {})
        assert eager.assert_answer(prompt, output.outputs[0])
        answers.append(output.outputs[0].token_ids)

    settings = {
        "dtype": "float32",
        "block_size": BLOCK,
        "max_model_len": MAX_LEN,
        "device_cache": "256KiB",
        "host_cache": "2MiB",
        "disk_cache": tmp_path / "cache",
        "load_policy": "always",
        "skip_tokenizer_init": True,
    }
    with LLM(str(tmp_path / "model"), **settings) as llm:
        ask(llm, None)
        ask(llm, "device")
        push_out(llm)
        ask(llm, "host")
        llm.reset_prefix_cache("device")
        llm.reset_prefix_cache("host")
        ask(llm, "disk")
        assert llm.check() == []
    with LLM(str(tmp_path / "model"), **settings) as llm:
        ask(llm, "disk")
    assert len(set(answers[0])) > 1, "a model that repeats itself shows little"


def assert_depends_on_the_cached_part(eager: Eager, prompt: list[int]) -> None:
    """Else a wrong block would go unnoticed. One token of it is another: the logits move by far
    more than what counts as equal. It stands where windows in every layer still reach."""
    changed = list(prompt)
    changed[CACHED - 12] = 3 + (prompt[CACHED - 12] + 40) % 90
    here, there = eager.logits(prompt)[-1], eager.logits(changed)[-1]
    assert (here - there).abs().max() > 30 * 1e-4 * (here.max() - here.min())


def push_out(llm: LLM) -> None:
    """Other prompts take every block of the device."""
    num_blocks = llm._core.store.device.capacity
    others = [tokens(MAX_LEN - 8, 100 + i) for i in range(num_blocks * BLOCK // (MAX_LEN - 8) + 1)]
    llm.generate(others, SamplingParams(temperature=0.0, max_tokens=1))

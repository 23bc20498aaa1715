import random
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers

sys.path.insert(0, str(Path(__file__).parents[1]))  # importlib mode puts no test folder on the path

from tiny_models import save_text_model, save_tiny_model

from engine import LLM, SamplingParams

GREEDY = SamplingParams(temperature=0.0, max_tokens=16)
TINY_BLOCK_BYTES = 2 * 2 * 16 * 2 * 16 * 4  # layers, K and V, positions, heads, head_dim, float32


@pytest.fixture(scope="session", autouse=True)
def quiet_transformers():
    transformers.utils.logging.disable_progress_bar()


@pytest.fixture
def one_torch_thread():
    """For tiny models: a second thread gains nothing, and waits for the others' time slices."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory) -> str:
    return str(save_tiny_model(tmp_path_factory.mktemp("tiny") / "model"))


@pytest.fixture(scope="session")
def text_model(tmp_path_factory) -> str:
    return str(save_text_model(tmp_path_factory.mktemp("text") / "model"))


@pytest.fixture(scope="session")
def tiny_prompts() -> list[list[int]]:
    """Twenty prompts that begin with one of three documents."""
    rng = random.Random(0)
    documents = [[rng.randrange(3, 128) for _ in range(length)] for length in (40, 111, 190)]
    return [
        rng.choice(documents) + [rng.randrange(3, 128) for _ in range(rng.randrange(1, 30))]
        for _ in range(20)
    ]


@pytest.fixture
def make_llm(tiny_model):
    """Engines on the tiny model in float32, checked and closed at the end."""
    engines: list[LLM] = []

    def make(model: str | None = None, **settings) -> LLM:
        defaults = {
            "dtype": "float32",
            "device_cache": 400 * TINY_BLOCK_BYTES,
            "skip_tokenizer_init": True,
            "load_policy": "always",
        }
        engines.append(LLM(model or tiny_model, **(defaults | settings)))
        return engines[-1]

    yield make
    for engine in engines:
        if not engine.is_closed:
            assert engine.check() == []
            engine.close(30)


class Oracle:
    """transformers' own greedy generation, without any cache of ours."""

    def __init__(self, path: str, dtype: torch.dtype = torch.float32) -> None:
        model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=dtype)
        self.model = model.eval()
        self._known: dict[tuple, list[int]] = {}

    def generate(self, prompt: list[int], max_tokens: int = 16) -> list[int]:
        key = (tuple(prompt), max_tokens)
        if key not in self._known:
            output = self.model.generate(
                torch.tensor([prompt]),
                attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),  # 0 is a token, too
                do_sample=False,
                max_new_tokens=max_tokens,
                pad_token_id=0,
            )
            self._known[key] = output[0, len(prompt) :].tolist()
        return self._known[key]

    def assert_equal(self, prompt: list[int], answer: list[int], max_tokens: int = 16) -> None:
        """Equal tokens, up to a step whose two best logits are closer than rounding.

        Matrix products change by about 4e-5 with the number of rows, so where the two best logits
        lie within 1e-4 of the logits' range, either token is right and the comparison ends.
        """
        expected = self.generate(prompt, max_tokens)
        if answer == expected:
            return
        step = next(i for i in range(max_tokens) if answer[i : i + 1] != expected[i : i + 1])
        with torch.inference_mode():
            logits = self.model(torch.tensor([prompt + expected[:step]])).logits[0, -1]
        best = logits.topk(2)
        gap = (best.values[0] - best.values[1]) / (logits.max() - logits.min())
        assert gap < 1e-4, f"token {step}: {answer[step : step + 1]} instead of {expected[step]}"
        assert answer[step] in best.indices.tolist()


@pytest.fixture(scope="session")
def make_oracle() -> type[Oracle]:
    return Oracle


@pytest.fixture(scope="session")
def tiny_oracle(tiny_model) -> Oracle:
    return Oracle(tiny_model)


MakeLLM = Callable[..., LLM]


class Steps:
    """What the model was given: for each step, new tokens and positions before them."""

    def __init__(self, llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
        self.batches: list[list[tuple[int, int]]] = []
        execute = llm._core.runner.execute

        def record(steps):
            self.batches.append([(len(step.token_ids), step.num_prefix) for step in steps])
            return execute(steps)

        monkeypatch.setattr(llm._core.runner, "execute", record)

    @property
    def num_tokens(self) -> int:
        return sum(num_tokens for batch in self.batches for num_tokens, _ in batch)


@pytest.fixture
def record_steps(monkeypatch) -> Callable[[LLM], Steps]:
    return lambda llm: Steps(llm, monkeypatch)


@pytest.fixture
def hold_first(monkeypatch) -> Callable[..., Callable[[], None]]:
    """Makes an engine stand still when the samples that begin first have so many tokens, until they
    are aborted or what this returns is called: whatever a test does meanwhile comes in time. With
    ``and_each`` it stands still again for those that begin later."""

    def hold(llm: LLM, num_tokens: int = 1, *, and_each: bool = False) -> Callable[[], None]:
        scheduler = llm._core.scheduler
        schedule, first, is_over = scheduler.schedule, [], threading.Event()

        def is_held() -> bool:
            return not is_over.is_set() and any(
                each in scheduler.running and len(each.token_ids) - each.num_prompt >= num_tokens
                for each in first
            )

        def schedule_unless_held():
            if is_held():
                return []
            batch = schedule()
            if and_each or not first:  # aborted at once, they are still the first
                first[:] = scheduler.running
            return batch

        def go_on():
            is_over.set()
            llm._core.look_again()

        monkeypatch.setattr(scheduler, "schedule", schedule_unless_held)
        return go_on

    return hold

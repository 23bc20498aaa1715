import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # for lru_oracle

DATA = Path(__file__).parents[2] / "data"
TRACES = ("mooncake_conversation.jsonl", "mooncake_synthetic.jsonl")


@pytest.fixture(params=TRACES)
def trace(request) -> Path:
    return DATA / request.param

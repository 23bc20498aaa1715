"""A Python engine for long-document question answering over the tiered KV-cache store.

Names are as in vLLM. The public ones load on first use, so that ``engine.config`` can be read
without importing torch.
"""

import os
from importlib import import_module
from typing import TYPE_CHECKING, Any

from engine.runner.free_cores import spin_count

# Before torch loads the library that reads it.
os.environ.setdefault("GOMP_SPINCOUNT", spin_count())

if TYPE_CHECKING:
    from engine.async_document import AsyncDocument, AsyncPin
    from engine.async_generation import AsyncGeneration
    from engine.async_llm import AsyncLLM
    from engine.async_session import AsyncSession
    from engine.async_stream import AsyncOutputStream
    from engine.document import Document
    from engine.generation import Generation
    from engine.llm import LLM
    from engine.outputs import CompletionOutput, RequestMetrics, RequestOutput
    from engine.sampling.sampling_params import SamplingParams
    from engine.session import Session
    from engine.stream import OutputStream
    from kvstore.lease import Pin

__all__ = [
    "LLM",
    "AsyncDocument",
    "AsyncGeneration",
    "AsyncLLM",
    "AsyncOutputStream",
    "AsyncPin",
    "AsyncSession",
    "CompletionOutput",
    "Document",
    "Generation",
    "OutputStream",
    "Pin",
    "RequestMetrics",
    "RequestOutput",
    "SamplingParams",
    "Session",
]

_MODULES = {
    "AsyncDocument": "engine.async_document",
    "AsyncGeneration": "engine.async_generation",
    "AsyncLLM": "engine.async_llm",
    "AsyncOutputStream": "engine.async_stream",
    "AsyncPin": "engine.async_document",
    "AsyncSession": "engine.async_session",
    "LLM": "engine.llm",
    "CompletionOutput": "engine.outputs",
    "Document": "engine.document",
    "Generation": "engine.generation",
    "OutputStream": "engine.stream",
    "Pin": "kvstore.lease",
    "RequestMetrics": "engine.outputs",
    "RequestOutput": "engine.outputs",
    "SamplingParams": "engine.sampling.sampling_params",
    "Session": "engine.session",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'engine' has no attribute {name!r}")
    return getattr(import_module(_MODULES[name]), name)


def __dir__() -> list[str]:
    return __all__

"""Capacity planning: what a trace of requests would hit in caches of any size.

    from kvstore.planning import make_plan, read_trace

    plan = make_plan(read_trace("trace.jsonl"))
    for point in plan.curves["lru"]:
        print(point.capacity_blocks, point.outcome.hit_ratio_tokens)

``kvstore plan`` prints the same. Needs numpy, no GPU and no model.
"""

from kvstore.planning.hardware import (
    MODELS,
    PROCESSORS,
    HardwareProfile,
    ModelShape,
    Processor,
    profile_of,
    read_model_shape,
)
from kvstore.planning.plan import CurvePoint, Outcome, Plan, TierOutcome, TraceSummary, make_plan
from kvstore.planning.recommendation import knee, recommendation, recommended
from kvstore.planning.request_batch import RequestBatch, RequestBatcher
from kvstore.planning.sampling import BlockSampler
from kvstore.planning.simulation import CacheSetup
from kvstore.planning.trace_reader import FORMATS, read_trace

__all__ = [
    "FORMATS",
    "MODELS",
    "PROCESSORS",
    "BlockSampler",
    "CacheSetup",
    "CurvePoint",
    "HardwareProfile",
    "ModelShape",
    "Outcome",
    "Plan",
    "Processor",
    "RequestBatch",
    "RequestBatcher",
    "TierOutcome",
    "TraceSummary",
    "knee",
    "make_plan",
    "profile_of",
    "read_model_shape",
    "read_trace",
    "recommendation",
    "recommended",
]

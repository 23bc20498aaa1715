"""How many requests an engine has and what they took, as a snapshot and for Prometheus."""

from dataclasses import dataclass

from engine.scheduling.request_stats import RequestStats
from kvstore.reports.metrics import Family, as_text, by_label, number


@dataclass(frozen=True, slots=True)
class QueueStats:
    """At the time of the snapshot, and since the engine was made.

    waiting_requests   accepted; none of their samples has begun to run
    held_requests      prompts of ``generate`` that are held back until there is room for them
    running_sequences  in forwards now
    paused_requests    begun, and none of their samples runs: nobody reads their stream, or they
                       gave up their blocks and wait for room
    refused_requests   that met a full queue, so far
    preemptions        of sequences that gave up their blocks and resumed later, so far
    requests           what they took and what became of them, so far
    """

    waiting_requests: int
    held_requests: int
    running_sequences: int
    paused_requests: int
    refused_requests: int
    preemptions: int
    requests: RequestStats


_FAMILIES: tuple[Family[QueueStats], ...] = (
    ("gauge", "waiting_requests", (), number("waiting_requests"), "Requests that wait to run"),
    ("gauge", "held_requests", (), number("held_requests"), "Prompts held until there is room"),
    ("gauge", "running_sequences", (), number("running_sequences"), "Sequences that run"),
    ("gauge", "paused_requests", (), number("paused_requests"), "Begun, and not running now"),
    ("counter", "refused_requests", (), number("refused_requests"), "Met a full queue"),
    ("counter", "preemptions", (), number("preemptions"), "Gave up their blocks and resumed"),
    ("counter", "prompt_tokens", (), number("requests.prompt_tokens"), "Tokens of prompts"),
    (
        "counter",
        "cached_tokens",
        ("tier",),
        by_label("requests.cached_tokens"),
        "Of them, found in the cache, by the fastest tier with them",
    ),
    ("counter", "generated_tokens", (), number("requests.generated_tokens"), "Tokens sampled"),
    (
        "counter",
        "finished_requests",
        ("finish_reason",),
        by_label("requests.finished_requests"),
        "Requests that have ended",
    ),
    (
        "histogram",
        "time_to_first_token_seconds",
        (),
        number("requests.first_token_seconds"),
        "From arrival to the first token",
    ),
    (
        "histogram",
        "request_queue_seconds",
        (),
        number("requests.queue_seconds"),
        "Waiting to run, apart from slower tiers",
    ),
    (
        "histogram",
        "request_prefill_seconds",
        (),
        number("requests.prefill_seconds"),
        "From the first prefill step to the end of the last",
    ),
    (
        "histogram",
        "time_per_output_token_seconds",
        (),
        number("requests.output_token_seconds"),
        "Between tokens of a sample, on average",
    ),
    (
        "histogram",
        "request_seconds",
        (),
        number("requests.total_seconds"),
        "From arrival to the end",
    ),
)


def render_queue(stats: QueueStats) -> str:
    """As text in Prometheus' format, to stand behind the store's (``kvstore.reports.metrics``)."""
    return as_text(_FAMILIES, stats)

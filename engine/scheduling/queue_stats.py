"""How many requests an engine has, as a snapshot and for Prometheus."""

from dataclasses import dataclass, fields


@dataclass(frozen=True, slots=True)
class QueueStats:
    """At the time of the snapshot, and since the engine was made.

    waiting_requests   accepted; none of their samples has begun to run
    held_requests      prompts of ``generate`` that are held back until there is room for them
    running_sequences  in forwards now
    refused_requests   that met a full queue, so far
    preemptions        of sequences that gave up their blocks and resumed later, so far
    """

    waiting_requests: int
    held_requests: int
    running_sequences: int
    refused_requests: int
    preemptions: int


_TEXTS = {
    "waiting_requests": "Requests that wait for their turn",
    "held_requests": "Prompts held back until the queue has room",
    "running_sequences": "Sequences that run",
    "refused_requests": "Requests that met a full queue",
    "preemptions": "Sequences that gave up their blocks and resumed",
}
_COUNTERS = ("refused_requests", "preemptions")


def render_queue(stats: QueueStats) -> str:
    """As text in Prometheus' format, to stand behind the store's (``kvstore.reports.metrics``)."""
    lines = []
    for field in fields(stats):
        is_counter = field.name in _COUNTERS
        name = f"kvstore_{field.name}" + ("_total" if is_counter else "")
        lines += [
            f"# HELP {name} {_TEXTS[field.name]}",
            f"# TYPE {name} {'counter' if is_counter else 'gauge'}",
            f"{name} {float(getattr(stats, field.name))}",
        ]
    return "\n".join(lines) + "\n"

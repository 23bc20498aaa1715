"""The attention function that transformers models call: new K and V into the pool, then attend.

Registered in transformers' ``AttentionInterface`` only. A mask function under the same name would
cost a host synchronisation per forward; without one the models build no mask at all.
"""

from collections.abc import Mapping
from typing import Any

import torch
from transformers import AttentionInterface

from engine.runner.cpu_threads import on_all_threads
from engine.runner.forward_context import current_context

PAGED = "kvstore_paged"

# Keyword arguments that say nothing about which positions are attended to, or how.
HARMLESS_ARGUMENTS = frozenset(
    {
        "position_ids",
        "position_embeddings",
        "use_cache",
        "output_attentions",
        "output_hidden_states",
        "output_router_logits",
        "return_dict",
    }
)
USED_ARGUMENTS = frozenset({"scaling", "sliding_window", "softcap", "s_aux"})


def paged_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Attention of one layer over the packed tokens of the current step.

    query [1, num_heads, num_tokens, head_dim]; key, value [1, num_kv_heads, num_tokens, head_dim]
    Returns [1, num_tokens, num_heads, head_dim], and no weights. ``s_aux`` are the logits of
    attention sinks. The window comes from the layer's cache and the mask is causal by definition:
    the probe has shown both to be what the model means, and that no argument is lost here.
    """
    context = current_context()
    layer, step, backend = context.layers[module], context.step, context.backend
    assert step is not None
    q = query[0].transpose(0, 1)
    k_pool, v_pool = layer.k_pool, layer.v_pool
    backend.write_kv(
        key[0].transpose(0, 1), value[0].transpose(0, 1), k_pool, v_pool, step.slot_mapping
    )
    out = query.new_empty(q.shape)
    options = {
        "scale": query.shape[-1] ** -0.5 if scaling is None else scaling,
        "window": layer.window,
        "softcap": softcap,
        "sinks": None if s_aux is None else s_aux.float(),
        "out": out,
    }
    tables, seq_lens = step.block_tables, step.seq_lens
    if step.is_decode:
        arguments = q, k_pool, v_pool, tables, seq_lens
        if step.is_long:
            on_all_threads(backend.paged_decode, *arguments, **options)
        else:
            backend.paged_decode(*arguments, **options)
    else:
        cu_seqlens_q = step.cu_seqlens_q
        backend.paged_prefill(q, k_pool, v_pool, tables, cu_seqlens_q, seq_lens, **options)
    return out[None], None


AttentionInterface.register(PAGED, paged_attention)


def unknown_arguments(arguments: Mapping[str, Any]) -> list[str]:
    """Names of the arguments that carry something ``paged_attention`` would ignore."""
    return sorted(name for name, value in arguments.items() if not _is_known(name, value))


def _is_known(name: str, value: Any) -> bool:
    if value is None or name in USED_ARGUMENTS or name in HARMLESS_ARGUMENTS:
        return True
    if name == "dropout":
        return bool(value == 0)
    return name == "is_causal" and value is True

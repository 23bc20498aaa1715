"""Whether a model may run on a paged cache, decided by what it does and not by its name.

1. Every layer calls the attention function exactly once.
2. The mask it asks for is causal, or causal with the layer's window.
3. K and V have the same heads and head_dim in every layer; so have the queries their head_dim.
4. Every layer is full or sliding-window attention: nothing else keeps state between tokens.
5. Keys do not depend on what else is in the batch.
6. Logits of two sequences, packed and in several steps on a pool, equal those of plain attention.

What fails is refused with the reason. A model that passes needs no entry in any list of ours.
"""

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface

from engine.runner.attention import PAGED, unknown_arguments
from engine.runner.model_runner import ModelRunner, SequenceStep
from kvstore.errors import ConfigError

if TYPE_CHECKING:
    from engine.model.loader import LoadedModel

# The only name under which we register a mask function: it is in force during the probe alone.
PROBE = "kvstore_probe"

LAYER_TYPES = ("full_attention", "sliding_attention")

_NUM_TOKENS = 32

# Root mean square error, as a part of the standard deviation, that is still rounding. A wrong mask
# gives about 1; bfloat16 gives 0.07 in the worst of 40 tiny random models. A quarter of the tokens
# may exceed it: a mixture of experts near a tie sends a token elsewhere.
_TOLERANCE = {torch.float32: 1e-3, torch.float16: 0.1, torch.bfloat16: 0.25}
_TOKENS_WITHIN = 0.75

MaskFunction = Callable[..., Any]


@dataclass(frozen=True, slots=True)
class AttentionLayer:
    """One layer's attention module, in the order of the forward, and the shape of its K and V."""

    module: torch.nn.Module
    window: int | None
    num_kv_heads: int
    head_dim: int


@dataclass(slots=True)
class _Call:
    module: torch.nn.Module
    query_shape: torch.Size
    key: torch.Tensor
    value_shape: torch.Size
    mask: torch.Tensor | None
    arguments: dict[str, Any]


@dataclass(slots=True)
class _Recording:
    calls: list[_Call] = field(default_factory=list)
    masks: list[MaskFunction] = field(default_factory=list)


class _Current(threading.local):
    recording: _Recording


_current = _Current()


def _record_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **arguments: Any,
) -> tuple[torch.Tensor, None]:
    call = _Call(module, query.shape, key, value.shape, attention_mask, arguments)
    _current.recording.calls.append(call)
    batch, num_heads, num_tokens, _ = query.shape
    return query.new_zeros(batch, num_tokens, num_heads, value.shape[-1]), None


def _record_mask(*, q_length: int, kv_length: int, mask_function: MaskFunction, **_: Any) -> Any:
    """A tensor that says which mask function it stands for: its number, in every element."""
    _current.recording.masks.append(mask_function)
    return torch.full((1, 1, q_length, kv_length), len(_current.recording.masks) - 1)


AttentionInterface.register(PROBE, _record_attention)
AttentionMaskInterface.register(PROBE, _record_mask)


def probe_attention(model: Any, name: str, max_model_len: int) -> tuple[AttentionLayer, ...]:
    """Checks 1 to 5. Leaves the model's attention set to ``PROBE``; the caller sets its own.

    model          a transformers causal language model in eval mode
    name           what the user called it, for the message
    max_model_len  the longest position that will be asked for, plus one

    Raises ``ConfigError`` with the reason when the model is refused.
    """
    config = model.config.get_text_config()
    _check_layer_types(name, model.config, config)
    model.set_attn_implementation(PROBE)
    near = torch.arange(min(_NUM_TOKENS, max_model_len - 1))
    first = _run(model, name, near)
    num_layers = config.num_hidden_layers
    _check_calls(name, first.calls, num_layers)
    layers = tuple(_layer(name, call, first.masks, max_model_len) for call in first.calls)
    shapes = {(layer.num_kv_heads, layer.head_dim) for layer in layers}
    if len(shapes) > 1:
        listed = " and ".join(f"{heads} heads of {dim}" for heads, dim in sorted(shapes))
        raise _refused(name, f"K and V differ between layers: {listed}")
    far = _run(model, name, torch.cat([near, torch.tensor([max_model_len - 1])]))
    _check_keys_stay(name, first.calls, far.calls)
    return layers


def probe_logits(loaded: "LoadedModel", attention_backend: str = "auto") -> None:
    """Check 6, with the runner and kernels that will serve. Leaves the attention set to ``PAGED``.

    Raises ``ConfigError`` when the model is refused.
    """
    model = loaded.model
    vocab_size = loaded.vocab_size
    sequences = [
        _token_ids(min(40, loaded.max_model_len), vocab_size),
        _token_ids(min(24, loaded.max_model_len), vocab_size, offset=11),
    ]
    model.set_attn_implementation("eager")
    try:
        with torch.inference_mode():
            expected = [
                model(input_ids=ids[None].to(loaded.device), use_cache=False).logits[0].float()
                for ids in sequences
            ]
    finally:
        model.set_attn_implementation(PAGED)
    got = _paged_logits(loaded, attention_backend, [ids.tolist() for ids in sequences])
    wanted = torch.cat(expected)
    error = (torch.cat(got) - wanted).square().mean(dim=-1).sqrt()
    relative = float((error / wanted.std(dim=-1)).quantile(_TOKENS_WITHIN))
    if not relative <= _TOLERANCE[loaded.dtype]:  # NaN fails too
        raise _refused(
            loaded.name, f"its logits there are off by {relative:.2g} of their deviation"
        )


def _paged_logits(
    loaded: "LoadedModel", attention_backend: str, sequences: list[list[int]]
) -> list[torch.Tensor]:
    """Logits of all tokens: a first chunk, a second one, and one token decoded, of each."""
    layout = loaded.layout
    num_blocks = [layout.blocks_for(len(tokens)) for tokens in sequences]
    pool = torch.zeros((sum(num_blocks), *layout.shape), dtype=loaded.dtype, device=loaded.device)
    runner = ModelRunner(loaded, pool, attention_backend=attention_backend)
    # The second sequence gets the first blocks, so that a block's place is not its position.
    ids = list(range(sum(num_blocks)))
    tables = [ids[num_blocks[1] :], ids[: num_blocks[1]]]
    got: list[list[torch.Tensor]] = [[], []]
    cuts = [(0, n * 2 // 3, n - 1, n) for n in map(len, sequences)]
    for part in range(3):
        steps = [
            SequenceStep(tokens[cut[part] : cut[part + 1]], cut[part], table, True)
            for tokens, cut, table in zip(sequences, cuts, tables, strict=True)
        ]
        logits = runner.score(steps)
        border = len(steps[0].token_ids)
        got[0].append(logits[:border])
        got[1].append(logits[border:])
    return [torch.cat(chunks) for chunks in got]


def _check_layer_types(name: str, config: Any, text_config: Any) -> None:
    if getattr(config, "is_encoder_decoder", False):
        raise _refused(name, "it is an encoder-decoder model")
    types = getattr(text_config, "layer_types", None) or ()
    others = sorted(set(types) - set(LAYER_TYPES))
    if others:
        raise _refused(name, f"it has layers of type {', '.join(others)}")


def _run(model: Any, name: str, positions: torch.Tensor) -> _Recording:
    """One forward of ``len(positions)`` tokens, recorded."""
    device = next(model.parameters()).device
    token_ids = _token_ids(len(positions), model.get_input_embeddings().weight.shape[0])
    recording = _current.recording = _Recording()
    try:
        with torch.inference_mode():
            output = model(
                input_ids=token_ids[None].to(device),
                position_ids=positions[None].to(device),
                use_cache=False,
                logits_to_keep=torch.tensor([0, 1], device=device),
            )
    except Exception as error:
        reason = str(error).partition("\n")[0]
        raise _refused(name, f"its forward failed: {type(error).__name__}: {reason}") from error
    finally:
        del _current.recording
    if recording.calls and output.logits.shape[:2] != (1, 2):
        raise _refused(name, "its forward cannot be asked for the logits of chosen tokens")
    return recording


def _check_calls(name: str, calls: list[_Call], num_layers: int) -> None:
    modules = {call.module for call in calls}
    if not calls:
        raise _refused(
            name, "its layers never call attention through transformers' attention interface"
        )
    if len(calls) != num_layers or len(modules) != num_layers:
        raise _refused(
            name,
            f"it has {num_layers} layers, but attention ran {len(calls)} times "
            f"in {len(modules)} of them",
        )


def _layer(name: str, call: _Call, masks: list[MaskFunction], max_model_len: int) -> AttentionLayer:
    """Checks 2 and 3 for one layer."""
    if unknown := unknown_arguments(call.arguments):
        raise _refused(name, f"its attention takes {', '.join(unknown)}, which we do not compute")
    _, num_heads, _, query_dim = call.query_shape
    _, num_kv_heads, _, head_dim = call.key.shape
    if call.key.shape != call.value_shape or query_dim != head_dim or num_heads % num_kv_heads:
        shapes = [tuple(s[1::2]) for s in (call.query_shape, call.key.shape, call.value_shape)]
        raise _refused(
            name,
            "heads and head_dim of queries {}, K {} and V {} do not fit together".format(*shapes),
        )
    window = call.arguments.get("sliding_window")
    if call.mask is None:
        is_same = window is None and getattr(call.module, "is_causal", False)
    elif call.mask.dtype == torch.int64 and int(call.mask.flatten()[0]) < len(masks):
        is_same = mask_is_causal(masks[int(call.mask.flatten()[0])], window, max_model_len)
    else:
        is_same = False  # a mask of its own making
    if not is_same:
        wanted = "causal" if window is None else f"causal within a window of {window}"
        raise _refused(name, f"the attention mask of one of its layers is not {wanted}")
    return AttentionLayer(call.module, window, num_kv_heads, head_dim)


def mask_is_causal(mask: MaskFunction, window: int | None, max_model_len: int) -> bool:
    """Whether a transformers mask function is causal (within ``window``), by sampled positions.

    The positions lie around 0, around powers of two, where chunks and windows end, and around
    multiples of the window.
    """
    edges = [0, 4, *(2**i for i in range(3, max_model_len.bit_length() + 1))]
    edges += [window * i for i in (1, 2, 3)] if window else []
    sampled = {edge + near for edge in edges for near in range(-2, 3)}
    positions = torch.tensor(sorted(p for p in sampled if 0 <= p < max_model_len))
    query, key = positions[:, None], positions[None, :]
    expected = key <= query
    if window is not None:
        expected &= key > query - window
    try:
        got = torch.as_tensor(mask(0, 0, query, key)).expand_as(expected)
    except Exception:
        return False  # it looks at the data, not only at positions
    return bool((got == expected).all())


def _check_keys_stay(name: str, near: list[_Call], far: list[_Call]) -> None:
    """Check 5: the same tokens have the same keys beside a token at the last position."""
    for one, other in zip(near, far, strict=True):
        key = one.key.float()
        error = other.key[:, :, : key.shape[2]].float() - key
        if not error.norm() <= _TOLERANCE[one.key.dtype] * key.norm():
            raise _refused(name, "its keys depend on the longest position in the batch")


def _token_ids(count: int, vocab_size: int, offset: int = 3) -> torch.Tensor:
    return (torch.arange(count) * 7 + offset) % vocab_size


def _refused(name: str, reason: str) -> ConfigError:
    return ConfigError(
        f"model {name}: cannot run on a paged KV cache: {reason}; "
        "docs/models.md lists architectures that can"
    )

"""From a model's name to a model that runs on a paged cache, or to one line that says why not.

Does not know where models come from (``engine.model.source``), nor how they are run.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any
from uuid import uuid4

import torch
import transformers

from engine.model import probe
from engine.model.identity import (
    Checkpoint,
    class_digest,
    model_identity,
    read_checkpoint,
)
from engine.model.packed_linear import can_pack, pack_linears
from engine.model.quiet import quiet_transformers
from engine.model.rope import freeze_rope
from engine.model.source import ModelSource, resolve_model
from engine.runner.attention import PAGED
from engine.runner.attention_backends import find_backend
from engine.runner.cpu_threads import release_threads
from engine.runner.determinism import FixedShapes, run_identity
from kvstore.block import ITEMSIZE, BlockLayout
from kvstore.errors import ConfigError

# A sequence shorter than this cannot even be probed.
_LEAST_LEN = 8
# What a model that does not say its context length is probed with, so that it is refused for what
# it is and not for this.
_PROBED_LEN = 2048


BeforeWeights = Callable[[Any, int], None]


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model ready for a ``ModelRunner``.

    model              transformers model, eval, on its device, its attention set to ``PAGED``
    tokenizer          None with skip_tokenizer_init
    layout             of one block of its KV cache
    layer_order        for each model layer, its place in a block: full attention before sliding
    windows            for each model layer, the positions a query sees, itself included; None: all
    attention_modules  for each model layer, the module that calls attention
    identity           what the namespace of its blocks is the digest of (``engine.model.identity``)
    fixed_shapes       in deterministic mode the shapes of all forwards, else None
    is_packed          its linear layers are (``engine.model.packed_linear``)
    name               what the user called it
    max_model_len      most positions of one sequence
    vocab_size         columns of the logits
    eos_token_ids      tokens that end an answer, ascending
    """

    model: Any
    tokenizer: Any
    layout: BlockLayout
    layer_order: tuple[int, ...]
    windows: tuple[int | None, ...]
    attention_modules: tuple[torch.nn.Module, ...]
    identity: dict[str, Any]
    fixed_shapes: FixedShapes | None
    is_packed: bool
    name: str
    max_model_len: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]

    @property
    def dtype(self) -> torch.dtype:
        dtype: torch.dtype = getattr(torch, self.layout.dtype)
        return dtype

    @property
    def reuse_tokens(self) -> int:
        """A cached prefix is reused in multiples of so many tokens."""
        return self.fixed_shapes.chunk_tokens if self.fixed_shapes else self.layout.block_size

    @property
    def device(self) -> torch.device:
        device: torch.device = self.model.device
        return device


def load_model(
    model: str,
    *,
    dtype: str = "auto",
    device: str = "auto",
    block_size: int = 16,
    max_model_len: int | None = None,
    tokenizer: str | None = None,
    revision: str | None = None,
    trust_remote_code: bool = False,
    attention_backend: str = "auto",
    deterministic: bool = False,
    skip_tokenizer_init: bool = False,
    before_weights: BeforeWeights | None = None,
) -> LoadedModel:
    """Load, freeze, probe and identify a model.

    model          transformers directory, hub id, ``.gguf`` file, or "demo"
    dtype          "auto" (the checkpoint's), "float32", "float16" or "bfloat16"
    device         "auto" (CUDA where there is one), or a torch device
    max_model_len  default: what the model was trained for. Frequencies of position-dependent rope
                   are frozen for it, so there it is part of the identity
    tokenizer      directory or hub id, if it is not the model's own
    attention_backend, deterministic
                   with what the model will run; the probe runs with the same kernels
    before_weights
                   called with the tokenizer and the context length, where the files say it, before
                   the weights are loaded: what it raises saves that

    Raises ``ConfigError`` for a wrong setting, for what is not there or not a causal language
    model, and for what the probe refuses.
    """
    if dtype != "auto" and dtype not in ITEMSIZE:
        raise ConfigError(f"dtype: expected auto, {', '.join(ITEMSIZE)}, got {dtype!r}")
    torch_device = _device(device)
    source = resolve_model(model, revision=revision)
    with quiet_transformers(), _current(torch_device):
        loaded_tokenizer = (
            None if skip_tokenizer_init else _load_tokenizer(source, tokenizer, trust_remote_code)
        )
        checkpoint = read_checkpoint(source, trust_remote_code=trust_remote_code)
        context_len = max_model_len or checkpoint.context_len
        if before_weights is not None and context_len is not None:
            before_weights(loaded_tokenizer, context_len)
        network = _load_weights(source, dtype, trust_remote_code).to(torch_device)
        return prepare_model(
            network,
            loaded_tokenizer,
            name=source.name,
            checkpoint=checkpoint,
            block_size=block_size,
            max_model_len=max_model_len,
            attention_backend=attention_backend,
            deterministic=deterministic,
        )


def prepare_model(
    network: Any,
    tokenizer: Any,
    *,
    name: str,
    checkpoint: Checkpoint | None = None,
    block_size: int = 16,
    max_model_len: int | None = None,
    attention_backend: str = "auto",
    deterministic: bool = False,
) -> LoadedModel:
    """A transformers model that is in memory, made ready in place. Errors as ``load_model``.

    ``checkpoint`` is what its files say of it. A model without files shares its blocks with nobody.
    """
    network.eval().requires_grad_(False)
    # Before the first product on a GPU: it decides how the GPU's library computes them.
    fixed_shapes = FixedShapes.of(network.device, block_size) if deterministic else None
    config = network.config.get_text_config()
    trained_len = getattr(config, "max_position_embeddings", None)
    max_len: int = max_model_len or trained_len or _PROBED_LEN
    if max_len < _LEAST_LEN:
        raise ConfigError(f"max_model_len: expected at least {_LEAST_LEN}, got {max_len}")
    frozen_rope = freeze_rope(network, max_len)
    grows = any(rope_type == "dynamic" for rope_type, _ in frozen_rope.values())
    if trained_len is not None and max_len > trained_len and not grows:
        raise ConfigError(
            f"max_model_len: {name} was trained for {trained_len} positions, got {max_len}; "
            f"use at most {trained_len}"
        )
    layers = probe.probe_attention(network, name, max_len)
    if max_model_len is None and trained_len is None:
        raise ConfigError(f"max_model_len: {name} does not say its context length; pass one")
    layout = BlockLayout(
        num_layers=len(layers),
        block_size=block_size,
        num_kv_heads=layers[0].num_kv_heads,
        head_dim=layers[0].head_dim,
        dtype=str(network.dtype).removeprefix("torch."),
    )
    backend = find_backend(
        attention_backend, network.device, layout, is_deterministic=deterministic
    )
    windows = tuple(layer.window for layer in layers)
    is_packed = can_pack(network)
    run = None
    if fixed_shapes:
        run = run_identity(fixed_shapes, network.device, backend.name, is_packed=is_packed)
    network.set_attn_implementation(PAGED)
    loaded = LoadedModel(
        model=network,
        tokenizer=tokenizer,
        layout=layout,
        layer_order=_layer_order(windows),
        windows=windows,
        attention_modules=tuple(layer.module for layer in layers),
        identity=model_identity(
            checkpoint or Checkpoint({}, weights=uuid4().hex, modelling=""),
            dtype=layout.dtype,
            block_size=block_size,
            frozen_rope=frozen_rope,
            modelling=class_digest(type(network), checkpoint),
            run=run,
        ),
        fixed_shapes=fixed_shapes,
        is_packed=is_packed,
        name=name,
        max_model_len=max_len,
        vocab_size=network.get_output_embeddings().weight.shape[0],
        eos_token_ids=_eos_token_ids(network, tokenizer),
    )
    if is_packed:  # after the identity, which reads the plain weights
        pack_linears(network)
    probe.probe_logits(loaded, attention_backend)
    release_threads()  # the engine computes in a thread of its own
    return loaded


def _layer_order(windows: tuple[int | None, ...]) -> tuple[int, ...]:
    """Place of each layer in a block: full attention first, each kind in the model's order."""
    by_place = sorted(range(len(windows)), key=lambda layer: windows[layer] is not None)
    order = [0] * len(windows)
    for place, layer in enumerate(by_place):
        order[layer] = place
    return tuple(order)


def _device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ConfigError(f"device: expected auto, cpu, cuda or cuda:N, got {name!r}") from None
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f"device: {name} was asked for, but torch finds no CUDA device; use cpu")
    if device.type == "cuda" and (device.index or 0) >= (count := torch.cuda.device_count()):
        raise ConfigError(f"device: {name} was asked for, but the last one is cuda:{count - 1}")
    return device


def _current(device: torch.device) -> AbstractContextManager[Any]:
    """Triton starts kernels on the thread's current device, wherever their tensors are."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def _load_weights(source: ModelSource, dtype: str, trust_remote_code: bool) -> Any:
    keywords: dict[str, Any] = {"trust_remote_code": trust_remote_code}
    if source.gguf_file is not None:
        keywords["gguf_file"] = source.gguf_file
        # Else the weights may stay packed, for kernels that transformers would fetch from the hub.
        keywords["quantization_config"] = transformers.GgufConfig(dequantize=True)
    try:
        network, info = transformers.AutoModelForCausalLM.from_pretrained(
            source.path,
            dtype=dtype if dtype == "auto" else getattr(torch, dtype),
            attn_implementation="eager",
            output_loading_info=True,
            **keywords,
        )
    except Exception as error:  # of transformers, safetensors, gguf and torch
        raise ConfigError(
            f"model {source.name}: not a causal language model that transformers can load: "
            f"{_first_line(error)}"
        ) from error
    if missing := sorted(info["missing_keys"]):
        others = f" and {len(missing) - 1} others" if len(missing) > 1 else ""
        raise ConfigError(
            f"model {source.name}: the checkpoint lacks {missing[0]}{others}; download it again"
        )
    if str(network.dtype).removeprefix("torch.") not in ITEMSIZE:
        raise ConfigError(
            f"model {source.name}: its dtype {network.dtype} has no cache format; "
            f"pass dtype={' or '.join(ITEMSIZE)}"
        )
    return network


def _load_tokenizer(source: ModelSource, name: str | None, trust_remote_code: bool) -> Any:
    keywords: dict[str, Any] = {"trust_remote_code": trust_remote_code}
    if name is None and source.gguf_file is not None:
        keywords["gguf_file"] = source.gguf_file
    try:
        return transformers.AutoTokenizer.from_pretrained(name or source.path, **keywords)
    except Exception as error:  # of transformers, tokenizers and gguf
        raise ConfigError(
            f"tokenizer {name or source.name}: {_first_line(error)}; pass tokenizer=, or "
            "skip_tokenizer_init=True to work with token ids"
        ) from error


def _eos_token_ids(network: Any, tokenizer: Any) -> tuple[int, ...]:
    """Of the model's generation settings, its config and its tokenizer: any of them ends text."""
    found: set[int] = set()
    for owner in (network.generation_config, network.config, tokenizer):
        value = getattr(owner, "eos_token_id", None)
        found.update([value] if isinstance(value, int) else value or ())
    return tuple(sorted(found))


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0] or type(error).__name__

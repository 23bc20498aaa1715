"""Settings of an ``LLM``: names and defaults as in vLLM where a setting has the same meaning.

Importable without torch, so that the command can offer every setting as an option at once.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal

from kvstore.config import StoreConfig, check_kinds, parse_size, refuse_unknown
from kvstore.errors import ConfigError

# Arguments of vLLM that have nothing to change here, with the values they are accepted at
# (None: any value).
IGNORED_ARGUMENTS: Mapping[str, tuple[Any, ...] | None] = {
    "tensor_parallel_size": (1,),
    "pipeline_parallel_size": (1,),
    "data_parallel_size": (1,),
    "swap_space": None,
    "cpu_offload_gb": (0, 0.0),
    "quantization": (None,),
    "kv_cache_dtype": ("auto",),
    "num_gpu_blocks_override": (None,),
    "enable_lora": (False,),
    "max_logprobs": None,
    "tokenizer_mode": ("auto",),
    "enable_chunked_prefill": (True, None),
    "disable_log_stats": None,
    "disable_custom_all_reduce": None,
    "distributed_executor_backend": None,
    "compilation_config": None,
    "max_seq_len_to_capture": None,
    "async_scheduling": None,
    "served_model_name": None,
    "load_format": ("auto", "safetensors"),
    "runner": ("auto", "generate"),
    "tokenizer_revision": (None,),
    "hf_overrides": (None,),
    "logits_processors": (None,),
    "speculative_config": (None,),
    "kv_transfer_config": (None,),
    "enable_sleep_mode": (False,),
    "generation_config": ("auto", "vllm", None),
    "override_generation_config": (None, {}),
    "download_dir": (None,),
    "task": ("auto", "generate", None),
    "limit_mm_per_prompt": None,
    "kv_cache_memory_bytes": (None,),
    "kv_offloading_size": (None,),
    "kv_offloading_backend": None,
    "enable_expert_parallel": (False,),
    "disable_cascade_attn": None,
    "disable_log_requests": None,
    "enable_log_requests": (False,),
}

# Of those, the ones whose purpose a setting of ours has.
_OURS_INSTEAD: Mapping[str, str] = {
    "kv_cache_memory_bytes": "device_cache",
    "num_gpu_blocks_override": "device_cache",
    "kv_offloading_size": "host_cache or disk_cache",
    "kv_transfer_config": "host_cache or disk_cache",
    "download_dir": "the environment variable HF_HOME",
    "generation_config": "SamplingParams",
    "override_generation_config": "SamplingParams",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """All keywords of ``LLM`` with their defaults. Sizes are int bytes or ``"512MiB"``.

    model                   transformers directory, hub id, ``.gguf`` file, or ``"demo"``
    enable_prefix_caching   off: every prompt is computed in full, and no tier keeps anything
    block_size              tokens of one block; caches of different sizes share nothing
    device                  where the model runs; "auto": CUDA where there is one, else the CPU
    dtype                   of weights and cache: float32, float16, bfloat16; "auto": the
                            checkpoint's
    tokenizer               directory or hub id, if it is not the model's own
    revision                branch, tag or commit of a hub id
    trust_remote_code       run Python code that comes with the checkpoint
    device_cache            bytes of KV blocks on the device; "auto": 2 GiB on CPU,
                            ``gpu_memory_utilization`` of the free memory on CUDA
    gpu_memory_utilization  part of the free memory of a GPU that "auto" takes
    host_cache              bytes of page-locked host memory; "auto": 4 GiB on CUDA, none on CPU,
                            where it would be the same memory twice
    disk_cache              directory of the disk tier, None for no disk tier
    disk_cache_size         bytes the directory may take; belongs to the directory
    max_model_len           tokens of prompt and answer at most; None: what the model takes
    max_num_seqs            sequences in one forward at most
    max_num_batched_tokens  tokens of one forward; longer prompts are prefilled in chunks
    scheduling_policy       which waiting request is next: the first that came, or the one with
                            most of its prompt in the cache, ageing so that none is forgotten
    max_num_waiting         requests that may wait, beside those that ``max_num_seqs`` has room for;
                            more are an error, but for the prompts of one ``generate``, which are
                            held back; None: no limit
    max_total_tokens        tokens of prompt and answer of all requests that wait or run, likewise
    seed                    of requests that bring none of their own
    enforce_eager           no CUDA graphs: a decode step launches its kernels one by one
    skip_tokenizer_init     work with token ids only
    load_policy             load a cached prefix, or compute it: what is faster by measurement, or
                            always the one
    write_policy            when a block is written to disk: soon, at once, when it is evicted, or
                            once it was used again
    attention_backend       kernels of attention: ours in Triton, their torch twins, or a library
                            that is installed; "auto": ours, or what is measured to be faster
    deterministic           logits have the same bits, whether a prefix was cached or not; slower
    store_config            settings of the block store, such as dirty_max_age_s=0.5: a mapping or a
                            ``kvstore.config.StoreConfig``
    """

    model: str = "demo"
    enable_prefix_caching: bool = True
    block_size: int = 16
    device: str = "auto"
    dtype: str = "auto"
    tokenizer: str | None = None
    revision: str | None = None
    trust_remote_code: bool = False
    device_cache: int | str = "auto"
    gpu_memory_utilization: float = 0.9
    host_cache: int | str = "auto"
    disk_cache: str | os.PathLike[str] | None = None
    disk_cache_size: int | str = "50GiB"
    max_model_len: int | None = None
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 2048
    scheduling_policy: Literal["fcfs", "longest_prefix"] = "fcfs"
    max_num_waiting: int | None = None
    max_total_tokens: int | None = None
    seed: int = 0
    enforce_eager: bool = False
    skip_tokenizer_init: bool = False
    load_policy: Literal["auto", "always", "never"] = "auto"
    write_policy: Literal["write_behind", "write_through", "write_back", "min_hits"] = (
        "write_behind"
    )
    attention_backend: Literal["auto", "torch", "triton", "flash_attn", "flashinfer"] = "auto"
    deterministic: bool = False
    store_config: StoreConfig | Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        check_kinds(self)
        if self.block_size not in (8, 16, 32, 64, 128, 256):
            raise ConfigError(
                f"block_size: expected 8, 16, 32, 64, 128 or 256, got {self.block_size!r}"
            )
        if self.scheduling_policy not in ("fcfs", "longest_prefix"):
            raise ConfigError(
                "scheduling_policy: expected 'fcfs' or 'longest_prefix', "
                f"got {self.scheduling_policy!r}"
            )
        for name in (
            "max_num_seqs",
            "max_num_batched_tokens",
            "max_model_len",
            "max_num_waiting",
            "max_total_tokens",
        ):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name}: expected an integer of at least 1, got {value!r}")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ConfigError(
                "max_num_batched_tokens: expected at least max_num_seqs "
                f"({self.max_num_seqs}), got {self.max_num_batched_tokens}"
            )
        if not 0 < self.gpu_memory_utilization <= 1:
            raise ConfigError(
                "gpu_memory_utilization: expected a fraction in (0, 1], "
                f"got {self.gpu_memory_utilization!r}"
            )
        for name in ("device_cache", "host_cache", "disk_cache_size"):
            if getattr(self, name) != "auto" or name == "disk_cache_size":
                parse_size(getattr(self, name), name)
        self.resolved_store_config()

    def resolved_store_config(self) -> StoreConfig:
        """``store_config`` with the policies that are arguments of their own put in."""
        given = self.store_config
        if isinstance(given, StoreConfig):
            values = {field.name: getattr(given, field.name) for field in fields(StoreConfig)}
        else:
            values = dict(given or {})
        defaults = EngineConfig.__dataclass_fields__
        for name in ("load_policy", "write_policy"):
            if getattr(self, name) != defaults[name].default or name not in values:
                values[name] = getattr(self, name)
        return StoreConfig.of(values)

    @classmethod
    def of(cls, **arguments: Any) -> "EngineConfig":
        """From keyword arguments; a vLLM argument without meaning here is dropped, others raise."""
        for name, accepted in IGNORED_ARGUMENTS.items():
            if name not in arguments:
                continue
            value = arguments.pop(name)
            if accepted is not None and value not in accepted:
                ours = _OURS_INSTEAD.get(name)
                instead = f"; set {ours} instead" if ours else ""
                raise ConfigError(
                    f"{name}: only {accepted[0]!r} is supported, got {value!r}{instead}"
                )
        refuse_unknown("LLM", arguments, [field.name for field in fields(cls)])
        return cls(**arguments)

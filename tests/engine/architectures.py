"""Tiny random models of every architecture in the table of docs/models.md, and transformers' word
on what they answer.

Their weights are spread widely enough that the output depends on all of the input.
"""

import math

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from engine.model.loader import LoadedModel, prepare_model
from engine.model.rope import freeze_rope
from engine.outputs import CompletionOutput
from engine.runner.attention import PAGED

VOCAB = 97
BLOCK = 8
WINDOW = 24
MAX_LEN = 128

COMMON = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": MAX_LEN,
    "initializer_range": 0.3,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GPT2_STYLE = {
    "vocab_size": VOCAB,
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": MAX_LEN,
    "initializer_range": 0.3,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
SLIDING = {"sliding_window": WINDOW}
MIXED = {"sliding_window": WINDOW, "num_hidden_layers": 4}


def rope(rope_type: str, **parameters) -> dict:
    return {"rope_parameters": {"rope_type": rope_type, "rope_theta": 10000.0, **parameters}}


SUPPORTED = {
    "Llama": ("LlamaConfig", COMMON),
    "Llama, untied, attention bias": (
        "LlamaConfig",
        COMMON | {"tie_word_embeddings": False, "attention_bias": True},
    ),
    "Llama, tied": ("LlamaConfig", COMMON | {"tie_word_embeddings": True}),
    "Llama, linear rope": ("LlamaConfig", COMMON | rope("linear", factor=2.0)),
    "Llama, YaRN rope": (
        "LlamaConfig",
        COMMON | rope("yarn", factor=4.0, original_max_position_embeddings=32),
    ),
    "Llama, llama3 rope": (
        "LlamaConfig",
        COMMON
        | rope(
            "llama3",
            factor=4.0,
            low_freq_factor=1.0,
            high_freq_factor=4.0,
            original_max_position_embeddings=32,
        ),
    ),
    "Llama, dynamic rope (frozen)": (
        "LlamaConfig",
        COMMON | {"max_position_embeddings": 32} | rope("dynamic", factor=4.0),
    ),
    "Mistral": ("MistralConfig", COMMON | SLIDING),
    "Mixtral": ("MixtralConfig", COMMON | {"num_local_experts": 4}),
    "Qwen2": ("Qwen2Config", COMMON),
    "Qwen3": ("Qwen3Config", COMMON | {"head_dim": 16}),
    "Qwen3-MoE": (
        "Qwen3MoeConfig",
        COMMON
        | {"head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24},
    ),
    # Gemma's are tied, but then a random one, which scales its embeddings up, repeats its prompt.
    "Gemma-2": (
        "Gemma2Config",
        COMMON | MIXED | {"head_dim": 8, "query_pre_attn_scalar": 8, "tie_word_embeddings": False},
    ),
    "Gemma-3": (
        "Gemma3TextConfig",
        COMMON
        | MIXED
        | {"head_dim": 8, "query_pre_attn_scalar": 8, "tie_word_embeddings": False}
        | {"layer_types": ["sliding_attention", "full_attention"] * 2},
    ),
    "Phi": ("PhiConfig", COMMON),
    "Phi-3": ("Phi3Config", COMMON),
    "Phi-3, longrope (frozen)": (
        "Phi3Config",
        COMMON
        | {"original_max_position_embeddings": 32}
        | rope(
            "longrope",
            short_factor=[1.0, 1.1, 1.2, 1.3],
            long_factor=[1.0, 2.0, 3.0, 4.0],
            original_max_position_embeddings=32,
        ),
    ),
    "OLMo-2": ("Olmo2Config", COMMON),
    "OLMo-3": ("Olmo3Config", COMMON | MIXED),
    "Granite": (
        "GraniteConfig",
        COMMON
        | {"attention_multiplier": 0.2, "residual_multiplier": 0.5}
        | {"embedding_multiplier": 2.0, "logits_scaling": 2.0},
    ),
    "StableLM": ("StableLmConfig", COMMON),
    "Nemotron": ("NemotronConfig", COMMON),
    "Cohere": ("CohereConfig", COMMON),
    "Cohere-2": ("Cohere2Config", COMMON | MIXED),
    "GLM-4": ("Glm4Config", COMMON | {"head_dim": 8}),
    "ERNIE-4.5": ("Ernie4_5Config", COMMON | {"head_dim": 8}),
    "EXAONE-4": ("Exaone4Config", COMMON | MIXED),
    "SmolLM3": ("SmolLM3Config", COMMON | {"num_hidden_layers": 4}),
    "Starcoder2": ("Starcoder2Config", COMMON | SLIDING),
    "GPT-NeoX": ("GPTNeoXConfig", COMMON),
    "GPT-2": ("GPT2Config", GPT2_STYLE),
    "GPT-J": ("GPTJConfig", GPT2_STYLE | {"rotary_dim": 4}),
    "GPT-BigCode": ("GPTBigCodeConfig", GPT2_STYLE),
    "OPT": (
        "OPTConfig",
        {
            "vocab_size": VOCAB,
            "hidden_size": 32,
            "word_embed_proj_dim": 32,
            "ffn_dim": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "max_position_embeddings": MAX_LEN,
            "init_std": 0.3,
        },
    ),
    "Persimmon": ("PersimmonConfig", COMMON),
    "gpt-oss": (
        "GptOssConfig",
        COMMON
        | MIXED
        | {"head_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 2}
        | {"layer_types": ["sliding_attention", "full_attention"] * 2}
        | rope("yarn", factor=4.0, original_max_position_embeddings=32),
    ),
}


def make_network(
    name: str, dtype: torch.dtype = torch.float32, **changes
) -> transformers.PreTrainedModel:
    config_class, settings = SUPPORTED[name]
    torch.manual_seed(0)
    config = getattr(transformers, config_class)(**settings | changes)
    return transformers.AutoModelForCausalLM.from_config(
        config, attn_implementation="eager", dtype=dtype
    )


def make_tokenizer() -> transformers.PreTrainedTokenizerFast:
    """One token a character of ASCII, and "te", as many as a tiny model has; no chat template."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    pieces = ["<pad>", "<s>", "</s>", *alphabet[: VOCAB - 4], "te"]
    vocabulary = {piece: token_id for token_id, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.BPE(vocabulary, [("t", "e")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<s>", eos_token="</s>"
    )


def load(name: str, dtype: torch.dtype = torch.float32, **arguments) -> LoadedModel:
    network = make_network(name, dtype)
    arguments = {"block_size": BLOCK, "max_model_len": MAX_LEN} | arguments
    return prepare_model(network, None, name=name, **arguments)


def eager_logits(loaded: LoadedModel, token_ids: list[int]) -> torch.Tensor:
    loaded.model.set_attn_implementation("eager")
    try:
        with torch.inference_mode():
            ids = torch.tensor([token_ids])
            return loaded.model(input_ids=ids, use_cache=False).logits[0].float()
    finally:
        loaded.model.set_attn_implementation(PAGED)


def tokens(count: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, VOCAB, (count,), generator=generator).tolist()


def assert_close(got: torch.Tensor, expected: torch.Tensor, tolerance: float = 1e-4) -> None:
    assert got.shape == expected.shape
    spread = expected.max() - expected.min()
    assert (got - expected).abs().max() <= tolerance * spread


class Eager:
    """transformers' own forward in float32: no packing, no chunks, no cache of any kind.

    Frequencies that depend on the length are frozen for ``max_model_len``, as ours are.
    """

    def __init__(self, network: transformers.PreTrainedModel, max_model_len: int) -> None:
        network.eval().requires_grad_(False).set_attn_implementation("eager")
        freeze_rope(network, max_model_len)
        self._network = network

    def logits(self, token_ids: list[int]) -> torch.Tensor:
        """[len(token_ids), vocab_size]: behind each token."""
        with torch.inference_mode():
            return self._network(torch.tensor([token_ids]), use_cache=False).logits[0].float()

    def narrowest_choice(self, token_ids: list[int]) -> float:
        """Between the last expert that a router takes and the first that it does not, the least
        difference of their scores, as a part of the range of scores; infinite without routers."""
        gaps = [math.inf]

        def look(router: torch.nn.Module, inputs: tuple[torch.Tensor, ...], _: object) -> None:
            bias = getattr(router, "bias", None)
            scores = torch.nn.functional.linear(inputs[0], router.weight, bias).flatten(0, -2)
            ranked = scores.sort(-1, descending=True).values
            gap = ranked[:, router.top_k - 1] - ranked[:, router.top_k]
            gaps.append(float((gap / (ranked[:, 0] - ranked[:, -1])).min()))

        routers = [m for m in self._network.modules() if type(m).__name__.endswith("TopKRouter")]
        hooks = [router.register_forward_hook(look) for router in routers]
        self.logits(token_ids)
        for hook in hooks:
            hook.remove()
        return min(gaps)

    def assert_answer(
        self, prompt: list[int], answer: CompletionOutput, *, is_greedy: bool = True
    ) -> bool:
        """The answer, asked with the logprobs of every token, is what this model says.

        Returns whether that can be told: not where a router has to choose between two experts whose
        scores are equal to 1e-5 of their range. Rounding decides there, and everything behind is
        another's work.

        If it is greedy, each of its tokens is the best one behind those before it, which makes the
        whole the greedy answer, unless the two best lie within 1e-4 of the logits' range: matrix
        products change by about 4e-5 with the number of rows, so there either of the two is right.
        The logits behind the tokens that were chosen are compared at every step, after such a one
        too.
        """
        given = answer.token_ids
        logits = self.logits(prompt + given[:-1])[len(prompt) - 1 :]
        assert answer.logprobs is not None
        got = torch.tensor([[row[i].logprob for i in range(len(row))] for row in answer.logprobs])
        try:
            assert_close(got, logits.log_softmax(-1))
        except AssertionError:
            if self.narrowest_choice(prompt + given[:-1]) < 1e-5:
                return False
            raise
        if not is_greedy:
            return True
        for step, (token, row) in enumerate(zip(given, logits, strict=True)):
            best = row.topk(2)
            gap = (best.values[0] - best.values[1]) / (row.max() - row.min())
            allowed = best.indices.tolist() if gap < 1e-4 else best.indices[:1].tolist()
            assert token in allowed, f"token {step}: {token} instead of one of {allowed}"
        return True

"""Models and tokenizers out of ``.gguf`` files, written here as llama.cpp writes them."""

import pytest
import torch
from architectures import Eager, make_network, tokens
from gguf import MODEL_ARCH, GGUFWriter, TokenType, get_tensor_name_map
from tokenizers import pre_tokenizers

from engine import LLM, SamplingParams
from engine.model.identity import model_identity, read_checkpoint
from engine.model.source import resolve_model

pytestmark = pytest.mark.usefixtures("one_torch_thread")

EVERY_LOGPROB = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True, logprobs=-1)
# What transformers takes for granted instead of reading it.
NOT_READ = {"GPT-2": {"n_positions": 1024}, "Qwen3": {"head_dim": 128}}
# Matrices of GPT-2 lie the other way round in a file.
TRANSPOSED = ("c_attn.weight", "c_proj.weight", "c_fc.weight")


def llama_rows(tensor: torch.Tensor, num_heads: int) -> torch.Tensor:
    """llama.cpp rotates neighbouring rows of a head, transformers its halves."""
    halves = tensor.view(num_heads, 2, -1, *tensor.shape[1:])
    return halves.transpose(1, 2).reshape(tensor.shape)


def write_gguf(path, name: str) -> torch.nn.Module:
    """The tiny model of this name as a file with a byte-level tokenizer; returns the model."""
    network = make_network(name, **NOT_READ.get(name, {}))
    config = network.config
    arch = config.model_type
    writer = GGUFWriter(path, arch)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_head_count(config.num_attention_heads)
    if arch == "gpt2":
        writer.add_feed_forward_length(4 * config.hidden_size)
        writer.add_layer_norm_eps(config.layer_norm_epsilon)
    else:
        writer.add_feed_forward_length(config.intermediate_size)
        writer.add_head_count_kv(config.num_key_value_heads)
        writer.add_layer_norm_rms_eps(config.rms_norm_eps)
        writer.add_rope_freq_base(10000.0)
        writer.add_vocab_size(config.vocab_size)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    pieces = ["<pad>", "<s>", "</s>", *alphabet[: config.vocab_size - 4], "te"]
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(pieces)
    writer.add_token_types([TokenType.CONTROL] * 3 + [TokenType.NORMAL] * (len(pieces) - 3))
    writer.add_token_merges(["t e"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    names = get_tensor_name_map(
        next(each for each in MODEL_ARCH if each.name == arch.upper()), config.num_hidden_layers
    )
    for key, tensor in network.state_dict().items():
        if key == "lm_head.weight" and config.tie_word_embeddings:
            continue
        if arch == "gpt2" and key.endswith(TRANSPOSED):
            tensor = tensor.T
        if arch == "llama" and key.endswith(("q_proj.weight", "k_proj.weight")):
            is_query = key.endswith("q_proj.weight")
            heads = config.num_attention_heads if is_query else config.num_key_value_heads
            tensor = llama_rows(tensor, heads)
        writer.add_tensor(names.get_name(key, (".weight", ".bias")), tensor.contiguous().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return network


@pytest.mark.parametrize("name", ["Llama", "Llama, tied", "Qwen2", "Qwen3", "GPT-2"])
def test_a_gguf_file_answers_as_the_model_it_was_made_of(name, tmp_path):
    network = write_gguf(tmp_path / "tiny.gguf", name)
    settings = {"dtype": "float32", "device_cache": "4MiB", "max_model_len": 96}
    checkpoint = read_checkpoint(resolve_model(str(tmp_path / "tiny.gguf")))
    from_file = model_identity(checkpoint, dtype="float32", block_size=16, frozen_rope={})
    with LLM(str(tmp_path / "tiny.gguf"), **settings) as llm:
        assert llm._loaded.identity == from_file
        (said,) = llm.generate("(text)", EVERY_LOGPROB)
        pieces = ["(", "te", "x", "t", ")"]
        assert said.prompt_token_ids[-5:] == llm.tokenizer.convert_tokens_to_ids(pieces)
        prompt = tokens(45, 3)
        for _ in range(2):
            (output,) = llm.generate([prompt], EVERY_LOGPROB)
            assert Eager(network, 96).assert_answer(prompt, output.outputs[0])
        assert output.num_cached_tokens == len(prompt) - 1

"""Random models that load in no time, for tests of the engine and of the command."""

from pathlib import Path

import tokenizers
import torch
import transformers


def save_tiny_model(
    path: Path, seed: int = 0, *, vocab_size: int = 128, eos_token_id: int = 2
) -> Path:
    """A random Llama whose greedy text varies: with the default range it repeats one token."""
    config = transformers.LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        initializer_range=0.3,
        bos_token_id=1,
        eos_token_id=eos_token_id,
    )
    torch.manual_seed(seed)
    transformers.LlamaForCausalLM(config).save_pretrained(path)
    return path


CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def save_text_model(path: Path) -> Path:
    """A random Llama that reads and writes bytes: every text is that many tokens, and a character
    beyond ASCII takes several."""
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    tokenizer = tokenizers.Tokenizer(
        tokenizers.models.BPE({character: i for i, character in enumerate(alphabet)}, [])
    )
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        additional_special_tokens=["<|im_start|>"],
        chat_template=CHAT_TEMPLATE,
    )
    fast.save_pretrained(path)
    return save_tiny_model(path, vocab_size=len(fast), eos_token_id=fast.eos_token_id)

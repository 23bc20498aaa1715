"""From logits to tokens, by vLLM's parameters."""

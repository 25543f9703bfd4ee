"""Tiny models with random weights, made from transformers' own configurations, and random prompts."""

import torch
import transformers

COMMON = dict(vocab_size=300, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
              head_dim=32, max_position_embeddings=4096, pad_token_id=0, bos_token_id=1, eos_token_id=None)
LLAMA3_ROPE = {"rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
               "original_max_position_embeddings": 512}
YARN_ROPE = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 1024}


def config(name, **changes):
    make = {
        "llama": lambda: transformers.LlamaConfig(**{**COMMON, **changes}),
        "llama3": lambda: transformers.LlamaConfig(**{**COMMON, "rope_parameters": LLAMA3_ROPE, **changes}),
        "yarn": lambda: transformers.LlamaConfig(**{**COMMON, "rope_parameters": YARN_ROPE, **changes}),
        "mistral": lambda: transformers.MistralConfig(**{**COMMON, "sliding_window": None, **changes}),
        "qwen2": lambda: transformers.Qwen2Config(**{**COMMON, **changes}),
        "qwen3": lambda: transformers.Qwen3Config(**{**COMMON, **changes}),
        # Full and sliding layers with rotary embeddings of their own, and a scale of logits that is not 1 / sqrt(32).
        "gemma3": lambda: transformers.Gemma3TextConfig(**{
            **COMMON, "num_hidden_layers": 4, "sliding_window": 64, "query_pre_attn_scalar": 16,
            "layer_types": ["sliding_attention", "full_attention"] * 2, **changes}),
    }
    return make[name]()


NAMES = ("llama", "llama3", "yarn", "mistral", "qwen2", "qwen3", "gemma3")


def model(name, seed=0, **changes):
    torch.manual_seed(seed)
    made = transformers.AutoModelForCausalLM.from_config(config(name, **changes), attn_implementation="sdpa").eval()
    with torch.no_grad():
        for parameter in made.parameters():
            if parameter.ndim == 1:  # biases and norms are 0 and 1 otherwise, which hides mistakes
                parameter += 0.1 * torch.randn_like(parameter)
    return made


def tokens(count, batch=1, seed=1):
    return torch.randint(2, COMMON["vocab_size"], (batch, count), generator=torch.Generator().manual_seed(seed))

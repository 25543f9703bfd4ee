"""The rotary embedding of a transformers model as an anchorkv.Rope."""

import torch

import anchorkv

# Positions of the table; its memory is 32 bytes per position and 64 pairs of coordinates.
MIN_POSITIONS = 1 << 18
# Angles are computed in double here and in float there: at the positions looked at, cosines agree far closer than this.
TOLERANCE = 1e-3


def text_model(model):
    """The module that holds the decoder's layers and rotary embedding."""
    for candidate in (getattr(model, "model", None), model):
        candidate = getattr(candidate, "language_model", candidate)
        if hasattr(candidate, "rotary_emb"):
            return candidate
    raise ValueError(f"{type(model).__name__} has no rotary embedding where the supported models have it")


def rope_of(model, config, layer_type):
    """The table of layers of that type (for models that have one per type, as Gemma 3), checked against the module."""
    module = text_model(model).rotary_emb
    per_type = hasattr(module, f"{layer_type}_inv_freq")
    prefix = f"{layer_type}_" if per_type else ""
    kind = module.rope_type[layer_type] if isinstance(getattr(module, "rope_type", None), dict) else getattr(module, "rope_type", "default")
    if kind in ("dynamic", "longrope"):
        raise ValueError(f"the rotary embedding is '{kind}', whose frequencies depend on the prompt's length; "
                         "supported are default, linear, yarn and llama3")
    frequencies = getattr(module, f"{prefix}inv_freq").detach().double().cpu().tolist()
    heads = config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    rope = anchorkv.Rope(head_dim, frequencies=frequencies, rotary_dim=2 * len(frequencies),
                         magnitude=float(getattr(module, f"{prefix}attention_scaling", 1.0)),
                         max_position=max(MIN_POSITIONS, 2 * int(getattr(config, "max_position_embeddings", 0) or 0)))
    check(rope, module, (layer_type,) if per_type else (), len(frequencies))
    return rope


def check(rope, module, arguments, pairs):
    """Our table against the module's own cosines and sines: a vector with ones in the first half of the pairs turns
    into cosines in the first half and sines in the second."""
    device = next((b.device for b in module.buffers()), torch.device("cpu"))
    for position in (0, 1, 61, 1000):
        cos, sin = module(torch.zeros(1, device=device), torch.tensor([[position]], device=device), *arguments)
        ones = torch.zeros(1, 1, rope.head_dim)
        ones[..., :pairs] = 1.0
        turned = torch.from_numpy(rope.rotate(ones, position))[0, 0]
        expected = torch.cat([cos[0, 0, :pairs], sin[0, 0, :pairs]]).float().cpu()
        difference = (turned[:2 * pairs] - expected).abs().max().item()
        if not difference < TOLERANCE:
            raise ValueError(f"{type(module).__name__} at position {position} differs by {difference:.2g} from the rotary "
                             "embedding that its frequencies describe; this model is not supported")

"""AnchorKV as a press of NVIDIA's kvpress, to compare its quality with other methods by their scripts.

Each layer of the context is compressed and rebuilt at once: the press saves no memory and its speed says nothing. For
both use anchorkv.hf. docs/python.md.
"""

import dataclasses

import torch

try:
    from kvpress import BasePress
    from kvpress.utils import get_prerope_query_states
except ImportError as error:
    raise ImportError(f"anchorkv.kvpress needs kvpress: pip install kvpress ({error})") from error

import anchorkv

from .rotary import rope_of


@dataclasses.dataclass
class AnchorKVPress(BasePress):
    """compression_ratio: the share of the 16-bit bytes that is saved, as in kvpress: 0.9 keeps a tenth. profile and
    options: as anchorkv.compress. Contexts not longer than the window stay exact."""

    compression_ratio: float = 0.0
    profile: str = "adaptive"
    options: dict = dataclasses.field(default_factory=dict)

    def __post_init__(self):
        self._rope = None

    def post_init_from_model(self, model):
        config = model.config.get_text_config(decoder=True)
        self._rope = rope_of(model, config, "full_attention")

    def compress(self, module, hidden_states, keys, values, attentions, kwargs):
        if not 0.0 <= self.compression_ratio < 1.0:
            raise ValueError(f"compression_ratio is {self.compression_ratio}; it must be at least 0 and below 1")
        window = int(self.options.get("window", 32))
        if self.compression_ratio == 0.0 or keys.shape[2] <= window:
            return keys, values
        queries = self.window_queries(module, hidden_states, kwargs["position_embeddings"], window)
        new_keys, new_values = torch.empty_like(keys), torch.empty_like(values)
        for b in range(keys.shape[0]):
            segment = anchorkv.compress(
                keys[b].detach().float().cpu(), values[b].detach().float().cpu(), queries[b], self._rope,
                ratio=1.0 / (1.0 - self.compression_ratio), profile=self.profile, rotated=True, layer=module.layer_idx, **self.options)
            for to, rebuilt in zip((new_keys[b], new_values[b]), segment.dequantize()):
                to.copy_(torch.from_numpy(rebuilt))
        return new_keys, new_values

    @staticmethod
    def window_queries(module, hidden_states, position_embeddings, window):
        """Queries of the last positions after RoPE, [batch, q_heads, window, head_dim] float32. The library divides
        logits by sqrt(head_dim); a model's own scale goes into the queries."""
        queries = get_prerope_query_states(module, hidden_states[:, -window:]).float()
        cos, sin = (x[:, -window:].float().unsqueeze(1) for x in position_embeddings)
        half = queries.shape[-1] // 2
        turned = torch.cat([-queries[..., half:], queries[..., :half]], dim=-1)
        scale = getattr(module, "scaling", queries.shape[-1] ** -0.5) * queries.shape[-1] ** 0.5
        return ((queries * cos + turned * sin) * scale).detach().cpu()

"""The attention and mask functions `anchorkv` of transformers.

Layers of an AnchorKVCache answer for themselves; every other cache gets transformers' own sdpa attention.
"""

import weakref

import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

NAME = "anchorkv"
# Attribute of the keys that a layer's `update` returns: the layer. The attention function is shown no cache.
LAYER = "_anchorkv_layer"


def attention(module, query, key, value, attention_mask, dropout=0.0, scaling=None, **kwargs):
    """query [batch, q_heads, n, head_dim], key and value [batch, kv_heads, rows, head_dim], all after RoPE; returns
    ([batch, n, q_heads, head_dim], None)."""
    layer = getattr(key, LAYER, None)
    if layer is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs)
    for name in ("softcap", "s_aux", "position_bias"):
        if kwargs.get(name) is not None:
            raise ValueError(f"{type(module).__name__} uses {name} in attention, which AnchorKVCache does not support")
    return layer.attend(module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs), None


def register():
    AttentionInterface.register(NAME, attention)
    # Without a mask function of its own a registered attention would get no mask at all, which is wrong with padding.
    # A compressed layer's get_mask_sizes leaves the compressed part out: it holds no padding and nothing to mask.
    AttentionMaskInterface.register(NAME, sdpa_mask)


class _LastMask:
    """All layers of a step get the same mask: it is looked at once."""

    def __init__(self):
        self.mask = lambda: None
        self.rows = 0
        self.causal = None

    def is_causal(self, mask, rows):
        if self.mask() is not mask or self.rows != rows:
            visible = as_bool(mask)[..., -rows:]
            n = visible.shape[-2]
            expected = torch.ones(n, rows, dtype=torch.bool, device=mask.device).tril(rows - n)
            self.causal = bool((visible == expected).all())
            self.mask, self.rows = weakref.ref(mask), rows
        return self.causal


_last_mask = _LastMask()


def as_bool(mask):
    """True where a key is seen; additive masks have the most negative number elsewhere."""
    return mask if mask.dtype == torch.bool else mask > torch.finfo(mask.dtype).min / 2


def is_plainly_causal(mask, rows):
    """Whether each of the last tokens sees all `rows` rows up to its own."""
    return mask is None or _last_mask.is_causal(mask, rows)


def merged_attention(query, outputs, lses, keys, values, mask, scaling):
    """Attention over a compressed part, given by its output [batch, q_heads, n, head_dim] and lse [batch, q_heads, n],
    and the rows of a tail that the mask shows: the plain way, for masks with holes. float32."""
    ratio = query.shape[1] // keys.shape[1]
    keys = keys.float().repeat_interleave(ratio, dim=1)
    values = values.float().repeat_interleave(ratio, dim=1)
    logits = query.float() @ keys.transpose(-1, -2) * scaling
    logits = logits.masked_fill(~as_bool(mask)[..., -keys.shape[-2]:], float("-inf"))
    lse = torch.logaddexp(torch.logsumexp(logits, dim=-1), lses)
    return torch.exp(lses - lse)[..., None] * outputs + torch.exp(logits - lse[..., None]) @ values

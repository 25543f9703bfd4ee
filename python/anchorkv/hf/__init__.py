"""A compressed cache for Hugging Face transformers. docs/python.md.

    from anchorkv.hf import AnchorKVCache

    cache = AnchorKVCache(model, ratio=20)
    output = model.generate(**inputs, past_key_values=cache)
    print(cache.report())
"""

try:
    import torch  # noqa: F401
    import transformers
except ImportError as error:
    raise ImportError(f"anchorkv.hf needs torch and transformers: pip install 'anchorkv[hf]' ({error})") from error

for _name in ("AttentionInterface", "AttentionMaskInterface"):
    if not hasattr(transformers, _name):
        raise ImportError(
            f"transformers {transformers.__version__} has no {_name}; anchorkv.hf is made for 5.16 to 5.24")

from .attention import NAME as ATTENTION_NAME
from .attention import register
from .cache import AnchorKVCache
from .report import CacheReport

register()

__all__ = ["ATTENTION_NAME", "AnchorKVCache", "CacheReport"]

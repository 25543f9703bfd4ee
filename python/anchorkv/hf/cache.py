"""AnchorKVCache: a transformers cache whose full-attention layers are compressed when the prompt has been read."""

import hashlib
import json

import torch
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

import anchorkv
import anchorkv.cuda

from .attention import LAYER, NAME, as_bool, is_plainly_causal, merged_attention
from .report import CacheReport
from ..rotary import rope_of

SUPPORTED = ("llama", "mistral", "qwen2", "qwen3", "gemma3_text", "gemma3")
WHEN = ("prompt", "decode", "manual")


class AnchorKVCache(Cache):
    """A cache for one batch of sequences of `model`.

    The prompt is read with exact keys and values. Then each full-attention layer is compressed to at most 1 / ratio of
    its 16-bit size and the exact tensors are freed; new tokens go to an exact tail. Sliding-window layers stay as
    transformers has them. Sets the model's attention implementation to `anchorkv`, which is sdpa for every other cache.

    ratio, profile, options: as anchorkv.compress.
    compress: 'prompt', in each layer as soon as the first call has attended there, so that at most one layer of a
    prompt is dense beside the layers that are compressed already; 'decode', before the first call of one token, for
    prompts that are read in chunks; 'manual', by compress().
    min_tokens: a batch with a shorter prompt stays exact; report() says so.
    """

    def __init__(self, model, ratio=4.0, profile="adaptive", *, compress="prompt", min_tokens=512, **options):
        if compress not in WHEN:
            raise ValueError(f"compress is {compress!r}; allowed are {', '.join(WHEN)}")
        if min_tokens < 0:
            raise ValueError(f"min_tokens is {min_tokens}; it must not be negative")
        config = model.config.get_text_config(decoder=True)
        if config.model_type not in SUPPORTED:
            raise ValueError(f"model type '{config.model_type}' is not supported; supported are {', '.join(SUPPORTED)}")
        for name in ("attn_logit_softcapping", "attention_chunk_size"):
            if getattr(config, name, None) is not None:
                raise ValueError(f"the model has {name} {getattr(config, name)}, which AnchorKVCache does not support")
        # Ratio, profile and names of options are checked before a long prompt is read.
        self._check_options(config, ratio, profile, options)
        policy = Policy(ratio, profile, options, compress, min_tokens, int(options.get("window", 32)))
        rope = None
        layers = []
        for index, layer in enumerate(DynamicCache(config=model.config).layers):
            if type(layer) is DynamicLayer:
                rope = rope or rope_of(model, config, "full_attention")
                layers.append(AnchorLayer(index, rope, policy))
            elif isinstance(layer, DynamicSlidingWindowLayer):
                layers.append(layer)
            else:
                raise ValueError(f"layer {index} has a cache of type {type(layer).__name__}; AnchorKVCache handles full and "
                                 "sliding-window attention only")
        if rope is None:
            raise ValueError("every layer has a sliding window: there is nothing to compress")
        super().__init__(layers=layers)
        self._fingerprint = fingerprint(model, config)
        self._marks = {}  # of sliding layers: keys, values and length at the end of the prompt
        self._set_attention(model)

    @staticmethod
    def _check_options(config, ratio, profile, options):
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        # At the length at which any feasible ratio is reached.
        anchorkv.estimate(1, config.num_key_value_heads, head_dim, 1 << 20,
                          ratio=ratio, profile=profile, **{**options, "anchors": 0})

    @staticmethod
    def _set_attention(model):
        config = model.config.get_text_config(decoder=True)
        if config._attn_implementation != NAME:
            model.set_attn_implementation(NAME)
        if config._attn_implementation != NAME:
            raise ValueError(f"{type(model).__name__} did not take the attention implementation '{NAME}'; its own is "
                             f"'{config._attn_implementation}'")

    def compress(self):
        """Compresses what is still dense (compress='decode' or 'manual'), whatever its length. ValueError where it
        cannot be done; layers compressed before stay compressed."""
        for layer in self._anchor_layers():
            layer.compress()
        for index, layer in enumerate(self.layers):
            if not isinstance(layer, AnchorLayer) and layer.is_initialized:
                self._mark(index)

    def rewind(self):
        """Back to the end of the compressed prompt, exactly: the next question starts from the same context."""
        for layer in self._anchor_layers():
            if layer.segments is None:
                raise ValueError("there is no compressed prompt to go back to: " + (layer.reason or "nothing has been read yet"))
        for index, layer in enumerate(self.layers):
            if isinstance(layer, AnchorLayer):
                layer.crop_to(layer.prompt_tokens)
            else:
                layer.keys, layer.values, layer.cumulative_length = self._marks[index]

    def update(self, key_states, value_states, layer_idx, *args, **kwargs):
        layer = self.layers[layer_idx]
        if isinstance(layer, AnchorLayer):
            return super().update(key_states, value_states, layer_idx, *args, **kwargs)
        # rewind() needs what a sliding layer held at the end of the prompt. Its tensors are replaced, never written, so
        # that keeping them is enough.
        first = next(self._anchor_layers())
        if first.compresses_before(key_states):
            self._mark(layer_idx)
        out = super().update(key_states, value_states, layer_idx, *args, **kwargs)
        if first.segments is None and not first.compresses_before(key_states):
            self._mark(layer_idx)
        elif first.segments is not None and first.prompt_tokens == layer.get_seq_length():
            self._mark(layer_idx)
        return out

    def _mark(self, index):
        layer = self.layers[index]
        self._marks[index] = (layer.keys, layer.values, layer.cumulative_length)

    def save(self, path):
        """Writes the compressed prompt to a file, whole or not at all: AnchorKVCache.load goes on from it without reading
        the prompt again. For one sequence, without padding, of a model without sliding-window layers; what came after the
        prompt is not stored."""
        layers = list(self._anchor_layers())
        if len(layers) != len(self.layers):
            raise ValueError("a cache with sliding-window layers cannot be saved")
        if any(layer.segments is None for layer in layers):
            raise ValueError("there is no compressed prompt to save: " + (layers[0].reason or "nothing has been read yet"))
        segments = [layer.segments[0] for layer in layers]
        if layers[0].batch != 1 or segments[0].tokens != layers[0].prompt_tokens:
            raise ValueError(f"a cache of {layers[0].batch} sequences; one without padding can be saved")
        on_host = [s.cpu() if hasattr(s, "cpu") else s for s in segments]
        anchorkv.save(str(path), on_host, json.dumps({"kind": "anchorkv.hf", "model": self._fingerprint}))

    @classmethod
    def load(cls, model, path):
        """The cache that save() wrote, for the same model; ValueError for another one. The next token is the one behind
        the prompt."""
        segments, note = anchorkv.load_with_note(str(path))
        cache = cls(model)
        layers = list(cache._anchor_layers())
        stored = json.loads(note) if note.startswith("{") else {}
        if stored.get("kind") != "anchorkv.hf":
            raise ValueError(f"{path} was not written by AnchorKVCache.save")
        if stored.get("model") != cache._fingerprint or len(layers) != len(cache.layers) or len(segments) != len(layers):
            raise ValueError(f"{path} was made with another model or other weights")
        parameter = next(model.parameters())
        for layer, segment in zip(layers, segments):
            layer.restore(segment, parameter.dtype, parameter.device)
        return cache

    def crop(self, tokens):
        """Negative: removes so many tokens from the end. Positive: keeps so many. Exact inside the tail and at its
        start; inside the compressed prompt it is refused."""
        length = self.get_seq_length()
        keep = length + tokens if tokens <= 0 else min(tokens, length)
        if keep == length:
            return
        for layer in self._anchor_layers():
            layer.check_crop(keep)
        for layer in self.layers:
            if isinstance(layer, AnchorLayer):
                layer.crop_to(keep)
            else:
                layer.crop(keep - length)

    def reorder_cache(self, beam_idx):
        raise ValueError("beam search is not supported by AnchorKVCache; num_beams must be 1")

    def report(self):
        """A CacheReport: bytes as counted from the buffers. print() gives one line."""
        parts = [layer.bill() if isinstance(layer, AnchorLayer) else sliding_bill(layer, self._marks.get(index))
                 for index, layer in enumerate(self.layers)]
        first = next(self._anchor_layers())
        return CacheReport(
            tokens=self.get_seq_length(), sequences=first.batch, layers=len(self.layers),
            layers_compressed=sum(layer.segments is not None for layer in self._anchor_layers()),
            layers_sliding=sum(not isinstance(layer, AnchorLayer) for layer in self.layers),
            skipped_reason=first.reason,
            dense_bytes=sum(p[0] for p in parts), segment_bytes=sum(p[1] for p in parts),
            exact_bytes=sum(p[2] for p in parts), reserved_bytes=sum(p[3] for p in parts))

    def _anchor_layers(self):
        return (layer for layer in self.layers if isinstance(layer, AnchorLayer))


def fingerprint(model, config):
    """Tells models apart: what shapes keys and values, and samples of every layer's weights that make them."""
    digest = hashlib.sha256()
    named = ("model_type", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim", "rope_parameters")
    digest.update(json.dumps({name: repr(getattr(config, name, None)) for name in named}).encode())
    for name, parameter in model.named_parameters():
        if name.endswith(("k_proj.weight", "v_proj.weight", "embed_tokens.weight")):
            rows = parameter.detach()[:: max(1, parameter.shape[0] // 8)][:8, :64]
            digest.update(rows.float().cpu().numpy().tobytes())
    return digest.hexdigest()


class Policy:
    def __init__(self, ratio, profile, options, when, min_tokens, window):
        self.ratio, self.profile, self.options = ratio, profile, options
        self.when, self.min_tokens, self.window = when, min_tokens, window


class AnchorLayer(CacheLayerMixin):
    """One layer. First `keys` and `values` are dense [batch, kv_heads, tokens, head_dim]; once compressed they are the
    exact tail's rows in use, and `segments` has one anchorkv.Segment per sequence."""

    is_compileable = False
    is_croppable = False
    is_sliding = False
    supports_early_init = False

    def __init__(self, index, rope, policy):
        super().__init__()
        self.index, self.rope, self.policy = index, rope, policy
        self._empty()

    def _empty(self):
        self.keys = self.values = None
        self.is_initialized = False
        self.queries = None  # [batch, q_heads, up to window of the last tokens, head_dim] while dense
        self.visible = None  # [batch, tokens] bool while dense, or None: no padding
        self.scaling = None
        self.segments = None
        self.prompt_tokens = 0  # in the segments, padding included
        # 'empty', 'reading' (dense, to be compressed later), 'exact' (dense, not worth compressing), 'compressed'
        self.state = "empty"
        self.batch = 0
        self.reason = ""
        self.tail_rows = 0
        self._buffer = None

    # --- What transformers asks a layer

    def lazy_initialization(self, key_states, value_states):
        self.dtype, self.device = key_states.dtype, key_states.device
        self.batch = key_states.shape[0]
        self._check_device()
        self.is_initialized = True

    def _check_device(self):
        if self.device.type not in ("cpu", "cuda") or (self.device.type == "cuda" and not anchorkv.cuda.available):
            raise ValueError(f"the model is on {self.device}, and this build of anchorkv is for the CPU; for NVIDIA GPUs: "
                             "pip install . -C cmake.define.ANCHORKV_ENABLE_CUDA=ON")

    def update(self, key_states, value_states, *args, **kwargs):
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        if key_states.shape[0] != self.batch:
            raise ValueError(f"a batch of {key_states.shape[0]} sequences for a cache of {self.batch}")
        if self.compresses_before(key_states):
            self._compress_if_long_enough()
        if self.segments is not None:
            keys, values = self._append(key_states, value_states)
        else:
            if self.keys is None:
                self.keys, self.values = key_states, value_states
            else:
                self.keys = torch.cat([self.keys, key_states], dim=-2)
                self.values = torch.cat([self.values, value_states], dim=-2)
            keys, values = self.keys, self.values
        keys = keys[...]  # an object of its own: the attribute must not make the layer keep itself alive
        setattr(keys, LAYER, self)
        return keys, values

    def compresses_before(self, key_states):
        """Whether these new tokens end a prompt that was read in chunks."""
        return self.state == "reading" and self.policy.when == "decode" and key_states.shape[-2] == 1

    def get_seq_length(self):
        if self.segments is not None:
            return self.prompt_tokens + self.tail_rows
        return 0 if self.keys is None else self.keys.shape[-2]

    def get_mask_sizes(self, query_length):
        # Of a compressed layer only the tail is masked.
        if self.segments is not None and not isinstance(query_length, torch.Tensor):
            return self.tail_rows + query_length, self.prompt_tokens
        return self.get_seq_length() + query_length, 0

    def get_max_length(self):
        return -1

    get_max_cache_shape = get_max_length  # its name before 5.20

    def reset(self):
        self._empty()

    def reorder_cache(self, beam_idx):
        raise ValueError("beam search is not supported by AnchorKVCache; num_beams must be 1")

    def batch_repeat_interleave(self, repeats):
        self._select(torch.arange(self.batch).repeat_interleave(repeats))

    def batch_select_indices(self, indices):
        indices = torch.as_tensor(indices)
        self._select(indices.nonzero()[:, 0] if indices.dtype == torch.bool else indices)

    def _select(self, rows):
        """Sequences by number, the same one more than once too: segments are shared."""
        for name in ("keys", "values", "queries", "visible", "_buffer"):
            tensor = getattr(self, name)
            if tensor is not None:
                axis = 1 if name == "_buffer" else 0
                setattr(self, name, tensor.index_select(axis, rows.to(tensor.device)))
        if self.segments is not None:
            self.segments = [self.segments[i] for i in rows.tolist()]
            self._use_rows(self.tail_rows)
        self.batch = len(rows)

    def check_crop(self, keep):
        if keep < 0 or (self.segments is not None and keep < self.prompt_tokens):
            raise ValueError(f"cannot keep {keep} of {self.get_seq_length()} tokens: the first {self.prompt_tokens} are "
                             "compressed as a whole")

    def crop_to(self, keep):
        self.check_crop(keep)
        if self.segments is not None:
            self._use_rows(keep - self.prompt_tokens)
        elif self.keys is not None:
            self.keys, self.values = self.keys[..., :keep, :], self.values[..., :keep, :]
            self.visible = None if self.visible is None else self.visible[:, :keep]
            self.queries = None  # of tokens that may be gone

    # --- Attention

    def attend(self, module, query, key, value, mask, dropout=0.0, scaling=None, **kwargs):
        scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
        if self.segments is not None:
            return self._attend_compressed(query, mask, scaling)
        from transformers.integrations.sdpa_attention import sdpa_attention_forward
        out, _ = sdpa_attention_forward(module, query, key, value, mask, dropout=dropout, scaling=scaling, **kwargs)
        self._observe(query, mask, scaling)
        if self.state == "empty" and self.policy.when == "prompt":
            self._compress_if_long_enough()
        elif self.state == "empty":
            self.state = "reading"
            self.reason = "compress() has not been called" if self.policy.when == "manual" else "the prompt is being read"
        return out

    def _observe(self, query, mask, scaling):
        """Keeps the window's queries and which tokens are padding."""
        tokens = self.keys.shape[-2]
        self.scaling = scaling
        if mask is None:
            seen = None
        else:
            # The last token sees every token that is not padding.
            seen = as_bool(mask)[:, 0, -1, -tokens:].expand(self.batch, -1)
        rows = query.detach()
        if self.queries is not None:
            rows = torch.cat([self.queries, rows], dim=-2)
        # Behind padding on the right the last real queries are further in front.
        padding = 0 if seen is None else int((~seen).sum(dim=-1).max())
        self.visible = seen if padding > 0 else None
        self.queries = rows[..., -(self.policy.window + padding):, :].clone()

    def _attend_compressed(self, query, mask, scaling):
        batch, q_heads, n, head_dim = query.shape
        if not is_plainly_causal(mask, self.tail_rows):
            parts, lses = self._attend_segments(query, scaling)
            merged = merged_attention(query, parts, lses, self.keys, self.values, mask, scaling)
            return merged.transpose(1, 2).to(query.dtype)
        if query.is_cuda:
            out = torch.empty(batch, n, q_heads, head_dim, dtype=query.dtype, device=query.device)
            for b, segment in enumerate(self.segments):
                anchorkv.cuda.attend(query[b], [segment], self.keys[b], self.values[b], scale=scaling, out=out[b].transpose(0, 1))
            return out
        out = torch.empty(batch, n, q_heads, head_dim, dtype=torch.float32)
        states = query.detach().float()
        for b, segment in enumerate(self.segments):
            anchorkv.attend(states[b], [segment], self.keys[b], self.values[b], scale=scaling, out=out[b].transpose(0, 1))
        return out.to(query.dtype)

    def _attend_segments(self, query, scaling):
        """Attention over the compressed part alone: (out [batch, q_heads, n, head_dim], lse [batch, q_heads, n])."""
        states = query.detach().float()
        parts, lses = torch.empty_like(states, memory_format=torch.contiguous_format), states.new_empty(states.shape[:3])
        for b, segment in enumerate(self.segments):
            if query.is_cuda:
                statistics = states.new_empty(2, states.shape[2], states.shape[1])
                anchorkv.cuda.attend(states[b], [segment], scale=scaling, out=parts[b], lse=statistics)
                lses[b] = (statistics[0] + statistics[1].log()).transpose(0, 1)
            else:
                _, lse = segment.attend(states[b], scale=scaling, out=parts[b])
                lses[b] = torch.from_numpy(lse)
        return parts, lses

    # --- Compression and the tail

    def _compress_if_long_enough(self):
        lengths = [self.keys.shape[-2]] * self.batch if self.visible is None else self.visible.sum(dim=-1).tolist()
        least = max(self.policy.min_tokens, self.policy.window + 1)
        if min(lengths) < least:
            self.reason = f"a prompt of {min(lengths)} tokens is shorter than {least}"
            self.state = "exact"
            return
        self.compress()

    def compress(self):
        if self.segments is not None:
            return
        if self.keys is None:
            raise ValueError("there is nothing to compress: no prompt has been read")
        if self.queries is None:
            raise ValueError("the queries of the last tokens are not known any more: the cache was cropped while dense")
        segments = []
        for b in range(self.batch):
            segments.append(self._compress_sequence(b))
        prompt_tokens = self.keys.shape[-2]
        self.keys = self.values = self.queries = self.visible = None
        self._become_compressed(segments, prompt_tokens)

    def restore(self, segment, dtype, device):
        """Becomes the compressed layer of one sequence that read segment.tokens tokens."""
        self.dtype, self.device, self.batch, self.is_initialized = dtype, device, 1, True
        self._check_device()
        self._become_compressed([on_device(segment, device)], segment.tokens)

    def _become_compressed(self, segments, prompt_tokens):
        self.segments, self.prompt_tokens = segments, prompt_tokens
        self.state, self.reason = "compressed", ""
        kv_heads, head_dim = segments[0].kv_heads, segments[0].head_dim
        # Kernels on the CPU read float32 and float16.
        kept = self.dtype if self.dtype == torch.float16 or self.device.type == "cuda" else torch.float32
        self._buffer = torch.empty(2, self.batch, kv_heads, 0, head_dim, dtype=kept, device=self.device)
        self._use_rows(0)

    def _compress_sequence(self, b):
        keys, values, queries = self.keys[b], self.values[b], self.queries[b]
        if self.visible is not None:
            real = self.visible[b]
            keys, values = keys[:, real], values[:, real]
            # As many queries were kept as there may be padding between them.
            queries = queries[:, real[-queries.shape[1]:]]
        queries = queries[:, -self.policy.window:].float()
        queries = queries * (self.scaling * queries.shape[-1] ** 0.5)
        policy = self.policy
        segment = anchorkv.compress(keys.detach().cpu(), values.detach().cpu(), queries.cpu(), self.rope, ratio=policy.ratio,
                                    profile=policy.profile, rotated=True, layer=self.index, **policy.options)
        return on_device(segment, keys.device)

    def _append(self, key_states, value_states):
        rows = self.tail_rows + key_states.shape[-2]
        capacity = self._buffer.shape[-2]
        if rows > capacity:
            # Grows by half, so that a token's cost does not depend on the tail's length.
            shape = list(self._buffer.shape)
            shape[-2] = max(rows, capacity + max(64, capacity // 2))
            grown = torch.empty(shape, dtype=self._buffer.dtype, device=self._buffer.device)
            grown[..., :self.tail_rows, :] = self._buffer[..., :self.tail_rows, :]
            self._buffer = grown
        self._buffer[0, :, :, self.tail_rows:rows] = key_states.detach()
        self._buffer[1, :, :, self.tail_rows:rows] = value_states.detach()
        self._use_rows(rows)
        return self.keys, self.values

    def _use_rows(self, rows):
        self.tail_rows = rows
        self.keys, self.values = self._buffer[0, ..., :rows, :], self._buffer[1, ..., :rows, :]

    def bill(self):
        """(dense bytes, segment bytes, exact bytes, reserved bytes)."""
        if self.keys is None:
            return 0, 0, 0, 0
        row = 4 * self.keys.shape[1] * self.keys.shape[3]  # 16-bit key and value of one token
        exact = 2 * self.keys.numel() * self.keys.element_size()
        if self.segments is None:
            return row * self.batch * self.keys.shape[-2], 0, exact, 0
        distinct = {id(s): s for s in self.segments}.values()
        dense = sum(s.dense_bytes for s in self.segments) + row * self.batch * self.tail_rows
        reserved = self._buffer.numel() * self._buffer.element_size() - exact
        return dense, sum(s.bytes for s in distinct), exact, reserved


def on_device(segment, device):
    return segment.cuda(torch.cuda.current_stream(device).cuda_stream) if device.type == "cuda" else segment


def sliding_bill(layer, mark):
    if not layer.is_initialized or layer.keys is None:
        return 0, 0, 0, 0
    elements = 2 * layer.keys.numel()
    # Kept for rewind().
    marked = 2 * mark[0].numel() if mark is not None and mark[0] is not None and mark[0] is not layer.keys else 0
    return 2 * elements, 0, elements * layer.keys.element_size(), marked * layer.keys.element_size()

"""AnchorKVPress in kvpress's pipeline code, with tiny random models (kvpress asks for a transformers below 5.3)."""

import unittest

import numpy as np
import torch

try:
    import transformers
    from kvpress import ExpectedAttentionPress  # noqa: F401

    from anchorkv.kvpress import AnchorKVPress
    missing = None
except ImportError as error:
    missing = str(error)

import anchorkv

COMMON = dict(vocab_size=300, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
              head_dim=32, max_position_embeddings=4096, pad_token_id=0)


@unittest.skipIf(missing, f"kvpress cannot be imported: {missing}")
class PressTest(unittest.TestCase):
    def model(self, kind):
        torch.manual_seed(0)
        config = {"llama": transformers.LlamaConfig, "qwen3": transformers.Qwen3Config}[kind](**COMMON)
        return transformers.AutoModelForCausalLM.from_config(config).eval()

    def run_press(self, model, press, tokens=300):
        ids = torch.randint(1, 300, (1, tokens), generator=torch.Generator().manual_seed(1))
        cache = transformers.DynamicCache(config=model.config)
        with torch.no_grad(), press(model):
            model(ids, past_key_values=cache)
        return ids, cache

    def test_layers_hold_what_the_library_rebuilds(self):
        for kind in ("llama", "qwen3"):
            model = self.model(kind)
            _, plain = self.run_press(model, AnchorKVPress(0.0))
            _, pressed = self.run_press(model, AnchorKVPress(0.6, options={"seed": 3}))
            for before, after in zip(plain.layers, pressed.layers):
                self.assertEqual(before.keys.shape, after.keys.shape)
                for a, b in ((before.keys, after.keys), (before.values, after.values)):
                    error = ((a - b).norm() / a.norm()).item()
                    self.assertGreater(error, 1e-4)
                    self.assertLess(error, 0.5)

    def test_window_queries_are_the_models(self):
        """With every position in an anchor the rebuilt cache is the model's, so attention by the window's queries must be
        what the model computed."""
        model = self.model("qwen3")
        seen = {}

        def watch(module, query, key, value, mask, **kwargs):
            seen[module.layer_idx] = query
            return transformers.integrations.sdpa_attention.sdpa_attention_forward(module, query, key, value, mask, **kwargs)

        transformers.AttentionInterface.register("watch", watch)
        transformers.AttentionMaskInterface.register("watch", transformers.masking_utils.sdpa_mask)
        model.set_attn_implementation("watch")
        inputs = {}
        module = model.model.layers[1].self_attn
        hook = module.register_forward_pre_hook(lambda m, a, k: inputs.update(k), with_kwargs=True)
        self.run_press(model, AnchorKVPress(0.0))
        hook.remove()
        with torch.no_grad():
            queries = AnchorKVPress.window_queries(module, inputs["hidden_states"], inputs["position_embeddings"], 32)
        self.assertLess((queries - seen[1][:, :, -32:]).abs().max().item(), 1e-5)

    def test_short_contexts_and_refusals(self):
        model = self.model("llama")
        self.run_press(model, AnchorKVPress(0.9), tokens=20)
        with self.assertRaisesRegex(ValueError, "compression_ratio is 1.0"):
            self.run_press(model, AnchorKVPress(1.0))
        with self.assertRaisesRegex(ValueError, "largest is"):
            self.run_press(model, AnchorKVPress(0.99))
        self.assertTrue(np.isfinite(anchorkv.estimate(1, 2, 32, 300, ratio=2)["ratio"]))


if __name__ == "__main__":
    unittest.main()

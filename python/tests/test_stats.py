"""Statistics against worked examples."""

import math
import unittest

import numpy as np
from anchorkv.stats import bootstrap, mcnemar


class Bootstrap(unittest.TestCase):
    def test_interval_of_four_coin_results(self):
        # The mean of 4 draws from {0, 0, 1, 1} is Binomial(4, 1/2) / 4: P(0) = P(1) = 1/16, above 2.5 %.
        estimate = bootstrap([np.array([[0.0], [0.0], [1.0], [1.0]])]).estimate(0)
        self.assertEqual((estimate.mean, estimate.low, estimate.high), (0.5, 0.0, 1.0))

    def test_interval_approaches_the_normal_one(self):
        values = np.random.default_rng(1).normal(3, 2, (400, 1))
        estimate = bootstrap([values]).estimate(0)
        half = 1.96 * values.std() / math.sqrt(400)
        self.assertAlmostEqual(estimate.mean, values.mean(), places=12)
        self.assertAlmostEqual(estimate.low, values.mean() - half, delta=0.02)
        self.assertAlmostEqual(estimate.high, values.mean() + half, delta=0.02)

    def test_strata_count_equally_and_are_resampled_apart(self):
        # Constant strata: no resample mixes them, so the interval is a point; the mean is not the pooled one.
        estimate = bootstrap([np.zeros((9, 1)), np.ones((3, 1))]).estimate(0)
        self.assertEqual((estimate.mean, estimate.low, estimate.high), (0.5, 0.5, 0.5))

    def test_columns_are_paired(self):
        values = np.random.default_rng(2).normal(0, 1, (50, 1))
        result = bootstrap([np.hstack([values, values + 2, 2 * values + 8])])
        np.testing.assert_allclose(result.draws[:, 1] - result.draws[:, 0], 2)
        np.testing.assert_allclose(result.draws[:, 2], 2 * result.draws[:, 0] + 8, atol=1e-12)

    def test_missing_values_are_left_out(self):
        values = np.array([[1.0, 5.0], [3.0, math.nan], [math.nan, 7.0]])
        result = bootstrap([values])
        self.assertEqual(list(result.means), [2.0, 6.0])
        self.assertEqual((result.estimate(0).low, result.estimate(0).high), (1.0, 3.0))

    def test_one_sample_has_no_interval(self):
        estimate = bootstrap([np.array([[4.0]])]).estimate(0)
        self.assertEqual(estimate.mean, 4.0)
        self.assertTrue(math.isnan(estimate.low) and math.isnan(estimate.high))

    def test_quotient(self):
        result = bootstrap([np.array([[1.0, 2.0], [2.0, 4.0], [5.0, 10.0]])])
        estimate = result.quotient(0, 1)
        self.assertEqual((estimate.mean, estimate.low, estimate.high), (0.5, 0.5, 0.5))
        self.assertTrue(math.isnan(bootstrap([np.array([[1.0, 0.0]])]).quotient(0, 1).mean))

    def test_seed(self):
        values = [np.random.default_rng(3).normal(0, 1, (20, 1))]
        self.assertTrue((bootstrap(values, 5).draws == bootstrap(values, 5).draws).all())
        self.assertFalse((bootstrap(values, 5).draws == bootstrap(values, 6).draws).all())


class McNemar(unittest.TestCase):
    def test_exact_values(self):
        self.assertEqual(mcnemar(0, 0), 1.0)
        self.assertEqual(mcnemar(1, 0), 1.0)
        self.assertEqual(mcnemar(5, 0), 2 / 32)
        self.assertEqual(mcnemar(1, 9), 2 * (1 + 10) / 1024)
        self.assertEqual(mcnemar(9, 1), mcnemar(1, 9))
        self.assertEqual(mcnemar(4, 4), 1.0)
        self.assertLess(mcnemar(700, 300), 1e-30)


if __name__ == "__main__":
    unittest.main()

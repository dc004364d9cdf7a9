"""Random numbers that are a function of (seed, position, slot)."""

from __future__ import annotations

import numpy as np

from vit_scale.data.draws import keys, noise_bytes, uniforms


def test_row_depends_only_on_seed_position_and_stream() -> None:
    full = uniforms(5, np.arange(100), 16)
    assert np.array_equal(uniforms(5, [70, 3], 16), full[[70, 3]])
    assert np.array_equal(uniforms(5, np.arange(100), 40)[:, :16], full)
    for other in (uniforms(6, np.arange(100), 16), uniforms(5, np.arange(100), 16, stream=1)):
        assert not np.any(other == full)


def test_rows_are_uniform_and_independent() -> None:
    draws = uniforms(0, np.arange(20_000), 8)
    assert draws.min() >= 0
    assert draws.max() < 1
    for column in draws.T:
        counts, _ = np.histogram(column, bins=20, range=(0, 1))
        assert np.sum((counts - 1000) ** 2 / 1000) < 50  # Chi-square, 19 degrees of freedom: p < 1e-4 beyond 50.
    # Neighboring slots, positions and seeds are uncorrelated.
    assert np.abs(np.corrcoef(draws.T) - np.eye(8)).max() < 0.03
    assert abs(np.corrcoef(draws[:-1, 0], draws[1:, 0])[0, 1]) < 0.03
    assert abs(np.corrcoef(draws[:, 0], uniforms(1, np.arange(20_000), 8)[:, 0])[0, 1]) < 0.03


def test_distant_positions_have_different_keys() -> None:
    positions = np.array([0, 1, 2**31, 2**31 + 1, 2**40, 2**62])
    assert len(np.unique(keys(0, positions))) == len(positions)


def test_noise_bytes_are_a_function_of_the_key_and_uniform() -> None:
    noise = noise_bytes(42, 100_003)
    assert len(noise) == 100_003
    assert np.array_equal(noise[:50], noise_bytes(42, 50))
    assert abs(noise.mean() - 127.5) < 1
    assert not np.array_equal(noise_bytes(43, 50), noise[:50])

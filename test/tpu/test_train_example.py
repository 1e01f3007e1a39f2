"""The training example: it learns, and its gradient is plain attention's."""

import numpy as np
import pytest
import tpu_oracle

from cudnn_dsa_tpu import train


@pytest.mark.slow
def test_training_with_a_ring_of_four(devices):
    lines: list[str] = []
    result = train.train(devices=4, steps=12, say=lines.append)
    assert result.gradient_error < 1e-5
    assert sum(result.losses[-3:]) < 0.95 * sum(result.losses[:3])
    assert len(lines) == 13


def test_plain_attention_matches_the_oracle():
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((2, 20, 64)).astype(np.float32) for _ in range(3))
    want = tpu_oracle.attention(q, k, v, v).out
    assert tpu_oracle.relative_error(train.plain_attention(q, k, v), want) < 1e-5


def test_steps_are_checked(devices):
    with pytest.raises(ValueError, match="steps"):
        train.train(devices=1, steps=0)

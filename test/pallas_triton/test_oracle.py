"""The oracle's gradients against finite differences of its own forward, every feature on."""

import numpy as np
import pytest
from pallas_triton_cases import FEATURES, Sizes, draw, inputs
from pallas_triton_oracle import oracle


@pytest.mark.parametrize("normalize", [True, False])
def test_gradients_are_the_slopes_of_the_forward(normalize):
    rng = np.random.default_rng(5)
    sizes = Sizes((2,), 5, 6, 4, 2, 3, 4)
    arrays = {n: x.astype(np.float64) for n, x in inputs(rng, sizes).items()}
    sparse = ("mask", "segment_ids", "k_start", "k_end", "q_start", "q_end", "q_indices", "k_indices", "logits_dtype")
    kwargs = draw(rng, [n for n in FEATURES if n not in sparse], sizes)
    kwargs |= {"normalize_output": normalize, "mask": rng.random((2, 1, 5, 6)) < 0.7, "logits_scale": 0.5}
    floats = arrays | {n: kwargs.pop(n).astype(np.float64) for n in ("bias", "attn_sink")}
    dout, dl = floats.pop("dout"), floats.pop("dl")
    want = oracle(**floats, **kwargs, dout=dout, dl=dl)
    m = want["m"]

    def loss(floats):
        r = oracle(**floats, **kwargs)
        # m is a stop-gradient: express out and l with the unperturbed maximum.
        scale = np.exp(r["m"] - m)
        out = r["out"] if normalize else r["out"] * np.swapaxes(scale, -1, -2)[..., None]
        return (out * dout).sum() + (r["l"] * scale * dl).sum()

    eps = 1e-6
    for name in floats:
        slope = np.empty(floats[name].shape)
        for index in np.ndindex(*slope.shape):
            ends = []
            for sign in (1, -1):
                x = floats[name].copy()
                x[index] += sign * eps
                ends.append(loss(floats | {name: x}))
            slope[index] = (ends[0] - ends[1]) / (2 * eps)
        grad = want["d" + name.replace("attn_", "")]
        np.testing.assert_allclose(grad, slope, atol=2e-7, rtol=2e-6, err_msg=name)

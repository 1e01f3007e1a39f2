"""Eight CPU devices for the ring tests, set before jax makes its CPU client (importing jax alone does not make it)."""

import os

DEVICES = 8

os.environ.setdefault("JAX_PLATFORMS", "cpu")
# The devices' thread pools are sized by the core count; with two cores a collective of four devices waits for threads
# that never come.
os.environ.setdefault("NPROC", "32")
# For the ahead-of-time compile tests: no metadata server to ask, and several processes (xdist) with one libtpu each.
os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
_FLAG = "--xla_force_host_platform_device_count"
if _FLAG not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {_FLAG}={DEVICES}".strip()

import jax  # noqa: E402
import pytest  # noqa: E402
from jax._src import callback, effects  # noqa: E402
from jax.experimental.pallas import tpu as pltpu  # noqa: E402


@pytest.fixture(scope="session")
def devices():
    """The CPU devices. Fewer than eight means that something used jax before this directory was collected."""
    found = jax.devices("cpu")
    if len(found) < DEVICES:
        pytest.fail(f"{len(found)} CPU device(s): jax was initialised before test/tpu/conftest.py set {_FLAG}")
    return found


@pytest.fixture(autouse=True)
def _clean_interpreter():
    """An exception inside an interpreted kernel leaves the interpreter's shared memory in the way of the next one."""
    yield
    pltpu.reset_tpu_interpret_mode_state()


@pytest.fixture
def checkpoint_of_interpreted_kernels(monkeypatch):
    """jax.checkpoint refuses functions with callbacks, lest they run twice. The interpreter's may: every run of a
    kernel has memory of its own. (A compiled kernel has none.)"""
    allowed = effects.EffectTypeSet()
    for effect in (*effects.remat_allowed_effects._effect_types, callback.IOEffect, callback.OrderedIOEffect):
        allowed.add_type(effect)
    monkeypatch.setattr(effects, "remat_allowed_effects", allowed)

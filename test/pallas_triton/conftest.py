"""XLA settings of this area, set before JAX starts; on a machine without a GPU they only change compile time.

Interpret mode spends its time compiling; without LLVM optimisation and the fusion emitters it takes half as long. Four
host devices are for the shard_map tests.
"""

import os

_FLAGS = {
    "--xla_cpu_use_fusion_emitters": "false",
    "--xla_backend_optimization_level": "0",
    "--xla_force_host_platform_device_count": "4",
}
if not os.path.exists("/dev/nvidiactl"):
    _given = os.environ.get("XLA_FLAGS", "")
    _added = [f"{name}={value}" for name, value in _FLAGS.items() if name not in _given]
    os.environ["XLA_FLAGS"] = " ".join([_given, *_added])

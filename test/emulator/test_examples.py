"""NVIDIA's public CuTe DSL examples, where a checkout of CUTLASS says: their own checks against torch, and no hazard.

``CUTLASS_EXAMPLES=/path/to/cutlass/examples/python/CuTeDSL pytest test/emulator/test_examples.py``
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

import pytest
from emulator_examples import run_example

from cute_emulator import HazardError

FOLDER = os.environ.get("CUTLASS_EXAMPLES", "")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not FOLDER, reason="CUTLASS_EXAMPLES names no folder of NVIDIA's examples"),
]


class Example(NamedTuple):
    script: str
    arguments: str = ""
    arch: str = "sm_100a"

    def __str__(self) -> str:
        return f"{Path(self.script).stem} {self.arguments}".strip()


TUTORIAL, DENSE = "cute/blackwell/tutorial/tutorial_gemm", "cute/blackwell/kernel/dense_gemm"
GROUPED, HOPPER = "cute/blackwell/kernel/grouped_gemm/grouped_gemm.py", "cute/hopper/kernel/dense_gemm"
PRIMITIVES = "experimental/primitives"
GROUPS = "--num_groups 4 --problem_sizes_mnkl (512,256,64,1),(16,384,256,1),(256,160,16,1),(640,64,48,1)"
STORE = "--use_tma_store"
PLAIN = """
    async_pipeline bar_warp_sync barrier_cta_red barrier_cta_sync basic_types cp_async_bulk cp_async_bulk_prefetch
    cp_async_mbarrier_arrive_cluster cp_async_mbarrier_arrive_cta cp_async_shared_global cp_async_shared_global_swizzled
    elect_sync ldmatrix_stmatrix mapa mbarrier mbarrier_lifecycle pipeline_software_fill red redux_sync shfl_sync
    vote_sync warp_named_barrier reduction/block_smem_reduce reduction/cluster_smem_reduce
    reduction/thread_vector_reduce reduction/warp_vector_reduce
""".split()  # noqa: SIM905
TENSOR = """
    1cta_mma_a_from_tmem 1cta_mma_basic 1cta_mma_mn_major 1cta_mma_pipeline 2cta_mma_basic 2cta_mma_tma_store
    clusterMxN_2cta_mma mcast_clusterMxN_1cta_mma mcast_clusterMxN_2cta_mma tmem_ld_st
""".split()  # noqa: SIM905
TMA = """
    tma_1cta_mbarrier tma_load_store tma_load_to_ldmatrix tma_pipeline_count2 tma_pipeline_pingpong
    tma_pipeline_warpspec tma_store tma_swizzle_modes
""".split()  # noqa: SIM905
EXAMPLES = [
    *(Example(f"{TUTORIAL}/fp16_gemm_{i}.py", "--mnk 512,512,256") for i in ("0", "1", "2", "3", "3_1", "4", "5")),
    Example(f"{TUTORIAL}/fp16_gemm_6.py", "--mnk 256,1024,128"),
    Example(f"{DENSE}/dense_gemm.py", "--mnkl 512,384,256,1 --mma_tiler_mn 128,128"),
    Example(f"{DENSE}/dense_gemm_persistent_dynamic.py", "--mnkl 512,384,256,1 --mma_tiler_mn 128,128"),
    Example(f"{DENSE}/dense_gemm_persistent_prefetch.py", "--mnkl 512,384,256,1 --mma_tiler_mn 128,128"),
    Example(f"{DENSE}/dense_gemm_software_pipeline.py", "--mnkl 512,384,256,1 --mma_tiler_mn 128,128"),
    Example(f"{DENSE}/dense_gemm_alpha_beta_persistent.py", "--mnkl 512,384,256,1"),
    *(
        Example(f"{DENSE}/dense_gemm_persistent.py", f"{STORE} {a}")
        for a in (
            "--mnkl 512,512,256,2 --mma_tiler_mn 256,128 --cluster_shape_mn 2,2 --use_2cta_instrs --ab_dtype BFloat16",
            "--mnkl 256,512,256,1 --mma_tiler_mn 64,256 --ab_dtype TFloat32 --a_major m --b_major n",
            "--mnkl 256,512,256,1 --mma_tiler_mn 128,256 --ab_dtype Float16 --acc_dtype Float16 --c_dtype Float16",
            "--mnkl 256,512,256,1 --mma_tiler_mn 128,256 --ab_dtype Float8E4M3FN --c_dtype Float16",
        )
    ),
    Example(GROUPED),
    Example(GROUPED, f"{GROUPS} --mma_tiler_mn 128,64 --tensormap_update_mode GMEM"),
    Example(GROUPED, f"{GROUPS} --mma_tiler_mn 256,128 --cluster_shape_mn 2,1 --use_2cta_instrs"),
    Example(
        GROUPED,
        f"{GROUPS} --mma_tiler_mn 128,128 --cluster_shape_mn 1,2 --ab_dtype BFloat16 "
        "--a_major m --b_major n --c_major m",
    ),
    Example("cute/blackwell/kernel/attention/fmha/fmha.py", "--q_shape 1,256,2,64 --k_shape 1,256,2,64"),
    Example(f"{HOPPER}/dense_gemm.py", "--mnkl 512,384,256,1", "sm_90a"),
    Example(f"{HOPPER}/dense_gemm.py", "--mnkl 256,256,256,1 --a_major m --b_major n --c_major m", "sm_90a"),
    Example(f"{HOPPER}/dense_gemm_persistent.py", "--mnkl 512,384,256,1", "sm_90a"),
    Example(
        f"{HOPPER}/dense_gemm_persistent.py",
        "--mnkl 512,512,256,1 --tile_shape_mn 128,256 --cluster_shape_mn 2,1",
        "sm_90a",
    ),
    Example(f"{HOPPER}/dense_gemm_fp8_2xacc.py", "--mnkl 256,256,256,1", "sm_90a"),
    Example("cute/hopper/kernel/grouped_gemm/grouped_gemm.py", GROUPS, "sm_90a"),
    Example("cute/hopper/kernel/cta_norm/cta_norm.py", "", "sm_90a"),
    *(Example(f"{PRIMITIVES}/{name}.py") for name in PLAIN),
    *(Example(f"{PRIMITIVES}/tcgen05/{name}.py") for name in TENSOR),
    *(Example(f"{PRIMITIVES}/tma/{name}.py") for name in TMA),
]


@pytest.mark.parametrize("example", EXAMPLES, ids=str)
def test_example(example: Example) -> None:
    gpu = run_example(Path(FOLDER) / example.script, example.arguments.split(), example.arch, seed=3)
    assert gpu.report.launches
    assert not gpu.report.hazards


# What the checker reports in examples that run on hardware: docs/emulator.md says why each is real.
HAZARDS = [
    (
        Example(f"{DENSE}/dense_gemm_persistent.py", "--mnkl 512,384,256,1 --mma_tiler_mn 128,128"),
        r"(?s)write after read without a wait: tensor memory.*tcgen05\.ld of warp",
    ),
    (
        Example("cute/hopper/kernel/attention/fmha.py", "--q_shape 1,128,2,64 --k_shape 1,128,2,64", "sm_90a"),
        r"exit with pending bulk copies",
    ),
    (Example(f"{PRIMITIVES}/tma/tma_multicast.py"), r"(?s)read after write.*multicast::cluster"),
    (Example(f"{PRIMITIVES}/tma/tma_pipeline_single_warp.py"), r"(?s)write after read.*against warp \d"),
    (Example(f"{PRIMITIVES}/tcgen05/slicek_m32n8k128.py"), r"(?s)without fence\.proxy\.async.*cp\.async of warp"),
]


@pytest.mark.parametrize(("example", "hazard"), HAZARDS, ids=lambda x: str(x)[:40])
def test_example_with_a_hazard(example: Example, hazard: str) -> None:
    with pytest.raises(HazardError, match=hazard):
        run_example(Path(FOLDER) / example.script, example.arguments.split(), example.arch)

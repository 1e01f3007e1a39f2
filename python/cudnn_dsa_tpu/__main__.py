"""``python -m cudnn_dsa_tpu aot | fallback | train``: what a TPU would make of a shape, how often a fixed m falls back,
and a training example."""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from cudnn_dsa.contracts import ContractError
from cudnn_dsa_tpu import BlockSizes, FixedM, aot, fallback, fixed_m_attention, ring_attention, splash_attention, train
from cudnn_dsa_tpu.block_sizes import resolve, vmem_bytes
from cudnn_dsa_tpu.bundles import read_dump
from cudnn_dsa_tpu.chips import CHIPS, MIB
from cudnn_dsa_tpu.contracts import check_attention


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m cudnn_dsa_tpu", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    sub = commands.add_parser("aot", help="compile forward and backward ahead of time and report")
    sub.add_argument("--chip", choices=sorted(CHIPS), default="v6e")
    sub.add_argument("--shape", type=_sizes, required=True, metavar="HxSxD", help="query heads, length, head dimension")
    sub.add_argument("--kv-heads", type=int, help="default: as many as query heads")
    sub.add_argument("--kv-len", type=int, help="default: the query length")
    sub.add_argument("--head-dim-v", type=int, help="default: the head dimension")
    sub.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    sub.add_argument(
        "--blocks",
        type=_blocks,
        default="auto",
        metavar="Q,KV[,COMPUTE[,...]]",
        help="the fields of BlockSizes in order; default: auto",
    )
    sub.add_argument("--unfused", action="store_true", help="separate dq and dkv kernels")
    sub.add_argument("--dq-slots", choices=("3", "all"), default="3", help="dq_reduction_steps: 3, or None")
    sub.add_argument("--ring", type=int, default=1, metavar="R", help="devices of a ring; --shape is then one shard")
    sub.add_argument("--bidirectional", action="store_true")
    sub.add_argument("--compare", action="store_true", help="also compile jax's own splash attention, same tiles")
    sub.add_argument("--fixed-m", choices=("hybrid", "uniform"), help="attention with a fixed m")
    sub = commands.add_parser("fallback", help="how often a fixed m falls back, per layer and head")
    sub.add_argument("--statistics", metavar="NPZ", help="as cudnn_dsa_tpu.fallback.save wrote; default: made up")
    sub.add_argument("--png", default="fallback.png", help="where the picture goes")
    sub = commands.add_parser("train", help="train a small diffusion-transformer block with ring attention")
    sub.add_argument("--devices", type=int, default=4, help="simulated where there is no TPU")
    sub.add_argument("--steps", type=int, default=20)
    return parser.parse_args(arguments)  # fmt: skip


def _sizes(text: str) -> tuple[int, int, int]:
    sizes = tuple(int(part) for part in text.split("x"))
    if len(sizes) != 3:
        raise argparse.ArgumentTypeError(f"expected HxSxD, got {text!r}")
    return sizes


def _blocks(text: str) -> BlockSizes | str:
    return text if text == "auto" else BlockSizes(*(int(part) for part in text.split(",")))


def run_aot(options: argparse.Namespace, dump: str) -> None:
    aot.prepare(dump)
    chip = CHIPS[options.chip]
    heads, q_len, d = options.shape
    kv_heads, kv_len = options.kv_heads or heads, options.kv_len or q_len
    dv = options.head_dim_v or d
    q, k, v, dout = (
        jax.ShapeDtypeStruct(shape, options.dtype)
        for shape in ((heads, q_len, d), (kv_heads, kv_len, d), (kv_heads, kv_len, dv), (heads, q_len, dv))
    )
    problem = check_attention(q, k, v, scale=None, orig_q_seq_len=None, orig_kv_seq_len=None)
    sizes = resolve(options.blocks, problem, chip)
    print(f"{chip.name}: q {q.shape}, k {k.shape}, v {v.shape}, {options.dtype}")
    print(f"blocks: {sizes}")
    for name, need in vmem_bytes(sizes, problem).items():
        print(f"vector memory, {name}: about {need / MIB:.1f} of {chip.vmem_limit_bytes / MIB:.0f} MiB")

    attention = _ring(options, sizes) if options.ring > 1 else _single(options, sizes)
    mesh = aot.topology_mesh(chip, (options.ring,))
    spec = P(None, "ring") if options.ring > 1 else P()
    if options.ring > 1:
        attention = jax.shard_map(attention, mesh=mesh, in_specs=(spec,) * 3, out_specs=spec)
        q, k, v, dout = (jax.ShapeDtypeStruct((x.shape[0], x.shape[1] * options.ring, x.shape[2]), x.dtype)
                         for x in (q, k, v, dout))  # fmt: skip
    compiled = aot.compile_for(mesh, _with_gradients(attention), *((x, spec) for x in (q, k, v, dout)))
    result = aot.report(compiled, dump)
    print(f"device memory: arguments {result.argument_bytes / MIB:.1f}, outputs {result.output_bytes / MIB:.1f}, "
          f"temporary {result.temporary_bytes / MIB:.1f} MiB")  # fmt: skip
    print(f"order (S start, D done, K kernel): {result.order}")
    for schedule in result.schedules:
        print(schedule)
    if options.compare:
        _compare(options, sizes, dump, result, (q, k, v, dout))


def _single(options: argparse.Namespace, sizes: BlockSizes) -> Any:
    def attention(q, k, v):
        if options.fixed_m:
            uniform = options.fixed_m == "uniform"
            return fixed_m_attention(q, k, v, block_sizes=sizes, uniform=uniform, interpret=False)
        return splash_attention(
            q, k, v, block_sizes=sizes, use_fused_bwd_kernel=not options.unfused,
            dq_reduction_steps=3 if options.dq_slots == "3" else None, interpret=False,
        )  # fmt: skip

    return attention


def _ring(options: argparse.Namespace, sizes: BlockSizes) -> Any:
    def attention(q, k, v):
        return ring_attention(
            q,
            k,
            v,
            axis_name="ring",
            block_sizes=sizes,
            bidirectional=options.bidirectional,
            interpret=False,
            fixed_m=FixedM(v_ok=True, uniform=options.fixed_m == "uniform") if options.fixed_m else None,
        )

    return attention


def _with_gradients(attention: Any) -> Any:
    def both(q, k, v, dout):
        out, pullback = jax.vjp(attention, q, k, v)
        return out, pullback(dout)

    return both


def _compare(options, sizes: BlockSizes, dump: str, ours: aot.Report, operands) -> None:
    """Compile jax's splash attention with the same tiles in the same run and print the ratios of bundles."""
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as peer
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

    if options.ring > 1 or options.unfused:
        raise ContractError("--compare", "a single device and the fused backward", "another program")
    q, k, _, _ = operands
    mask = masks.MultiHeadMask([masks.FullMask((q.shape[1], k.shape[1]))] * q.shape[0])
    blocks = peer.BlockSizes(
        block_q=sizes.block_q, block_kv=sizes.block_kv, block_kv_compute=sizes.block_kv_compute,
        block_q_dkv=sizes.block_q_dkv, block_kv_dkv=sizes.block_kv_dkv,
        block_kv_dkv_compute=sizes.block_kv_dkv_compute, use_fused_bwd_kernel=True,
    )  # fmt: skip
    kernel = peer.make_splash_mha(mask, block_sizes=blocks, head_shards=1, q_seq_shards=1)

    def attention(q, k, v):
        return kernel(q * jnp.asarray(q.shape[-1] ** -0.5, q.dtype), k, v)

    mesh = aot.topology_mesh(CHIPS[options.chip])
    aot.compile_for(mesh, _with_gradients(attention), *((x, P()) for x in operands))
    dumped = read_dump(f"{dump}/llo", "splash_mha")
    theirs = {"backward" if "dkv" in schedule.name else "forward": schedule for schedule in dumped}
    for schedule in ours.schedules:
        which = schedule.name.removeprefix("splash_")
        print(f"jax {theirs[which]}")
        ratio = schedule.step / theirs[which].step
        print(f"{which}: {schedule.step} / {theirs[which].step} = {ratio:.3f} of jax splash's bundles")


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    if options.command == "train":
        # Before anything makes jax create its devices; more CPU threads than cores, or collectives starve.
        jax.config.update("jax_num_cpu_devices", options.devices)
        os.environ.setdefault("NPROC", "32")
        train.train(options.devices, options.steps)
        return 0
    try:
        if options.command == "fallback":
            layers = fallback.load(options.statistics) if options.statistics else fallback.synthetic()
            rows = fallback.report(layers)
            print(fallback.table(rows))
            fallback.plot(rows, options.png)
            print(f"picture: {options.png}")
            return 0
        with tempfile.TemporaryDirectory(prefix="cudnn_dsa_tpu_aot_") as dump:
            run_aot(options, dump)
    except (aot.MissingCompiler, ContractError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())

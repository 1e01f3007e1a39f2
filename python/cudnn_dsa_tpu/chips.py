"""The TPU generations this package knows: what a kernel may use of each, and how to compile for it ahead of time."""

from __future__ import annotations

import dataclasses

import jax

from cudnn_dsa.contracts import ContractError

MIB = 1 << 20


@dataclasses.dataclass(frozen=True)
class Chip:
    """One TPU generation.

    Attributes:
        name: the short name, as in ``--chip v6e``.
        vmem_bytes: vector memory of one TensorCore.
        topologies: names of topologies of this chip, by size, that ``jax.experimental.topologies`` accepts.
        device_kinds: what ``jax.Device.device_kind`` says on it.
    """

    name: str
    vmem_bytes: int
    topologies: dict[int, str]
    device_kinds: tuple[str, ...]

    @property
    def vmem_limit_bytes(self) -> int:
        """What a kernel may ask for. An eighth stays with the compiler (its own buffers, semaphores, spills); a limit
        above the chip's memory would be accepted without a word and fail on the chip."""
        return self.vmem_bytes * 7 // 8

    def topology_of(self, devices: int) -> str:
        """The smallest topology with at least so many devices."""
        for size, name in sorted(self.topologies.items()):
            if size >= devices:
                return name
        raise ContractError("devices", f"at most {max(self.topologies)} on {self.name}", str(devices))


CHIPS = {
    chip.name: chip
    for chip in (
        Chip("v4", 16 * MIB, {8: "v4:2x2x1", 16: "v4:2x2x2"}, ("TPU v4",)),
        Chip("v5e", 128 * MIB, {4: "v5e:2x2", 8: "v5e:2x4"}, ("TPU v5 lite", "TPU v5e")),
        Chip("v5p", 64 * MIB, {4: "v5p:2x2x1", 8: "v5p:2x2x2"}, ("TPU v5", "TPU v5p")),
        Chip("v6e", 128 * MIB, {4: "v6e:2x2", 8: "v6e:2x4", 16: "v6e:4x4"}, ("TPU v6 lite", "TPU v6e")),
        Chip("tpu7x", 64 * MIB, {8: "tpu7x:2x2x1", 16: "tpu7x:2x2x2"}, ("TPU7x",)),
    )
}

# Where no TPU is in sight (the interpreter on a CPU): the generation the block table was made for.
DEFAULT_CHIP = CHIPS["v6e"]


def current_chip() -> Chip:
    """The chip that a kernel traced here will run on: that of the abstract mesh in use (ahead-of-time compilation),
    else that of the default device, else :data:`DEFAULT_CHIP`."""
    abstract = jax.sharding.get_abstract_mesh().abstract_device
    kind = abstract.device_kind if abstract is not None else jax.devices()[0].device_kind
    return next((chip for chip in CHIPS.values() if kind in chip.device_kinds), DEFAULT_CHIP)

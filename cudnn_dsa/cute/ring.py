"""Hand-over of buffers between warps: a ring of stages with two mbarriers each."""

# mypy: ignore-errors
# (Device code: the DSL stages it, and most of its types are the DSL's.)

from dataclasses import dataclass

import cutlass.cute as cute
from cutlass import Int32, Int64


@dataclass(frozen=True)
class Ring:
    """``stages`` buffers; the n-th use of the ring is stage n % stages, and n counts for the life of the CTA.

    A producer waits for ``empty``, writes, and arrives at ``full``; a consumer waits for ``full``, reads, and arrives
    at ``empty``. Whoever arrives does so once a warp (``arrive_*``), after its lanes have met, or through the
    completion of its copies (``full(n)`` handed to a copy).
    """

    barriers: cute.Pointer
    stages: int = 1

    @staticmethod
    def barriers_of(stages: int) -> int:
        """How many 8-byte mbarriers a ring takes."""
        return 2 * stages

    @staticmethod
    def create(memory, stages: "list[int]") -> "list[Ring]":
        """A ring of each number of stages, their barriers allocated in shared memory."""
        barriers = memory.allocate_array(Int64, sum(map(Ring.barriers_of, stages)))
        rings = []
        for count in stages:
            rings.append(Ring(barriers, count))
            barriers = barriers + Ring.barriers_of(count)
        return rings

    def init(self, producers: int, consumers: int) -> None:
        """By one thread: how many arrivals complete ``full`` and ``empty``."""
        for stage in range(self.stages):
            cute.arch.mbarrier_init(self.barriers + stage, producers)
            cute.arch.mbarrier_init(self.barriers + self.stages + stage, consumers)

    def stage(self, n: Int32) -> Int32:
        return n % self.stages if self.stages > 1 else Int32(0)

    def _phase(self, n: Int32) -> Int32:
        return (n // self.stages) & 1

    def full(self, n: Int32) -> cute.Pointer:
        return self.barriers + self.stage(n)

    def empty(self, n: Int32) -> cute.Pointer:
        return self.barriers + self.stages + self.stage(n)

    def wait_full(self, n: Int32) -> None:
        cute.arch.mbarrier_wait(self.full(n), self._phase(n))

    def wait_empty(self, n: Int32) -> None:
        """The phase before a barrier's first one counts as complete, so the first use of a stage does not wait."""
        cute.arch.mbarrier_wait(self.empty(n), self._phase(n) ^ 1)

    @cute.jit
    def arrive_full(self, n: Int32):
        arrive_warp(self.full(n))

    @cute.jit
    def arrive_empty(self, n: Int32):
        arrive_warp(self.empty(n))


@cute.jit
def arrive_warp(barrier: cute.Pointer):
    """One arrival for the warp, after all of its lanes."""
    cute.arch.sync_warp()
    if cute.arch.lane_idx() == 0:
        cute.arch.mbarrier_arrive(barrier)

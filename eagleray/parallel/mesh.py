"""The coordinates of a worker, which decide its part of the model. Pure."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Mesh:
    """A worker's coordinates in its engine: rank = pp_rank x tp_size + tp_rank."""

    rank: int = 0
    tp_size: int = 1
    pp_size: int = 1

    @property
    def world_size(self) -> int:
        return self.tp_size * self.pp_size

    @property
    def tp_rank(self) -> int:
        return self.rank % self.tp_size

    @property
    def pp_rank(self) -> int:
        return self.rank // self.tp_size

    @property
    def tp_ranks(self) -> list[int]:
        """Ranks of this worker's tensor-parallel group."""
        first = self.pp_rank * self.tp_size
        return list(range(first, first + self.tp_size))

    @property
    def is_first_stage(self) -> bool:
        """Whether this worker turns token ids into hidden states."""
        return self.pp_rank == 0

    @property
    def is_last_stage(self) -> bool:
        """Whether this worker turns hidden states into logits."""
        return self.pp_rank == self.pp_size - 1

    @property
    def sampler_rank(self) -> int:
        """The rank that samples and sends the result of a step: the first one of the last stage."""
        return (self.pp_size - 1) * self.tp_size

    @property
    def is_sampler(self) -> bool:
        return self.rank == self.sampler_rank

    def layers(self, num_layers: int) -> range:
        """Return the layers of this stage. If they do not divide evenly, earlier stages have one more, because the last
        one also has the head."""
        count, extra = divmod(num_layers, self.pp_size)
        start = self.pp_rank * count + min(self.pp_rank, extra)
        return range(start, start + count + (self.pp_rank < extra))


@dataclass(frozen=True, slots=True, kw_only=True)
class EnginePosition:
    """The number of an engine among the engines whose workers divide the experts, and how many these are. An engine
    that has all experts is the only one, whatever its data-parallel rank is."""

    rank: int = 0
    size: int = 1


SINGLE_ENGINE = EnginePosition()

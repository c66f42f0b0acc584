"""Which part of the model a worker has. Pure: numbers in, numbers out."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Mesh:
    """A worker's place: rank = pp_rank x tp_size + tp_rank."""

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
        """It turns token ids into hidden states."""
        return self.pp_rank == 0

    @property
    def is_last_stage(self) -> bool:
        """It turns hidden states into logits."""
        return self.pp_rank == self.pp_size - 1

    @property
    def sampler_rank(self) -> int:
        """The rank that samples, and answers steps: the first one of the last stage."""
        return (self.pp_size - 1) * self.tp_size

    @property
    def is_sampler(self) -> bool:
        return self.rank == self.sampler_rank

    def layers(self, num_layers: int) -> range:
        """The layers of this stage. Where they do not divide evenly, earlier stages have one more: the last one also
        has the head."""
        share, extra = divmod(num_layers, self.pp_size)
        start = self.pp_rank * share + min(self.pp_rank, extra)
        return range(start, start + share + (self.pp_rank < extra))


@dataclass(frozen=True, slots=True, kw_only=True)
class EnginePosition:
    """The engines whose workers divide the experts among them: which of them this is, and how many they are. An engine
    that has all experts is the only one, whatever its rank is among those that share the requests."""

    rank: int = 0
    size: int = 1


SINGLE_ENGINE = EnginePosition()

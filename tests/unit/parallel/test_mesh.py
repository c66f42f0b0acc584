from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from eagleray.parallel.mesh import Mesh

SIZES = {"tp": st.integers(1, 5), "pp": st.integers(1, 5)}


def meshes(tp: int, pp: int) -> list[Mesh]:
    return [Mesh(rank=rank, tp_size=tp, pp_size=pp) for rank in range(tp * pp)]


@given(**SIZES)
def test_mesh_coordinates_are_unique(tp, pp):
    all_ranks = meshes(tp, pp)
    assert {(mesh.pp_rank, mesh.tp_rank) for mesh in all_ranks} == {(p, t) for p in range(pp) for t in range(tp)}
    for mesh in all_ranks:
        assert mesh.rank in mesh.tp_ranks
        assert all(all_ranks[other].pp_rank == mesh.pp_rank for other in mesh.tp_ranks)


@given(**SIZES)
def test_is_sampler_is_one_rank_of_the_last_stage(tp, pp):
    (sampler,) = [mesh for mesh in meshes(tp, pp) if mesh.is_sampler]
    assert sampler.is_last_stage
    assert sampler.tp_rank == 0


@given(**SIZES, extra=st.integers(0, 20))
def test_layers_stages_have_all_in_order_and_early_ones_one_more(tp, pp, extra):
    stages = [mesh.layers(pp + extra) for mesh in meshes(tp, pp) if mesh.tp_rank == 0]
    assert [layer for stage in stages for layer in stage] == list(range(pp + extra))
    sizes = [len(stage) for stage in stages]
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] - sizes[-1] in (0, 1)

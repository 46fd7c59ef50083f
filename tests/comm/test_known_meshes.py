import torch
from torch.distributed.device_mesh import init_device_mesh

import zerofn
from tests.support.small_steps import fake_ranks
from zerofn.comm.known_meshes import Meshes
from zerofn.comm.mesh import Mesh
from zerofn.util.process import the


def test_meshes_that_are_made_or_sharded_over_are_known_until_the_group_ends():
    with fake_ranks(4):
        assert the(Meshes).known() == []
        first = Mesh.make(data=2, tensor=2)
        Mesh.make(data=2, tensor=2)
        Mesh.planned({"data": 8})
        assert the(Meshes).known() == [first]
        second = Mesh.of(init_device_mesh("cpu", (4,), mesh_dim_names=("dp",)))
        zerofn.shard({"params": {"w": torch.zeros(3)}})
        assert the(Meshes).known() == [first, second, Mesh.of(None)]
    with fake_ranks(4):
        assert the(Meshes).known() == []
    assert the(Meshes).known() == []

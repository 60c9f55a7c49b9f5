from jax.sharding import AbstractMesh
from jax.sharding import PartitionSpec as P

from megajax.core.axes import MESH_AXES
from megajax.core.mesh import MeshSpec
from megajax.parallel.sharding import layout

ZERO = ("node", "data", "expert", "context")
BATCH = ("node", "data", "expert")


def full_mesh():
    """All axes but pipe have two devices; only the shape matters here."""
    return AbstractMesh((1, 2, 2, 2, 2, 2), MESH_AXES)


def test_three_questions():
    lo = layout(full_mesh())
    assert lo.stored("embed", "heads", None) == P(ZERO, "tensor", None)
    assert lo.whole("embed", "heads", None) == P(None, "tensor", None, reduced=set(ZERO))
    assert lo.act("batch", "seq", "heads", None) == P(BATCH, "context", "tensor", None)
    assert lo.act("batch", "seq", None, residual=True) == P(BATCH, ("context", "tensor"), None)
    assert lo.act("batch", "seq", None, unreduced=("tensor",)) == P(
        BATCH, "context", None, unreduced={"tensor"}
    )


def test_hybrid_keeps_a_copy_on_each_node():
    lo = layout(full_mesh(), "hybrid")
    assert lo.stored("embed", "mlp") == P(("data", "expert", "context"), "tensor")
    assert lo.whole("embed", "mlp") == P(None, "tensor", reduced=set(ZERO))


def test_experts_differ_along_their_axis():
    """Their width is cut over the other axes, and only these share the gradient."""
    lo, others = layout(full_mesh()), ("node", "data", "context")
    assert lo.stored("expert", "embed", "mlp") == P("expert", others, "tensor")
    assert lo.stored("layers", "expert", "mlp", "embed") == P(None, "expert", "tensor", others)
    assert lo.whole("expert", "embed", "mlp") == P("expert", None, "tensor", reduced=set(others))
    assert layout(full_mesh(), "none").stored("expert", "embed", None) == P("expert", None, None)


def test_none_keeps_a_copy_everywhere():
    lo = layout(full_mesh(), "none")
    assert lo.stored("embed", "mlp") == P(None, "tensor")


def test_decoding_does_not_cut_the_sequence():
    lo = layout(full_mesh(), decode=True)
    assert lo.act("batch", "seq", None, residual=True) == P(BATCH, None, None)
    assert lo.stored("embed", "heads", None) == P(ZERO, "tensor", None)


def test_ways():
    lo = layout(MeshSpec(node=2, tensor=2).build())  # node 2, data 2, tensor 2
    assert lo.live(ZERO) == ("node", "data")
    assert lo.ways(()) == 1 and lo.ways(("node", "tensor")) == 4


def test_axes_of_one_device_are_left_out():
    lo = layout(MeshSpec(tensor=2).build())
    assert lo.stored("embed", "heads", None) == P("data", "tensor", None)
    assert lo.act("batch", "seq", None, residual=True) == P("data", "tensor", None)
    one = layout(MeshSpec(data=1).build())
    assert one.whole("embed", "mlp") == P(None, None)
    assert one.act("batch", "seq", None, unreduced=("tensor",)) == P(None, None, None)

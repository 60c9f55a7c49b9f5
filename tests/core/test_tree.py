import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from megajax.core import tree
from megajax.core.mesh import MeshSpec


def test_names_and_nesting_are_inverse():
    nested = {"a": {"b": jnp.ones(2), "c": jnp.ones(3)}, "d": jnp.ones(4)}
    named = tree.named_leaves(nested)
    assert [n for n, _ in named] == ["a.b", "a.c", "d"]
    back = tree.nest(dict(named))
    assert jax.tree.structure(back) == jax.tree.structure(nested)


def test_sizes():
    leaves = {"a": jnp.ones((4, 8)), "b": jnp.ones(3, jnp.bfloat16)}
    assert tree.count(leaves) == 35
    assert tree.nbytes(leaves) == 128 + 6


def test_bytes_of_the_fullest_device():
    mesh = MeshSpec(tensor=2).build()
    cut = jax.ShapeDtypeStruct(
        (8, 8), jnp.float32, sharding=NamedSharding(mesh, P("data", "tensor"))
    )
    copied = jax.ShapeDtypeStruct((8,), jnp.float32, sharding=NamedSharding(mesh, P()))
    assert tree.nbytes_per_device([cut, copied]) == 64 * 4 // 8 + 32


def test_words_are_plain_tuples():
    assert tree.is_words(("embed", None))
    assert not tree.is_words(["embed"])
    assert not tree.is_words((1,))

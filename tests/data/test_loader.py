import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from megajax.core.errors import UserError
from megajax.core.mesh import MeshSpec
from megajax.data.loader import Loader, held_out_batches, host_rows, place

S = 8


class Counted:
    """Row i holds i everywhere."""

    def __getitem__(self, i):
        return {k: np.full(S, i, np.int32) for k in ("tokens", "targets", "segments", "positions")}


def abstract(rows, accumulate=1, mesh=None):
    mesh = mesh or MeshSpec(tensor=2).build()
    shape = (rows, S) if accumulate == 1 else (accumulate, rows // accumulate, S)
    spec = P(("node", "data", "expert"), "context")
    spec = spec if accumulate == 1 else P(None, *spec)
    like = jax.ShapeDtypeStruct(shape, jnp.int32, sharding=NamedSharding(mesh, spec))
    return dict.fromkeys(("tokens", "targets", "segments", "positions"), like)


def first_columns(batch):
    return np.asarray(batch["tokens"])[..., 0].ravel().tolist()


@pytest.mark.parametrize("accumulate", [1, 2])
def test_batches_follow_the_global_count(accumulate):
    loader = Loader(Counted(), abstract(16, accumulate))
    assert first_columns(next(loader)) == list(range(16))
    assert first_columns(next(loader)) == list(range(16, 32))
    assert loader.position == 32


@pytest.mark.parametrize("accumulate", [1, 2])
def test_rows_may_hold_members_of_any_rank(accumulate):
    """A label without dimensions and an image, whose width tensor ranks cut."""

    class Pictures:
        def __getitem__(self, i):
            image = i + np.arange(24, dtype=np.float32).reshape(2, 4, 3) / 100
            return {"label": np.int32(i), "image": image}

    mesh, outer = MeshSpec(tensor=2).build(), (None,) * (accumulate - 1)
    shape = (16,) if accumulate == 1 else (2, 8)
    members = {
        "label": ((), P(*outer, "data")),
        "image": ((2, 4, 3), P(*outer, "data", None, "tensor")),
    }
    like = {
        name: jax.ShapeDtypeStruct(
            (*shape, *inner), jnp.float32, sharding=NamedSharding(mesh, spec)
        )
        for name, (inner, spec) in members.items()
    }
    loader = Loader(Pictures(), like)
    for first in (0, 16):
        batch = {k: np.asarray(v) for k, v in next(loader).items()}
        assert batch["label"].ravel().tolist() == list(range(first, first + 16))
        images = batch["image"].reshape(16, 2, 4, 3)
        np.testing.assert_array_equal(
            images, np.stack([Pictures()[first + i]["image"] for i in range(16)])
        )


def test_resume_loses_and_repeats_nothing_when_the_batch_changes():
    loader = Loader(Counted(), abstract(16))
    next(loader), next(loader), next(loader)
    smaller = Loader(Counted(), abstract(8), position=loader.position)
    assert first_columns(next(smaller)) == list(range(48, 56))


class Refused(Counted):
    """Row 20 holds an id that the vocabulary lacks."""

    def __getitem__(self, i):
        if i == 20:
            raise UserError("token id 70000")
        return super().__getitem__(i)


def test_a_row_that_is_refused_ends_the_run_with_its_sentence():
    """Rows are packed by Grain's threads; the batch before is given whole."""
    loader = Loader(Refused(), abstract(16))
    assert first_columns(next(loader)) == list(range(16))
    with pytest.raises(UserError, match="token id 70000"):
        next(loader)


def test_batches_lie_as_asked():
    like = abstract(16)
    batch = next(Loader(Counted(), like))
    for key, value in batch.items():
        assert value.sharding == like[key].sharding and value.dtype == jnp.int32


def test_a_cut_sequence_is_cut():
    mesh = MeshSpec(context=2, data=2, tensor=2).build()
    rows = np.arange(4 * S, dtype=np.int32).reshape(4, S)
    like = {"tokens": abstract(4, mesh=mesh)["tokens"]}
    placed = place({"tokens": rows}, like, np.arange(4))["tokens"]
    np.testing.assert_array_equal(np.asarray(placed), rows)
    assert {s.data.shape for s in placed.addressable_shards} == {(2, S // 2)}


def test_an_order_moves_all_arrays_of_a_row_alike():
    class Ramps:
        def __getitem__(self, i):
            return {k: np.arange(S, dtype=np.int32) + n for n, k in enumerate(abstract(4))}

    order = np.random.default_rng(0).permutation(S)
    mesh = MeshSpec(context=2, data=2, tensor=2).build()
    batch = next(Loader(Ramps(), abstract(4, mesh=mesh), order=order))
    for n, value in enumerate(batch.values()):
        np.testing.assert_array_equal(np.asarray(value)[1], order + n)


def test_a_host_reads_only_its_rows():
    """Devices of the second half of the data axis: rows 8..15 of 16."""
    mesh = MeshSpec().build()
    like = abstract(16, mesh=mesh)["tokens"]

    class Half:
        shape = like.shape

        class sharding:
            @staticmethod
            def addressable_devices_indices_map(shape):
                table = like.sharding.devices_indices_map(shape)
                return {d: i for d, i in table.items() if d.id >= 4}

    assert host_rows(Half).tolist() == list(range(8, 16))


def test_held_out_batches_are_the_same_and_end_with_ignored_rows(tmp_path):
    from megajax.data.config import DataConfig
    from megajax.data.corpus import open_corpora

    folder = tmp_path / "text"
    folder.mkdir()
    for i in range(60):
        (folder / f"{i}.txt").write_text(f"text number {i}")
    corpora, _ = open_corpora(DataConfig(str(folder), holdout=0.3), tmp_path / "c", lambda _: None)
    like = abstract(16)
    rows = (corpora[0].held_out.tokens - 1) // S
    batches = list(held_out_batches(corpora, like, 1600))
    assert len(batches) == -(-rows // 16)
    again = list(held_out_batches(corpora, like, 1600))
    for a, b in zip(batches, again, strict=True):
        np.testing.assert_array_equal(np.asarray(a["tokens"]), np.asarray(b["tokens"]))
    filled = 16 * len(batches) - rows
    ignored = (np.asarray(batches[-1]["targets"]) == -1).all(1)
    assert ignored.sum() == filled and ignored[16 - filled :].all()
    few = list(held_out_batches(corpora, like, 20))
    live = [(np.asarray(b["targets"]) >= 0).any(1) for b in few]
    assert len(few) == 2 and live[0].all() and live[1].sum() == min(rows, 20) - 16


def test_data_parallel_sizes_change_and_every_row_comes_once():
    """4 -> 2 -> 8 devices of data parallelism, each going on from the position of the former."""
    position, seen = 0, []
    for data in (4, 2, 8):
        mesh = MeshSpec(data=data, tensor=8 // data).build()
        loader = Loader(Counted(), abstract(16, mesh=mesh), position=position)
        for _ in range(2):
            batch = next(loader)["tokens"]
            pieces = {s.index[0].start or 0: s.data for s in batch.addressable_shards}
            assert len(pieces) == data  # each device's own rows, in the order of the batch
            seen += [int(row[0]) for start in sorted(pieces) for row in np.asarray(pieces[start])]
        position = loader.position
    assert seen == list(range(6 * 16))

"""Makes tests/golden/torch_views: tensors that are more than bytes with strides, as torch saves.

Run it in a separate environment (it needs torch, which megajax does not):

    python -m venv hf && hf/bin/pip install torch numpy
    hf/bin/python tests/golden/make_torch_views.py

values.npz has what torch itself says of each tensor that can be read.
Made with torch 2.13.0.
"""

import os
import pathlib
import shutil
import warnings

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp
from torch.distributed.tensor import Replicate, Shard, distribute_tensor, init_device_mesh

FOLDER = pathlib.Path(__file__).parent / "torch_views"
X = torch.arange(6.0).reshape(2, 3)
C = torch.complex(X, X + 1)


def main() -> None:
    """Writes every file."""
    warnings.filterwarnings("ignore")
    shutil.rmtree(FOLDER, ignore_errors=True)
    FOLDER.mkdir()
    made = {
        "conjugate": lambda c: c.conj(),
        "negative": lambda c: c.conj().imag,
        "both": lambda c: torch._neg_view(c.conj()),
        "turned": lambda c: c.conj().t()[1:],
        "one": lambda c: c.conj()[1, 2],
        "none": lambda c: c.conj()[:0],
        "double": lambda c: c.to(torch.complex128).conj(),
        "real": lambda c: c.conj().real,
    }
    views = {name: make(C.clone()) for name, make in made.items()}
    torch.save(views, FOLDER / "views.pt")
    torch.save(views, FOLDER / "legacy.pt", _use_new_zipfile_serialization=False)
    dcp.save(dict(views), checkpoint_id=FOLDER / "dcp", no_dist=True)
    values = {n: x.resolve_conj().resolve_neg().numpy() for n, x in views.items()}
    np.savez_compressed(FOLDER / "values.npz", **values)
    write_classes()
    write_refused()
    mp.spawn(write_dtensors, (1,), nprocs=1)
    mp.spawn(write_dtensors, (2,), nprocs=2)


def write_classes() -> None:
    """Classes whose values are those of their storage, and NumPy's."""
    parameter, attribute = torch.nn.Parameter(X.clone()), X.clone()
    parameter.tag, attribute.tag = "of a parameter", {"a": X[0]}
    torch.save(
        {
            "parameter": parameter,
            "attribute": attribute,
            "buffer": torch.nn.Buffer(X),
            "array": X.numpy(),
            "columns": np.asfortranarray(X.numpy()),
            "cell": np.array(2.5),
            "number": np.float32(2.5),
            "truth": np.bool_(True),
            "list": [X, {"row": X[1]}, 7],
            "plain": [1, "two"],
        },
        FOLDER / "classes.pt",
    )


def write_refused() -> None:
    """What has no plain values: each in a dictionary's member of its kind."""
    scales, zeros = torch.tensor([0.5, 0.25]), torch.tensor([1, 2])
    square = torch.ones(4, 4)
    torch.save(
        {
            "coo": X.to_sparse(),
            "csr": X.to_sparse_csr(),
            "csc": X.to_sparse_csc(),
            "bsr": square.to_sparse_bsr((2, 2)),
            "bsc": square.to_sparse_bsc((2, 2)),
            "nested": torch.nested.nested_tensor([X, X[:1]]),
            "jagged": torch.nested.nested_tensor([X, X[:1]], layout=torch.jagged),
            "quantized": torch.quantize_per_tensor(X, 0.5, 2, torch.qint8),
            "channels": torch.quantize_per_channel(X, scales, zeros, 0, torch.quint8),
            "meta": torch.empty(2, 3, device="meta"),
            "masked": torch.masked.masked_tensor(X, X > 1),
            "lazy": torch.nn.UninitializedParameter(),
            "half": C.to(torch.complex32),
            "module": torch.nn.Linear(2, 2),
            "texts": np.array(["a", "b"]),
            "swapped": np.arange(3, dtype=">i4"),
            "inside": [{"deep": X.to_sparse()}],
            "good": X,
        },
        FOLDER / "refused.pt",
    )


def write_dtensors(rank: int, world: int) -> None:
    """What rank 0 saves of DTensors, after FSDP2 say, of one process and of two."""
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(29720 + world)}
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world)}
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (world,))
    state = {
        "rows": distribute_tensor(X, mesh, [Shard(0)]),
        "columns": torch.nn.Parameter(distribute_tensor(X, mesh, [Shard(1)])),
        "same": distribute_tensor(X, mesh, [Replicate()]),
        "plain": X[0],
    }
    if rank == 0:
        torch.save(state, FOLDER / f"dtensors_of_{world}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

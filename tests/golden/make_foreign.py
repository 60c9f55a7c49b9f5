"""Makes tests/golden/foreign: small checkpoints as torch and Megatron-LM write them.

Run it in an environment of its own (it needs torch and transformers, which megajax does not), with
a checkout of NVIDIA/Megatron-LM on the path, whose own models and writer make the Megatron folders:

    python -m venv hf && hf/bin/pip install torch transformers numpy psutil
    PYTHONPATH=Megatron-LM hf/bin/python tests/golden/make_foreign.py

Only the legacy model's files, which Megatron-LM writes no more, are put together here by hand.
The logits are those of transformers; Megatron's forward agrees with them when the files are made.
Made with torch 2.15.0, transformers 5.23.0, Megatron-LM of August 2026.
"""

import argparse
import contextlib
import io
import os
import pathlib
import random
import shutil
import sys

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp
import transformers
from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

FOLDER = pathlib.Path(__file__).parent / "foreign"
WEIGHTS = FOLDER / "llama.pt"  # for the processes that are started; not kept
LAYERS, WIDTH, HEADS, GROUPS, K, MLP, VOCAB, ROWS = 4, 16, 4, 2, 4, 24, 61, 64
RATIO = HEADS // GROUPS
TENSOR, PIPE, CHUNKS = 2, 2, 2
ARGS = dict(
    num_layers=LAYERS,
    hidden_size=WIDTH,
    num_attention_heads=HEADS,
    ffn_hidden_size=MLP,
    num_query_groups=GROUPS,
    group_query_attention=True,
    kv_channels=K,
    normalization="RMSNorm",
    position_embedding_type="rope",
    swiglu=True,
    add_bias_linear=False,
    norm_epsilon=1e-5,
    untie_embeddings_and_output_weights=True,
    padded_vocab_size=ROWS,
    seq_length=32,
    max_position_embeddings=32,
    rotary_base=10000,
    rotary_percent=1.0,
    params_dtype=torch.bfloat16,
    pipeline_model_parallel_size=PIPE,
    tensor_model_parallel_size=TENSOR,
    iteration=7,
    consumed_train_samples=448,
    load=pathlib.PurePosixPath("/data"),
    num_experts=None,
)


def main() -> None:
    """Writes every folder."""
    shutil.rmtree(FOLDER, ignore_errors=True)
    FOLDER.mkdir()
    write_kinds()
    llama, gpt2 = make_models()
    write_legacy(llama, "megatron_legacy")
    write_legacy_gpt2(gpt2)
    mp.spawn(write_dcp, (4,), nprocs=4)
    mp.spawn(check_forward, nprocs=1)
    mp.spawn(write_megatron, nprocs=TENSOR * PIPE)
    WEIGHTS.unlink()


def write_kinds() -> None:
    """One torch.save file: types, strides, shared storages, what is no tensor."""
    x = torch.arange(24, dtype=torch.float32).reshape(4, 6)
    types = "float64 float16 bfloat16 float8_e4m3fn int64 int32 int16 int8 uint8 uint16 uint32 bool"
    state = {
        "types": {t: torch.arange(5).to(getattr(torch, t)) for t in types.split()},
        "whole": x,
        "turned": x.t(),
        "row": x[1],
        "every_other": x[::2, 1::3],
        "repeated": torch.tensor([[7.0], [8.0]]).expand(2, 3),
        "scalar": torch.tensor(2.5),
        "empty": torch.zeros(0, 3),
        "parameter": torch.nn.Parameter(x[:, :1].clone()),
        "complex": torch.complex(x[0], x[1]),
        "dtype": torch.bfloat16,
        "size": torch.Size((2, 3)),
        "names": argparse.Namespace(a=1, b="two"),
        "list": [1, 2.5, None, True, "x", b"y", (1, 2)],
        "set": {1, 2},
        "random": random.Random(0).getstate()[0],
        "buffer": io.BytesIO(b"fp8"),
        "numpy": np.arange(3),
    }
    torch.save(state, FOLDER / "kinds.pt")


def write_dcp(rank: int, world: int) -> None:
    """A DCP folder of four processes: even and uneven shards, in one and two dimensions."""
    start(rank, world, 29711)
    line, plane = init_device_mesh("cpu", (world,)), init_device_mesh("cpu", (2, world // 2))
    rows = torch.arange(60, dtype=torch.float32).reshape(10, 6)
    state = {
        "model": {
            "rows": distribute_tensor(rows, line, [Shard(0)]),
            "plane": distribute_tensor(rows[:7, :5].bfloat16(), plane, [Shard(0), Shard(1)]),
            "few": distribute_tensor(torch.arange(2), line, [Shard(0)]),
            "same": torch.arange(5, dtype=torch.float16),
            "scalar": torch.tensor(3.5),
            "empty": torch.zeros(0, 3),
        },
        "lr": 0.125,
        "steps": [1, 2],
        "note": "hello",
    }
    dcp.save(state, checkpoint_id="dcp")
    dist.destroy_process_group()


def make_models() -> tuple[dict, dict]:
    """Makes the models, writes their logits, returns their weights: values that bfloat16 has."""
    torch.manual_seed(0)
    llama = transformers.LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=WIDTH,
        intermediate_size=MLP,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=GROUPS,
        head_dim=K,
        rms_norm_eps=1e-5,
        max_position_embeddings=32,
        tie_word_embeddings=False,
    )
    gpt2 = transformers.GPT2Config(
        vocab_size=VOCAB, n_embd=WIDTH, n_layer=2, n_head=HEADS, n_positions=32
    )
    tensors, golden = [], {}
    for config in (llama, gpt2):
        config._attn_implementation = "eager"
        model = transformers.AutoModelForCausalLM.from_config(config).eval().float()
        tokens = torch.randint(0, VOCAB, (2, 16))
        with torch.no_grad():
            for p in model.parameters():
                p.copy_((p + 0.2 * torch.randn_like(p)).bfloat16().float())
            logits = model(tokens).logits
        kind = config.model_type
        golden |= {f"{kind}_tokens": tokens.int().numpy(), f"{kind}_logits": logits.numpy()}
        tensors.append({k: v.detach().clone() for k, v in model.state_dict().items()})
    np.savez_compressed(FOLDER / "logits.npz", **golden)
    torch.save(tensors[0], WEIGHTS)
    return tensors[0], tensors[1]


def padded(table: torch.Tensor) -> torch.Tensor:
    """Adds rows of noise, as Megatron's initial values are."""
    noise = torch.randn(ROWS - VOCAB, WIDTH, generator=torch.Generator().manual_seed(1))
    return torch.cat([table, noise.bfloat16().float()])


def fused(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, groups: int) -> torch.Tensor:
    """The queries of a group, its key, its value, the next group."""
    pieces = []
    for g in range(groups):
        ratio = q.shape[0] // (groups * K)
        pieces += [q[g * ratio * K : (g + 1) * ratio * K]]
        pieces += [k[g * K : (g + 1) * K], v[g * K : (g + 1) * K]]
    return torch.cat(pieces)


def whole_llama(hf: dict) -> dict[str, tuple[torch.Tensor, int | None]]:
    """{Megatron-Core's name: (tensor, dimension that is cut)}, layers numbered over all stages."""
    named: dict = {
        "embedding.word_embeddings.weight": (padded(hf["model.embed_tokens.weight"]), 0),
        "output_layer.weight": (padded(hf["lm_head.weight"]), 0),
        "decoder.final_layernorm.weight": (hf["model.norm.weight"], None),
    }
    for i in range(LAYERS):
        t, m = f"model.layers.{i}.", f"decoder.layers.{i}."
        q, k, v = (hf[f"{t}self_attn.{x}_proj.weight"] for x in "qkv")
        halves = [hf[f"{t}mlp.{x}_proj.weight"].chunk(TENSOR) for x in ("gate", "up")]
        gates = torch.cat([torch.cat(pair) for pair in zip(*halves, strict=True)])
        named |= {
            f"{m}self_attention.linear_qkv.weight": (fused(q, k, v, GROUPS), 0),
            f"{m}self_attention.linear_proj.weight": (hf[f"{t}self_attn.o_proj.weight"], 1),
            f"{m}mlp.linear_fc1.weight": (gates, 0),
            f"{m}mlp.linear_fc2.weight": (hf[f"{t}mlp.down_proj.weight"], 1),
            f"{m}input_layernorm.weight": (hf[f"{t}input_layernorm.weight"], None),
            f"{m}pre_mlp_layernorm.weight": (hf[f"{t}post_attention_layernorm.weight"], None),
        }
    return named


def cut(tensor: torch.Tensor, dim: int | None, rank: int) -> torch.Tensor:
    """One tensor rank's piece."""
    return (tensor if dim is None else tensor.chunk(TENSOR, dim)[rank]).clone()


def surroundings(**changes: object) -> dict:
    """What Megatron saves beside the model."""
    from megatron.core.transformer.enums import AttnBackend

    args = argparse.Namespace(**(ARGS | changes), attention_backend=AttnBackend.auto)
    return {"args": args, "checkpoint_version": 3.0, "iteration": 7}


def extras() -> dict:
    """The optimizer and the random states, which are not imported."""
    state = {"step": 7, "exp_avg": torch.zeros(3)}
    numbers = [{"random_rng_state": random.getstate()[0], "np_rng_state": np.arange(3)}]
    return {"optimizer": {"state": {0: state}}, "rng_state": numbers}


def save_rank(state: dict, folder: str, name: str) -> None:
    """Writes one rank's file."""
    home = FOLDER / folder / "iter_0000007" / name
    home.mkdir(parents=True, exist_ok=True)
    torch.save(state, home / "model_optim_rng.pt")
    (FOLDER / folder / "latest_checkpointed_iteration.txt").write_text("7")


LEGACY = (
    ("self_attention.linear_qkv", "self_attention.query_key_value"),
    ("self_attention.linear_proj", "self_attention.dense"),
    ("mlp.linear_fc1", "mlp.dense_h_to_4h"),
    ("mlp.linear_fc2", "mlp.dense_4h_to_h"),
    ("pre_mlp_layernorm", "post_attention_norm"),
    ("input_layernorm", "input_norm"),
)


def legacy_name(name: str) -> str:
    """Megatron-Core's name of a tensor of a layer -> the legacy one."""
    for new, old in LEGACY:
        name = name.replace(new, old)
    return name.removeprefix("decoder.")


def write_legacy(hf: dict, folder: str) -> None:
    """The legacy Llama on 2 x 2 ranks."""
    tensors, per = whole_llama(hf), LAYERS // PIPE
    for t in range(TENSOR):
        for p in range(PIPE):
            model: dict = {"encoder": {}}
            for name, (tensor, dim) in tensors.items():
                piece = cut(tensor, dim, t).bfloat16()
                layer = int(name.split(".")[2]) if ".layers." in name else None
                if layer is not None and p * per <= layer < (p + 1) * per:
                    local = name.replace(f".{layer}.", f".{layer - p * per}.", 1)
                    model["encoder"][legacy_name(local)] = piece
                elif name.startswith("embedding") and p == 0:
                    model["embedding"] = {"word_embeddings": {"weight": piece}}
                elif name.startswith("output") and p == PIPE - 1:
                    model["output_layer"] = {"weight": piece}
                elif "final" in name and p == PIPE - 1:
                    model["encoder"]["final_norm.weight"] = piece
            state = surroundings() | {"model": {"language_model": model}} | extras()
            save_rank(state, folder, f"mp_rank_{t:02d}_{p:03d}")


def write_legacy_gpt2(hf: dict) -> None:
    """The legacy GPT-2 on two tensor ranks, in float16, tied."""
    changes = dict(
        num_layers=2,
        group_query_attention=False,
        num_query_groups=1,
        normalization="LayerNorm",
        position_embedding_type="learned_absolute",
        swiglu=False,
        add_bias_linear=True,
        bias_gelu_fusion=True,
        untie_embeddings_and_output_weights=False,
        ffn_hidden_size=4 * WIDTH,
        pipeline_model_parallel_size=1,
    )
    for t in range(TENSOR):
        layers: dict = {}
        for i in range(2):
            theirs, ours = f"transformer.h.{i}.", f"layers.{i}."
            for kind in ("weight", "bias"):
                get = {n: hf[f"{theirs}{n}.{kind}"].t() for n in ("attn.c_attn", "attn.c_proj")}
                get |= {n: hf[f"{theirs}{n}.{kind}"].t() for n in ("mlp.c_fc", "mlp.c_proj")}
                one, q_k_v = (1 if kind == "weight" else None), get["attn.c_attn"].chunk(3)
                layers |= {
                    f"{ours}self_attention.query_key_value.{kind}": cut(fused(*q_k_v, HEADS), 0, t),
                    f"{ours}self_attention.dense.{kind}": cut(get["attn.c_proj"], one, t),
                    f"{ours}mlp.dense_h_to_4h.{kind}": cut(get["mlp.c_fc"], 0, t),
                    f"{ours}mlp.dense_4h_to_h.{kind}": cut(get["mlp.c_proj"], one, t),
                    f"{ours}input_layernorm.{kind}": hf[f"{theirs}ln_1.{kind}"],
                    f"{ours}post_attention_layernorm.{kind}": hf[f"{theirs}ln_2.{kind}"],
                    f"final_layernorm.{kind}": hf[f"transformer.ln_f.{kind}"],
                }
        words = cut(padded(hf["transformer.wte.weight"]), 0, t)
        positions = hf["transformer.wpe.weight"]
        model = {
            "embedding": {
                "word_embeddings": {"weight": words},
                "position_embeddings": {"weight": positions},
            },
            "encoder": layers,
        }
        state = surroundings(**changes) | {"model": {"language_model": model}}
        save_rank(state, "megatron_gpt2", f"mp_rank_{t:02d}")


def start(rank: int, world: int, port: int) -> None:
    """Joins the processes, without a GPU."""
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world)}
    os.chdir(FOLDER)  # metadata says where it was written
    dist.init_process_group("gloo")
    torch.cuda.current_device, torch.cuda.synchronize = (lambda: "cpu"), (lambda: None)


def build(tensor: int, pipe: int, chunks: int | None) -> list:
    """Megatron-Core's models of this rank, with the weights of the golden Llama."""
    from megatron.core import parallel_state as ps
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.tensor_parallel.random import CudaRNGStatesTracker
    from megatron.core.transformer.transformer_config import TransformerConfig

    CudaRNGStatesTracker.fork = lambda *_: contextlib.nullcontext()
    ps.initialize_model_parallel(tensor, pipe, virtual_pipeline_model_parallel_size=chunks)
    cfg = TransformerConfig(
        num_layers=LAYERS,
        hidden_size=WIDTH,
        num_attention_heads=HEADS,
        num_query_groups=GROUPS,
        kv_channels=K,
        ffn_hidden_size=MLP,
        gated_linear_unit=True,
        normalization="RMSNorm",
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        layernorm_epsilon=1e-5,
        tensor_model_parallel_size=tensor,
        pipeline_model_parallel_size=pipe,
        virtual_pipeline_model_parallel_size=chunks,
        pipeline_dtype=torch.float32,
        use_cpu_initialization=True,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        bias_activation_fusion=False,
        masked_softmax_fusion=False,
        bias_dropout_fusion=False,
    )
    tensors, models = whole_llama(torch.load(WEIGHTS)), []
    for c in range(chunks or 1):
        at = {"ignore_virtual": False, "vp_stage": c} if chunks else {}
        model = GPTModel(
            cfg,
            get_gpt_layer_local_spec(normalization="RMSNorm"),
            vocab_size=ROWS,
            max_sequence_length=32,
            pre_process=ps.is_pipeline_first_stage(**at),
            post_process=ps.is_pipeline_last_stage(**at),
            parallel_output=False,
            share_embeddings_and_output_weights=False,
            position_embedding_type="rope",
            vp_stage=c if chunks else None,
        ).eval()
        rank = ps.get_tensor_model_parallel_rank()
        with torch.no_grad():
            for name, p in model.named_parameters():
                if ".layers." in name:
                    local = int(name.split(".")[2])
                    place = model.decoder.layers[local].layer_number - 1
                    name = name.replace(f".{local}.", f".{place}.", 1)
                piece, dim = tensors[name]
                p.copy_(rejoined(name, piece) if tensor == 1 else cut(piece, dim, rank))
        models.append(model)
    return models


def rejoined(name: str, piece: torch.Tensor) -> torch.Tensor:
    """A gate and an up that were laid out for two ranks, for one rank."""
    if "linear_fc1" not in name:
        return piece
    pairs = [half.chunk(2) for half in piece.chunk(TENSOR)]
    return torch.cat([g for g, _ in pairs] + [u for _, u in pairs])


def check_forward(rank: int) -> None:
    """Megatron's own forward, on one rank, gives the logits of transformers."""
    start(rank, 1, 29712)
    (model,) = build(1, 1, None)
    golden = np.load(FOLDER / "logits.npz")
    tokens = torch.from_numpy(golden["llama_tokens"]).long()
    S = tokens.shape[1]
    positions = torch.arange(S)[None].expand_as(tokens)
    later = torch.triu(torch.ones(S, S, dtype=torch.bool), 1)[None, None]
    with torch.no_grad():
        logits = model(tokens, positions, later)[..., :VOCAB].numpy()
    error = np.abs(logits - golden["llama_logits"]).max()
    print("Megatron's forward differs from transformers' by", error)
    assert error < 1e-4, error
    dist.destroy_process_group()


def write_megatron(rank: int) -> None:
    """Megatron-Core's checkpoints on 2 x 2 ranks: by rank, interleaved; torch_dist, two ways."""
    from megatron.core import dist_checkpointing
    from megatron.core import parallel_state as ps

    start(rank, TENSOR * PIPE, 29713)
    models = [m.bfloat16() for m in build(TENSOR, PIPE, CHUNKS)]
    t, p = ps.get_tensor_model_parallel_rank(), ps.get_pipeline_model_parallel_rank()
    state = surroundings() | extras()
    state |= {f"model{c}": m.state_dict_for_save_checkpoint() for c, m in enumerate(models)}
    save_rank(state, "megatron_core", f"mp_rank_{t:02d}_{p:03d}")
    apart = {"singleton_local_shards": True, "non_homogeneous_layers": True}
    for name, metadata in (("megatron_dist", {}), ("megatron_dist_apart", apart)):
        home = pathlib.Path(name, "iter_0000007")
        if rank == 0:
            home.mkdir(parents=True)
            (home.parent / "latest_checkpointed_iteration.txt").write_text("7")
        dist.barrier()
        sharded = {
            f"model{c}": m.sharded_state_dict(metadata=metadata) for c, m in enumerate(models)
        }
        dist_checkpointing.save(surroundings() | sharded, str(home))
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    sys.exit(main())

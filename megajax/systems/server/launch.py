"""From settings to a server that runs: the socket, the model, the engine, the application."""

import asyncio
import contextlib
import dataclasses
import gc
import math
import os
import socket
import stat
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
from absl import logging

from megajax.core import files
from megajax.core import mesh as mesh_
from megajax.core.errors import UserError
from megajax.core.files import expand
from megajax.data.chat import MAX_TEMPLATE, ChatTemplate, read_template
from megajax.models.vlm import VlmConfig
from megajax.parallel.overlap import refuse_fused
from megajax.serving import Engine
from megajax.serving.forward import replica_axes
from megajax.systems.encoder import OpenEncoder, open_encoder
from megajax.systems.open_model import OpenModel, open_model
from megajax.systems.server import http
from megajax.systems.server.app import Server
from megajax.systems.server.base import Metrics, Work
from megajax.systems.server.chat import Chat
from megajax.systems.server.encoders import EncoderServer, EncoderWork
from megajax.systems.server.images import ImageReader
from megajax.systems.server.options import Config, EngineOptions, HttpOptions, ModelOptions
from megajax.systems.server.protocol import Reader
from megajax.systems.server.worker import Peers, Worker, follow

RUNS = "runs/pretrain/nano-*/config.json"
SHORTEST_KEY = 16  # (chosen) characters


def run(cfg: Config) -> int:
    """Serves until a signal. Returns the exit code. Raises: UserError."""
    mesh_.start(cfg.emulate)
    mesh_.cache_programs(cfg.cache_dir)
    first = jax.process_index() == 0
    made = http.listen(cfg.host, cfg.port) if first else None
    with made or contextlib.nullcontext():
        if made is None:
            follow(load_engine(cfg, open_named(cfg)))
            return 0
        with http.starting(made):
            encoder = open_encoder(
                run_dir=cfg.run_dir, hf=cfg.hf, step=cfg.step, tokenizer=cfg.tokenizer
            )
            worker, server = open_server(cfg) if encoder is None else serve_encoder(cfg, encoder)
        code = asyncio.run(_serve(cfg, worker, server, made))
    if code:  # an orderly end would wait for a compilation, and for the other processes
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    return code


async def _serve(cfg: Config, worker: Work, server: Any, made: socket.socket) -> int:
    # A full collection of garbage stops all threads, and visits each of the 270,000 objects of
    # modules and programs: 0.16 CPU-s, and over a second on a busy machine (measured, 2 CPU cores,
    # 2026-11-29). These objects live as long as the process, so later collections skip them.
    gc.collect()
    gc.freeze()
    print(f"model {server.name!r} on {http.address(made)}/v1 (Ctrl-C stops)", flush=True)
    return await http.serve(server, worker, made, cfg.stop_timeout_s, cfg.max_connections)


def open_server(cfg: Config) -> tuple[Worker, Server]:
    """Opens the model of the settings. Returns what `build_server` returns. Raises: UserError."""
    keys = read_keys(cfg.api_key_file)
    opened = open_named(cfg)
    template = template_of(cfg, opened)
    sampling, line = opened.sampling_defaults() if cfg.sampling_defaults == "model" else ({}, "")
    if line:
        print(line, flush=True)
    engine = load_engine(cfg, opened)
    return build_server(
        engine,
        cfg.served_model_name or opened.name,
        template,
        cfg,
        max_batch=cfg.max_batch,
        keys=keys,
        parse_special=cfg.parse_special,
        sampling=sampling,
    )


def load_engine(cfg: Config, opened: OpenModel) -> Engine:
    """Returns an engine on the mesh of the settings. Raises: UserError."""
    mesh = cfg.mesh.build()
    refuse_fused(cfg.overlap, mesh.devices.flat[0])
    cuts = "tensor", "expert", *replica_axes(mesh, cfg.max_batch)
    alike = math.prod(n for axis, n in mesh.shape.items() if axis not in cuts)
    if alike > 1:
        logging.warning(
            "%d devices or groups of devices compute the same: cut the model with --mesh.tensor or "
            "--mesh.expert, or start a server for each",
            alike,
        )
    begun = time.monotonic()

    def say(text: str) -> None:
        if jax.process_index() == 0:
            print(f"{time.monotonic() - begun:6.1f} s: {text}", flush=True)

    packed = cfg.weights == "packed"
    if cfg.weights == "auto" and cfg.quantize == "none":
        if reason := opened.too_large(mesh, cfg.dtype):
            say(f"--weights=packed: {reason}")
            packed = True
    say(f"reading {opened.name}, compiling the first programs")
    options = {f.name: getattr(cfg, f.name) for f in dataclasses.fields(EngineOptions)}
    if folders := adapter_folders(cfg.adapter, cfg.served_model_name or opened.name):
        options["adapters"] = folders
    engine, what, first = opened.engine(
        mesh,
        lambda: opened.load_to_serve(mesh, cfg.quantize, cfg.dtype, packed),
        outlined=cfg.quantize == "none",
        packed=packed,
        **options,
    )
    say(
        f"{what}; context {engine.context} tokens, {engine.pool.capacity} pages of "
        f"{engine.pool.page_size}, at most {engine.programs.bound} programs"
    )
    if folders:
        say(f"adapters: {', '.join(folders)}; a request chooses by the model's name")
    for number, program in enumerate(first, 1):
        program.result()
        say(f"program {number} of {len(first)} is compiled")
    if first:
        say("programs of other sizes follow beside requests")
    return engine


def adapter_folders(listed: Sequence[str], base: str) -> dict[str, Path]:
    """Returns {name: PEFT folder} of NAME=FOLDER words. base: name of the model under them.

    Raises: UserError for another word, a name that stands twice or is the model's, and several
      processes, whose peers are not told a request's adapter.
    """
    folders: dict[str, Path] = {}
    for word in listed:
        name, _, folder = word.partition("=")
        if not name or not folder:
            raise UserError(
                f"adapter={word!r:.200} must be NAME=FOLDER, or several separated by commas "
                "(--adapter=style=adapters/style)"
            )
        if name in folders or name == base:
            raise UserError(
                f"adapter={name}: two models have this name; requests choose by it (--adapter, "
                "--served_model_name)"
            )
        folders[name] = expand(folder, "adapter")
    if folders and jax.process_count() > 1:
        raise UserError("adapter: a server of several processes has none (--adapter)")
    return folders


# Settings of the engine and of chats, which an encoder does not heed.
OF_DECODERS = (
    "gguf",
    "adapter",
    "quantize",
    "weights",
    "chat_template",
    "context",
    "numerics",
    "mesh",
)


def serve_encoder(cfg: Config, opened: OpenEncoder) -> tuple[EncoderWork, EncoderServer]:
    """Reads an encoder. Returns (its work, which the event loop has to start, the application).

    Raises: UserError for settings that only the server of a decoder has.
    """
    for name in OF_DECODERS:
        if getattr(cfg, name) != getattr(Config(), name):
            raise UserError(
                f"{name}={getattr(cfg, name)}: {opened.name} is an encoder, which one device "
                f"computes in float32; leave --{name} out"
            )
    begun = time.monotonic()

    def say(text: str) -> None:
        print(f"{time.monotonic() - begun:6.1f} s: {text}", flush=True)

    say(f"reading {opened.name}, an encoder")
    encoder = opened.load()
    encoder.compile(say)
    work = EncoderWork(encoder, cfg.max_waiting)
    server = EncoderServer(
        work,
        name=cfg.served_model_name or opened.name,
        keys=read_keys(cfg.api_key_file),
        limits=cfg,
        parse_special=cfg.parse_special,
    )
    return work, server


def build_server(
    engine: Engine,
    name: str,
    template: ChatTemplate | None,
    limits: HttpOptions,
    *,
    max_batch: int,
    keys: list[str] | None = None,
    parse_special: bool = True,
    sampling: Mapping[str, Any] | None = None,
) -> tuple[Worker, Server]:
    """Returns (the worker, which the event loop has to start, the application).

    parse_special, sampling: as of Reader.
    """
    tokenizer: Any = engine.tokenizer
    sees = isinstance(engine.cfg, VlmConfig)
    chat = Chat(template, tokenizer, engine.cfg.image_token if sees else None)
    for doubt in [chat.problem] * (template is not None) + chat.doubts:
        if doubt:
            logging.warning("%s; chat requests may fail (--chat_template=FILE)", doubt)
    metrics = Metrics(name)
    peers = Peers() if jax.process_count() > 1 else None
    worker = Worker(engine, metrics, limits.max_waiting, max_batch, peers)
    reader = Reader(
        [name, *engine.adapters.names],
        tokenizer,
        chat,
        engine.context,
        strict=limits.strict_members,
        parse_special=parse_special,
        sampling=sampling,
        images=ImageReader(engine.see if sees else None, limits, jax.process_count() > 1),
    )
    server = Server(
        worker,
        reader,
        metrics,
        name=name,
        keys=keys or (),
        limits=limits,
        image_bytes=limits.max_image_bytes if sees else 0,
    )
    return worker, server


def open_named(options: ModelOptions) -> OpenModel:
    """Opens the model that is named, or the newest nano run. Raises: UserError."""
    run_dir = options.run_dir
    if run_dir is None and options.hf is None and options.gguf is None:
        run_dir = newest_run()
    return open_model(
        run_dir=run_dir,
        hf=options.hf,
        gguf=options.gguf,
        step=options.step,
        tokenizer=options.tokenizer,
        vision=True,
    )


def newest_run(folder: str | Path = ".") -> str:
    """Returns the newest nano run below a folder. Raises: UserError that says how to get one."""
    runs = [p.parent for p in Path(folder).glob(RUNS) if any(p.parent.glob("checkpoints/*"))]
    if not runs:
        raise UserError(
            "there is no nano run with a checkpoint in runs/pretrain; train one in two minutes "
            "with `uv run experiments/pretrain.py`, or name a model (--run_dir, --hf, --gguf)"
        )
    return str(max(runs, key=lambda p: (p / "checkpoints").stat().st_mtime))


def template_of(options: ModelOptions, opened: OpenModel) -> ChatTemplate | None:
    """Returns the chat template of a file, or of the model.

    Raises: UserError for a file that cannot be read, and for a template in it that cannot be
      compiled or refuses a message of a user. A model's own template only gets a warning later, so
      that completions of the model can be served.
    """
    if options.chat_template is None:
        return opened.chat
    path = expand(options.chat_template, "chat_template")
    source, default = read_template(path, "chat_template"), opened.chat
    template = ChatTemplate(
        source, default.begin if default else "", default.end if default else ""
    )
    chat = Chat(template, opened.tokenizer)
    if reason := chat.problem or chat.refusal:
        raise UserError(
            f"{path}: {reason:.500}; without the flag, chats use the model's own "
            "template (--chat_template)"
        )
    return template


def read_keys(name: str | None) -> list[str]:
    """Returns the keys of a file. Raises: UserError for one that others can read."""
    if name is None:
        return []
    path = expand(name, "api_key_file")
    try:
        mode = os.stat(path).st_mode
        lines = files.read_bytes(path, MAX_TEMPLATE).decode().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot read {path}: {error} (--api_key_file)") from None
    if mode & (stat.S_IROTH | stat.S_IWOTH):
        raise UserError(f"{path} can be read by others: chmod 600 {path} (--api_key_file)")
    keys = [line.strip() for line in lines if line.strip()]
    if not keys or min(map(len, keys)) < SHORTEST_KEY:
        raise UserError(
            f"{path} must have a key a line, of at least {SHORTEST_KEY} characters: openssl rand "
            "-hex 32 (--api_key_file)"
        )
    return keys

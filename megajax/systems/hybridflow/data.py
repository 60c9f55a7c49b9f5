"""Prompts for reinforcement learning: files of rows in verl's form, or a task's endless stream.

A row is {data_source, prompt, reward_model: {ground_truth}, extra_info, ability}; prompt is a text,
or a list of messages {role, content}. jsonl needs nothing; parquet needs the extra `parquet`.
"""

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from megajax.core import files
from megajax.core.errors import UserError
from megajax.core.files import expand
from megajax.systems.hybridflow.batch import DataBatch
from megajax.systems.hybridflow.tasks import RlTask, is_held_out

LINE = 2**22  # (chosen) bytes of a line of jsonl
ROWS = 2**22  # (chosen) rows of a file, which are held in memory
LOOK = 64  # (chosen) first prompts of a task, whose lengths are looked at
MESSAGE = ("role", "content")
COLUMNS = ("data_source", "prompts", "ground_truth", "extra_info", "uid")
TAKEN = (  # columns that an iteration adds
    *("prompt_ids", "response_ids", "completions", "logprobs", "versions", "finish", "groups"),
    *("scores", "advantages", "returns", "old_values", "kl_weight"),
    *("old_logprobs", "ref_logprobs", "trainer_logprobs"),
)


def read(path: str | Path) -> DataBatch:
    """Returns the rows of a .jsonl or .parquet file of verl's form.

    Returns: columns data_source, prompts (a text or messages), ground_truth, extra_info, uid (the
      row's own, or `FILE:NUMBER`), and the row's further members that all rows have.
    Raises: UserError (a ValueError) naming the file, the row and the member that is wrong.
    """
    file = expand(path)
    if file.suffix == ".parquet":
        rows: Iterator[Any] = _parquet(file)
    elif file.suffix in (".jsonl", ".json", ".ndjson"):
        rows = _jsonl(file)
    else:
        raise UserError(f"{file} must be a .jsonl or a .parquet file of rows in verl's form")
    columns: dict[str, list[Any]] = {name: [] for name in COLUMNS}
    more: list[dict[str, Any]] = []
    for number, row in enumerate(rows):
        if number == ROWS:
            raise UserError(f"{file} has more than {ROWS:,} rows; cut it into several files")
        for name, value in _checked(row, f"{file}, row {number}", f"{file.name}:{number}").items():
            columns[name].append(value)
        more.append({k: v for k, v in row.items() if k not in (*COLUMNS, "prompt", "reward_model")})
    if not more:
        raise UserError(f"{file} has no rows")
    shared = set.intersection(*(set(m) for m in more))
    if taken := sorted(shared & {*TAKEN}):
        raise UserError(
            f"{file}: rows have the member {taken[0]!r}, which an iteration makes; rename it"
        )
    return DataBatch(columns | {name: [m[name] for m in more] for name in sorted(shared)})


def _checked(row: Any, where: str, uid: str) -> dict[str, Any]:
    """Returns the columns of one row. Raises: UserError."""
    if not isinstance(row, Mapping):
        raise UserError(f"{where}: a row is an object, not {type(row).__name__}")
    prompt = row.get("prompt", row.get("prompts"))
    if prompt in ("", []):
        raise UserError(f"{where}: `prompt` is empty")
    if isinstance(prompt, list):
        for message in prompt:
            is_object = isinstance(message, Mapping)
            if not is_object or not all(isinstance(message.get(k), str) for k in MESSAGE):
                raise UserError(
                    f"{where}: `prompt` is a text or a list of {{role, content}} of texts"
                )
    elif not isinstance(prompt, str):
        raise UserError(f"{where}: `prompt` must be a text, or a list of {{role, content}}")
    try:
        json.dumps(prompt, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise UserError(
            f"{where}: `prompt` has half of a surrogate pair, which is no text"
        ) from None
    extra = row.get("extra_info")
    if not isinstance(extra, Mapping | None):
        raise UserError(f"{where}: `extra_info` must be an object, not {type(extra).__name__}")
    model = row.get("reward_model")
    truth = row.get("ground_truth")
    if isinstance(model, Mapping):
        truth = model.get("ground_truth", truth)
    source, number = row.get("data_source"), row.get("uid")  # None in parquet if there is none
    return {
        "data_source": "" if source is None else str(source),
        "prompts": prompt,
        "ground_truth": truth,
        "extra_info": dict(extra or {}),
        "uid": uid if number is None else str(number),
    }


def _jsonl(file: Path) -> Iterator[Any]:
    try:
        with files.open_regular(file) as opened:
            number = 0
            while line := opened.readline(LINE + 1):
                if len(line) > LINE:
                    raise UserError(f"{file}, row {number}: a line of more than {LINE} bytes")
                if line.strip():
                    try:
                        yield files.parse_json(line)
                    except (ValueError, json.JSONDecodeError) as error:
                        raise UserError(f"{file}, row {number}: {error}") from None
                    number += 1
    except OSError as error:
        raise UserError(f"cannot read {file}: {error.strerror}") from None


def _parquet(file: Path) -> Iterator[Any]:
    try:
        import pyarrow.parquet as parquet
    except ImportError:
        raise UserError(f"{file}: reading parquet needs `uv sync --extra parquet`") from None
    try:
        with files.open_regular(file) as opened, parquet.ParquetFile(opened) as table:
            for batch in table.iter_batches(1024):
                yield from batch.to_pylist()
    except OSError as error:
        raise UserError(f"cannot read {file}: {error.strerror or error}") from None
    except UserError:
        raise
    except Exception as error:  # pyarrow has errors of its own
        raise UserError(f"{file} is not a parquet file: {str(error)[:200]}") from None


class Prompts:
    """Rows by number, of a task's stream or of a file, in two parts, with the column prompt_ids.

    Row i of a part is a function of (seed, i): a file's rows come in an order of their own in each
    epoch. identity: what must not change under a data position. notes: lines on what is left out or
    missing.
    """

    def __init__(
        self,
        source: RlTask | DataBatch,
        seed: int,
        fraction: float,
        name: str,
        encode: Callable[[Any], list[int]],
        most: int,
    ):
        """Args: fraction: of the prompts that are held out, by their content; in (0, 1).
          encode(prompt): its token ids. most: of these; rows with more, or none, are left out.

        Raises: UserError for a file of which one part has no row, or if no prompt is that short.
        """
        self._seed, self._fraction, self._encode, self._most = seed, fraction, encode, most
        self.identity: dict[str, Any] = {"prompts": name, "seed": seed, "holdout": fraction}
        self.notes: list[str] = []
        self._parts: tuple[np.ndarray, ...] = ()
        if isinstance(source, RlTask):
            first = [source.row(seed, i, False, fraction)["prompts"] for i in range(LOOK)]
            ids, what = [encode(prompt) for prompt in first], f"the first {LOOK} prompts"
        else:
            ids, what = [encode(prompt) for prompt in source["prompts"]], f"{len(source)} prompts"
        fitting = [i for i, x in enumerate(ids) if 0 < len(x) <= most]
        if not fitting:
            shortest = max(1, min(map(len, ids)))
            raise UserError(
                f"{name}: none of {what} has 1 to rl.max_prompt={most} tokens; the shortest has "
                f"{shortest} (--rl.max_prompt)"
            )
        if len(fitting) < len(ids):
            self.notes.append(
                f"{len(ids) - len(fitting)} of {what} have more than {most} tokens, or none, and "
                "are left out (--rl.max_prompt)"
            )
        if isinstance(source, DataBatch):
            source = source.union(DataBatch({"prompt_ids": ids})).take(fitting)
            if lacking := sum(truth is None for truth in source["ground_truth"]):
                self.notes.append(
                    f"{lacking} of {len(source)} rows have no ground_truth: a reward gets None"
                )
            texts = [json.dumps(p, sort_keys=True) for p in source["prompts"]]
            held = np.array([is_held_out(text, fraction) for text in texts])
            self._parts = np.flatnonzero(~held), np.flatnonzero(held)
            for part, what in zip(self._parts, ("training", "held-out"), strict=True):
                if not len(part):
                    raise UserError(
                        f"{name}: none of its {len(source)} rows is in the {what} part; change "
                        "--rl.holdout, or give more rows"
                    )
            digest = hashlib.blake2b("\0".join(texts).encode(), digest_size=16).hexdigest()
            self.identity["fingerprint"] = digest
        self._source = source

    def rows(self, first: int, count: int, held_out: bool = False) -> DataBatch:
        """Returns rows first, first + 1, ... of the training part, or of the held-out one."""
        numbers = range(first, first + count)
        if isinstance(self._source, RlTask):
            arguments = held_out, self._fraction, self._is_short
            rows = [self._source.row(self._seed, i, *arguments) for i in numbers]
            columns = {name: [row[name] for row in rows] for name in COLUMNS}
            ids = [self._encode(prompt) for prompt in columns["prompts"]]
            return DataBatch(columns | {"prompt_ids": ids})
        part = self._parts[held_out]
        if held_out:
            return self._source.take([part[i % len(part)] for i in numbers])
        orders: dict[int, np.ndarray] = {}
        for epoch in {i // len(part) for i in numbers}:
            orders[epoch] = np.random.default_rng([self._seed, epoch]).permutation(part)
        return self._source.take([orders[i // len(part)][i % len(part)] for i in numbers])

    def _is_short(self, prompt: str) -> bool:
        return 0 < len(self._encode(prompt)) <= self._most

    def held_out(self, most: int) -> int:
        """Returns how many held-out rows there are, at most `most`."""
        return most if isinstance(self._source, RlTask) else min(most, len(self._parts[1]))

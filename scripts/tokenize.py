"""Tokenises a source into Megatron .bin/.idx files.

    uv run scripts/tokenize.py --data.source=TEXT/ --data.tokenizer=tokenizer.json --out=corpus/web
    uv run experiments/pretrain.py --data.source=corpus/web

Beside the pair it writes corpus/web.json (statistics), corpus/web.tokenizer/ (unless the tokens are
bytes; a run takes it from there) and corpus/web.documents.npy (keys of each document's content,
which decide what is held out, and its bytes, so that evaluation can report bits per byte).
"""

import megajax.core.interrupted  # noqa: F401

import sys

if __name__ == "tokenize":
    # Python puts scripts/ first on the path, so the standard library's own `import tokenize` (from
    # linecache) finds this file, here and in every script beside it: give it what it asked for.
    import importlib.util
    import sysconfig

    _spec = importlib.util.spec_from_file_location(
        "tokenize", f"{sysconfig.get_path('stdlib')}/tokenize.py"
    )
    _module = importlib.util.module_from_spec(_spec)
    sys.modules["tokenize"] = _module
    _spec.loader.exec_module(_module)
else:
    from dataclasses import dataclass
    from pathlib import Path

    from megajax.core import config
    from megajax.core.config import Checked, group, option
    from megajax.core.errors import UserError
    from megajax.core.files import expand
    from megajax.data.config import DataConfig
    from megajax.data.corpus import open_tokenizer_for, tokenise
    from megajax.data.source import open_source

    @dataclass(frozen=True)
    class Config(Checked):
        """What to tokenise and where to."""

        out: str = option("", "prefix of the files to write")
        data: DataConfig = group(DataConfig)
        cache_dir: str = option("~/.cache/megajax", "folder in which trained tokenizers are kept")

    PRESETS = {"default": Config}
    config.define_flags(PRESETS, "default")

    def main() -> int:
        """Writes the files."""
        cfg, _ = config.from_flags(PRESETS)
        if not cfg.out:
            raise UserError("name the files to write (--out=corpus/web)")
        out = expand(cfg.out, "out")
        out = out.with_suffix("") if out.suffix in (".bin", ".idx") else out
        if out.name in ("", ".."):
            raise UserError(
                f"out={cfg.out} names a folder; name the files in it (--out=corpus/web)"
            )
        if Path(f"{out}.idx").exists():
            raise UserError(f"{out}.idx exists; remove it or choose another --out")
        source = open_source(cfg.data.source, cfg.data)
        if said := source.coverage():
            print(said)
        tokenizer = open_tokenizer_for(cfg.data, [source], expand(cfg.cache_dir, "cache_dir"))
        try:
            stats = tokenise(source, tokenizer, out)
        except FileExistsError:
            raise UserError(f"{out}.idx was made meanwhile; choose another --out") from None
        except OSError as error:
            raise UserError(f"cannot write {out}: {error.strerror or error} (--out)") from None
        counted = f"{stats['documents']:,} documents, {stats['tokens']:,} tokens"
        print(f"{counted} in {out}.bin and .idx")
        return 0

    if __name__ == "__main__":
        sys.exit(config.run(main))

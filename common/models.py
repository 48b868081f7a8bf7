"""Agents' models as they travel: from what a user passes to something any process can build."""

from __future__ import annotations

import copy
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from huggingface_hub import HfApi, try_to_load_from_cache
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from common.errors import ConfigurationError, ModelError, shown
from common.types import Weights
from common.weights import load_into, named_state, pack

_HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")


@dataclass(frozen=True)
class AgentModel:
    """One agent's model.

    Attributes:
        name: the hub name or folder it is read from, or None where it came as an object.
        config: its configuration.
        generation_config: its generation configuration.
        model_class: the class of the object, or None where it came by name.
        weights: the weights the object had in memory, or None where it came by name.
        frozen: names of the object's parameters that do not require a gradient, and are not trained.
    """

    name: str | None
    config: PretrainedConfig
    generation_config: GenerationConfig
    model_class: type[PreTrainedModel] | None = None
    weights: Weights | None = None
    frozen: frozenset[str] = frozenset()

    @property
    def context_length(self) -> int | None:
        """Positions the model has, None where its configuration does not say."""
        return getattr(self.config.get_text_config(), "max_position_embeddings", None)

    @property
    def vocab_size(self) -> int:
        """Rows of the embedding."""
        return self.config.get_text_config().vocab_size

    def build(self) -> PreTrainedModel:
        """The model in float32 on the host.

        Raises:
            ModelError: its files cannot be read where this is called.
        """
        if self.weights is None:
            model, found = _read(
                AutoModelForCausalLM.from_pretrained,
                self.name,
                "weights",
                dtype=torch.float32,
                output_loading_info=True,
            )
            if found["missing_keys"]:
                raise ModelError(f"the weights of model {self.name!r} lack {shown(sorted(found['missing_keys']), 600)}")
            return model
        model = self.empty()
        load_into(model, self.weights)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(name not in self.frozen)
        return model

    def empty(self) -> PreTrainedModel:
        """The model in float32 on the host, with weights that mean nothing."""
        config = copy.deepcopy(self.config)
        config.dtype = torch.float32
        state = torch.get_rng_state()
        if self.model_class is None:
            model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        else:
            model = self.model_class(config).float()
        torch.set_rng_state(state)
        model.generation_config = copy.deepcopy(self.generation_config)
        return model


def resolve_agents(
    agents: Sequence[str | PreTrainedModel] | None, agent_model: str | None, num_agents: int | None
) -> list[str | PreTrainedModel]:
    """One name or model per agent, from either way of saying it.

    Raises:
        ConfigurationError: nothing is given, or what is given contradicts itself.
    """
    if num_agents is not None and (not isinstance(num_agents, int) or num_agents < 1):
        raise ConfigurationError(f"num_agents={num_agents!r} is not allowed: there must be at least one agent")
    if agents is None:
        if not isinstance(agent_model, (str, os.PathLike)):
            raise ConfigurationError(
                f"agent_model must be the name or folder that every agent starts from, got {agent_model!r}; models "
                "that are in memory go into `agents`, one per agent"
            )
        agents = [agent_model] * (2 if num_agents is None else num_agents)
    elif isinstance(agents, (str, PreTrainedModel)) or not isinstance(agents, Sequence):
        raise ConfigurationError(f"agents must be a list with a model or a name per agent, got {type(agents).__name__}")
    elif agent_model is not None:
        raise ConfigurationError("give either agents or agent_model, not both")
    if num_agents is not None and num_agents != len(agents):
        raise ConfigurationError(
            f"num_agents={num_agents} but agents has {len(agents)} entries: leave num_agents out, or make them agree"
        )
    if not agents:
        raise ConfigurationError("there must be at least one agent")
    for agent, source in enumerate(agents):
        if not isinstance(source, (str, os.PathLike, PreTrainedModel)):
            raise ConfigurationError(
                f"agents[{agent}] must be a transformers model or the name of one, got {type(source).__name__}"
            )
    models = [id(source) for source in agents if isinstance(source, PreTrainedModel)]
    if len(set(models)) < len(models):
        raise ConfigurationError("two entries of agents are the same model object: give each agent its own copy")
    return [source if isinstance(source, PreTrainedModel) else os.fspath(source) for source in agents]


def describe_agent(source: str | PreTrainedModel) -> AgentModel:
    """What is needed to build the agent's model elsewhere; of a named model only its configuration is read.

    Raises:
        ModelError: the name leads nowhere, or is not a causal language model whose weights can be trained.
    """
    if isinstance(source, PreTrainedModel):
        if getattr(source, "is_quantized", False) or not all(p.is_floating_point() for p in source.parameters()):
            raise ModelError(f"{type(source).__name__} has quantised weights: load it without quantisation to train it")
        config = copy.deepcopy(source.config)
        config.architectures = [type(source).__name__]
        if hasattr(config, "quantization_config"):
            del config.quantization_config
        frozen = frozenset(name for name, p in source.named_parameters() if not p.requires_grad)
        if len(frozen) == len(dict(source.named_parameters())):
            raise ModelError(f"no parameter of the {type(source).__name__} requires a gradient: nothing can be trained")
        weights = pack(named_state(source).items())
        return AgentModel(None, config, copy.deepcopy(source.generation_config), type(source), weights, frozen)
    check_model_name(source)
    config = _read(AutoConfig.from_pretrained, source, "configuration")
    if type(config) not in AutoModelForCausalLM._model_mapping:
        raise ModelError(f"{source!r} is a {config.model_type} model, which is not a causal language model")
    if getattr(config, "quantization_config", None):
        raise ModelError(f"{source!r} has quantised weights: give the model without quantisation to train it")
    try:
        generation_config = GenerationConfig.from_pretrained(source)
    except OSError:
        generation_config = GenerationConfig.from_model_config(config)
    return AgentModel(source, config, generation_config)


def check_model_name(name: str) -> None:
    """Refuse a name that is neither a model folder nor a model that the hub, or its cache here, has.

    Raises:
        ModelError: it is neither.
    """
    if os.path.isdir(name):
        if not os.path.isfile(os.path.join(name, "config.json")):
            raise ModelError(f"the folder {name!r} has no config.json: give a folder written by save_pretrained")
        return
    if not _HUB_NAME.fullmatch(name) or name.startswith("."):
        raise ModelError(f"there is no model folder {name!r} (looked from {os.getcwd()!r}): check the path")
    if isinstance(try_to_load_from_cache(name, "config.json"), str):
        return
    try:
        HfApi().model_info(name, timeout=10)
    except Exception as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ModelError(
            f"the model {name!r} is neither a folder (looked from {os.getcwd()!r}), nor in the cache, nor to be had "
            f"from the hub ({reason}): check the name, or give a folder written by save_pretrained"
        ) from None


def resolve_tokenizers(
    tokenizer: PreTrainedTokenizerBase | Sequence[PreTrainedTokenizerBase] | None,
    sources: Sequence[str | PreTrainedModel],
) -> list[PreTrainedTokenizerBase]:
    """One tokenizer per agent; where none is given, the one that lies beside the agent's model.

    Raises:
        ConfigurationError: a number other than one or one per agent, or none for a model that has no name.
        ModelError: there is none beside the model.
    """
    if tokenizer is None:
        return [_tokenizer_beside(agent, source) for agent, source in enumerate(sources)]
    tokenizers = list(tokenizer) if isinstance(tokenizer, (list, tuple)) else [tokenizer] * len(sources)
    if len(tokenizers) != len(sources):
        raise ConfigurationError(
            f"tokenizer has {len(tokenizers)} entries for {len(sources)} agents: give one, or one per agent"
        )
    for entry in tokenizers:
        if not isinstance(entry, PreTrainedTokenizerBase):
            raise ConfigurationError(
                f"tokenizer must be a transformers tokenizer or one per agent, got {type(entry).__name__}"
            )
    return tokenizers


def stop_token_ids(model: AgentModel, tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """Every token that ends a completion: all of the generation configuration's and the tokenizer's."""
    configured = model.generation_config.eos_token_id
    listed = configured if isinstance(configured, (list, tuple)) else [configured]
    found = {int(token) for token in [*listed, tokenizer.eos_token_id] if token is not None}
    return tuple(sorted(token for token in found if 0 <= token < model.vocab_size))


def _tokenizer_beside(agent: int, source: str | PreTrainedModel) -> PreTrainedTokenizerBase:
    name = source if isinstance(source, str) else source.config._name_or_path
    if not name:
        raise ConfigurationError(f"agents[{agent}] is a model without a name: pass its tokenizer as `tokenizer`")
    check_model_name(name)
    return _read(AutoTokenizer.from_pretrained, name, "tokenizer")


def _read(loader: Any, name: str, what: str, **arguments: Any) -> Any:
    try:
        return loader(name, **arguments)
    except (OSError, ValueError, KeyError, ImportError, RuntimeError) as error:
        raise ModelError(
            f"the {what} of model {name!r} cannot be read: {shown(str(error).strip(), 600)}. A model folder is what "
            "save_pretrained writes"
        ) from None

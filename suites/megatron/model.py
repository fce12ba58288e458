"""A small Megatron model with two gated delta nets, built as a user would build it."""

# mypy: allow-untyped-calls

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

Tensor = torch.Tensor

LAYERS, HIDDEN, VOCABULARY = 2, 256, 512
KEY_HEADS, VALUE_HEADS, KEY_SIZE, VALUE_SIZE = 8, 16, 64, 128
BATCH, TOKENS = 2, 320

MEMORY = 64
"""How many times longer than Megatron's initial weights a model remembers: they forget a state, and its
rounding with it, within a token."""

Step = tuple[torch.Tensor, dict[str, torch.Tensor]]
"""The loss and the gradients of one step."""

SPLIT_TOKENS = "sequence_parallel"
"""Megatron's mark on weights that see some tokens on each rank: their gradients are sums over the ranks."""

RECOMPUTE: dict[str, dict[str, Any]] = {
    "none": {},
    "full": {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
    "selective": {"recompute_granularity": "selective", "recompute_modules": ["mlp"]},
    "gdn_norm_out": {"recompute_granularity": "selective", "recompute_modules": ["gdn_norm_out"]},
}
"""Ways of recomputing activations -> the options of Megatron's configuration."""


@dataclass(frozen=True)
class Batch:
    """Token ids, labels and positions, each `[B, T]`."""

    tokens: Tensor
    labels: Tensor
    positions: Tensor


def device() -> torch.device:
    """The device that Megatron builds modules on in this process."""
    return torch.device(torch.cuda.current_device())


def start(tensor_parallel: int) -> None:
    """Joins the process group and sets Megatron's groups up; the launcher has set the environment."""
    from megatron.core import parallel_state

    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    if not torch.distributed.is_initialized():
        torch.distributed.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=tensor_parallel)


def ranks() -> int:
    """How many ranks share a layer now."""
    from megatron.core import parallel_state

    return int(parallel_state.get_tensor_model_parallel_world_size())


def rank() -> int:
    """Which of them this process is."""
    from megatron.core import parallel_state

    return int(parallel_state.get_tensor_model_parallel_rank())


@contextmanager
def one_rank() -> Iterator[None]:
    """Within it every rank builds whole models of its own; before and after it, ranks share layers."""
    from megatron.core import parallel_state

    before = ranks()
    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=1)
    try:
        yield
    finally:
        parallel_state.destroy_model_parallel()
        parallel_state.initialize_model_parallel(tensor_model_parallel_size=before)


def spec(config: Any) -> Any:
    """The specification of the decoder block."""
    from megatron.core.models.gpt import experimental_attention_variant_module_specs as variants

    if parts() == "local":
        return local_spec(config)
    return variants.get_transformer_block_with_experimental_attention_variant_spec(config)


def local_spec(config: Any) -> Any:
    """The block out of Megatron's own parts, for machines without Transformer Engine."""
    from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
    from megatron.core.models.backends import LocalSpecProvider
    from megatron.core.models.gpt.gpt_layer_specs import get_mlp_module_spec_for_backend
    from megatron.core.ssm.gated_delta_net import GatedDeltaNet, GatedDeltaNetSubmodules
    from megatron.core.transformer.spec_utils import ModuleSpec
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
    from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules

    parts = LocalSpecProvider()
    norm = MarkedNorm if config.sequence_parallel else parts.layer_norm(rms_norm=True)
    attention = ModuleSpec(
        module=GatedDeltaNet,
        submodules=GatedDeltaNetSubmodules(
            in_proj=parts.column_parallel_linear(), out_norm=norm, out_proj=parts.row_parallel_linear()
        ),
    )
    layer = ModuleSpec(
        module=TransformerLayer,
        submodules=TransformerLayerSubmodules(
            input_layernorm=norm,
            self_attention=attention,
            self_attn_bda=get_bias_dropout_add,
            pre_mlp_layernorm=norm,
            mlp=get_mlp_module_spec_for_backend(backend=parts, num_experts=None),
            mlp_bda=get_bias_dropout_add,
        ),
    )
    return TransformerBlockSubmodules(layer_specs=[layer] * config.num_layers, layer_norm=norm)


class MarkedNorm:
    """Torch's RMSNorm with the mark that its weight needs where every rank sees other tokens.

    Takes the place of Megatron's local norm, which is torch's too and refuses sequence parallelism.
    """

    def __new__(cls, config: Any, hidden_size: int, eps: float = 1e-5, **_: Any) -> Any:
        """Called by Megatron to build a norm."""
        norm = torch.nn.RMSNorm(hidden_size, eps=eps)
        setattr(norm.weight, SPLIT_TOKENS, config.sequence_parallel)
        return norm


def parts() -> str:
    """What a model is made of here: `transformer_engine` or `local`."""
    from megatron.core.models.gpt import experimental_attention_variant_module_specs as variants

    return "transformer_engine" if variants.HAVE_TE else "local"


def unsupported(recompute: str) -> str:
    """Why Megatron itself cannot do something with the parts that are installed; empty when it can."""
    if recompute == "gdn_norm_out" and parts() == "local":
        return "Megatron's output-discarding recompute asks Transformer Engine for its FP8 state; install it"
    return ""


def build(
    tensor_parallel: int, recompute: str = "none", seed: int = 1234, *, sequence_parallel: bool = False
) -> Any:
    """A model in bf16 on this process's device; the same seed gives the same weights.

    Args:
        tensor_parallel: how many ranks share a layer.
        recompute: a key of `RECOMPUTE`.
        seed: of the weights.
        sequence_parallel: split the tokens of norms among the ranks too.
    """
    from megatron.core.models.gpt import GPTModel
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
    from megatron.core.transformer import TransformerConfig

    torch.manual_seed(seed)
    model_parallel_cuda_manual_seed(seed)
    config = TransformerConfig(
        num_layers=LAYERS,
        hidden_size=HIDDEN,
        ffn_hidden_size=2 * HIDDEN,
        num_attention_heads=KEY_HEADS,
        normalization="RMSNorm",
        activation_func=torch.nn.functional.silu,
        gated_linear_unit=True,
        add_bias_linear=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        bf16=True,
        params_dtype=torch.bfloat16,
        pipeline_dtype=torch.bfloat16,
        tensor_model_parallel_size=tensor_parallel,
        sequence_parallel=sequence_parallel,
        gradient_accumulation_fusion=False,
        experimental_attention_variant="gated_delta_net",
        linear_attention_freq=[1] * LAYERS,
        linear_conv_kernel_dim=4,
        linear_key_head_dim=KEY_SIZE,
        linear_value_head_dim=VALUE_SIZE,
        linear_num_key_heads=KEY_HEADS,
        linear_num_value_heads=VALUE_HEADS,
        **RECOMPUTE[recompute],
    )
    model = GPTModel(
        config,
        spec(config),
        vocab_size=VOCABULARY,
        max_sequence_length=TOKENS,
        position_embedding_type="none",
    )
    with torch.no_grad():
        for module in gated_delta_nets(model).values():
            module.A_log.sub_(math.log(MEMORY))
    return model.to(device=device(), dtype=torch.bfloat16).train()


def batch(seed: int = 7) -> Batch:
    """Random tokens, the same on every rank."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(VOCABULARY, (BATCH, TOKENS + 1), generator=generator).to(device())
    positions = torch.arange(TOKENS, device=device()).expand(BATCH, -1)
    return Batch(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous(), positions)


def loss_of(model: Any, data: Batch) -> Tensor:
    """Mean cross-entropy of a batch."""
    losses: Tensor = model(data.tokens, data.positions, None, labels=data.labels)
    return losses.float().mean()


def loss_and_gradients(model: Any, data: Batch) -> Step:
    """The loss and the gradients of one step, without a step."""
    model.zero_grad(set_to_none=True)
    loss = loss_of(model, data)
    loss.backward()
    found = {name: p.grad.detach().clone() for name, p in model.named_parameters() if p.grad is not None}
    return loss.detach(), found


def gated_delta_nets(model: Any) -> dict[str, Any]:
    """Name -> module of every gated delta net."""
    return dict(_gated_delta_nets(model))


def _gated_delta_nets(model: Any) -> Iterator[tuple[str, Any]]:
    for name, module in model.named_modules():
        if hasattr(module, "gated_delta_rule"):
            yield name, module


def branch_inputs(model: Any, data: Batch) -> dict[str, tuple[tuple[Any, ...], dict[str, Any]]]:
    """Name of each gated delta net -> the arguments that it is called with in a forward pass."""
    seen: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {}
    hooks = []
    for name, module in gated_delta_nets(model).items():

        def remember(_: Any, arguments: Any, options: Any, name: str = name) -> None:
            seen.setdefault(name, (arguments, options))

        hooks.append(module.register_forward_pre_hook(remember, with_kwargs=True))
    with torch.no_grad():
        loss_of(model, data)
    for hook in hooks:
        hook.remove()
    return seen


def branch_outputs(
    model: Any, inputs: dict[str, tuple[tuple[Any, ...], dict[str, Any]]]
) -> dict[str, Tensor]:
    """Name of each gated delta net -> its output `[T, B, hidden]` on given arguments."""
    found = {}
    with torch.no_grad():
        for name, module in gated_delta_nets(model).items():
            arguments, options = inputs[name]
            found[name] = module(*arguments, **options)[0]
    return found

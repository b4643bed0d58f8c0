"""Flax modules for the head of a policy: log-probabilities and entropies from hidden states, NNX and Linen.

They hold options and parameters, and hand both to the ops from hidden states: sharding, memory, precision and the
values of tokens that do not count are described there, with `linear_token_logprobs`. Importing `jaxrl_logprob` does
not import this module, which needs Flax.
"""

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.sharding import AbstractMesh, Mesh
from jax.typing import ArrayLike
from jaxtyping import Array, Bool, Float, Integer

from . import _linear as ops
from ._chunks import Chunks
from ._head import check_hidden_states, head_activations, head_weights, LoraHead, TiedEmbedding
from ._head_blocks import head_logits, Operands
from ._scoring import arithmetic_dtype, LogprobsAndEntropy
from ._transform import check_static_int, LogitTransform, transform_logits
from .sharding import MeshAxes
from .sharding._errors import wrong


# As in nnx.LoRA.
_init_a = nnx.initializers.he_uniform()


class _Methods:
    """What a head can be asked, NNX or Linen. All of it is of [*batch] tokens, in nats.

    Args of every method:
        hidden_states: last-layer activations, floating point.
        targets: ids in [0, V), already aligned with the position that predicts them; `ids`: K of them for each token.
        entropy_coef: decides whether the entropy has a gradient, as in `token_logprobs_and_entropy`.
        loss_mask: True where the token counts; elsewhere results are 0 and hidden_states may hold anything.
        temperature: for this call instead of the head's; may be traced, scalar or [*batch].
        tied: for a tied `LinenLogprobHead` `embedding=`, [V, D]; nothing otherwise.
    """

    logit_softcap: float | None
    temperature: ArrayLike
    vocab_size: int | None
    ignore_index: int
    axes: MeshAxes | None
    mesh: Mesh | AbstractMesh | None
    chunks: Chunks
    _operands: Callable[..., tuple[Any, Any, Any]]  # hidden_states, lm_head and bias for the ops.

    def __call__(
        self,
        hidden_states: Float[Array, "*batch D"],
        targets: Integer[Array, "*batch"],
        *,
        entropy_coef: ArrayLike | None = 1.0,
        loss_mask: Bool[Array, "*batch"] | None = None,
        temperature: ArrayLike | None = None,
        **tied: Float[Array, "V D"],
    ) -> LogprobsAndEntropy:
        """Log-probabilities of the targets, and entropies: `linear_token_logprobs_and_entropy`."""
        operands, options = self._operands(hidden_states, **tied), self._options(temperature, loss_mask)
        options |= dict(entropy_coef=entropy_coef, ignore_index=self.ignore_index)
        return ops.linear_token_logprobs_and_entropy(*operands[:2], targets, bias=operands[2], **options)

    def logprobs(
        self,
        hidden_states: Float[Array, "*batch D"],
        targets: Integer[Array, "*batch"],
        *,
        loss_mask: Bool[Array, "*batch"] | None = None,
        temperature: ArrayLike | None = None,
        **tied: Float[Array, "V D"],
    ) -> Float[Array, "*batch"]:
        """Log-probabilities of the targets: `linear_token_logprobs`."""
        operands, options = self._operands(hidden_states, **tied), self._options(temperature, loss_mask)
        options |= dict(ignore_index=self.ignore_index)
        return ops.linear_token_logprobs(*operands[:2], targets, bias=operands[2], **options)

    def entropy(
        self,
        hidden_states: Float[Array, "*batch D"],
        *,
        entropy_coef: ArrayLike | None = 1.0,
        loss_mask: Bool[Array, "*batch"] | None = None,
        temperature: ArrayLike | None = None,
        **tied: Float[Array, "V D"],
    ) -> Float[Array, "*batch"]:
        """Entropies: `linear_token_entropy`."""
        operands, options = self._operands(hidden_states, **tied), self._options(temperature, loss_mask)
        return ops.linear_token_entropy(*operands[:2], entropy_coef=entropy_coef, bias=operands[2], **options)

    def gather(
        self,
        hidden_states: Float[Array, "*batch D"],
        ids: Integer[Array, "*batch K"],
        *,
        loss_mask: Bool[Array, "*batch"] | None = None,
        temperature: ArrayLike | None = None,
        **tied: Float[Array, "V D"],
    ) -> Float[Array, "*batch K"]:
        """Log-probabilities of K ids for each token: `linear_gather_logprobs`."""
        operands, options = self._operands(hidden_states, **tied), self._options(temperature, loss_mask)
        options |= dict(ignore_index=self.ignore_index)
        return ops.linear_gather_logprobs(*operands[:2], ids, bias=operands[2], **options)

    def logits(self, hidden_states: Float[Array, "*batch D"], **tied: Float[Array, "V D"]) -> Float[Array, "*batch V"]:
        """The logits, for a sampler: after softcap, -inf from `vocab_size` on, not divided by the temperature.

        Of size N x V, float32 (float64 where an input is), and split as JAX decides: `axes` and `mesh` play no part.
        """
        hidden_states, lm_head, bias = self._operands(hidden_states, **tied)
        batch = hidden_states.shape[:-1]
        weights, matrices = head_weights(lm_head, hidden_states.shape[-1])
        activations, _ = head_activations(hidden_states, lm_head, jnp.ones(batch, bool))
        operands = Operands(activations, matrices, bias)
        logits = head_logits(tuple(weights), operands, arithmetic_dtype(*jax.tree.leaves(operands)))
        columns = logits.shape[-1]
        if self.vocab_size is None:
            return transform_logits(logits, None, self.logit_softcap, columns)
        if self.vocab_size > columns:
            raise ValueError(wrong("vocab_size", f"be at most the {columns} columns of the head", self.vocab_size))
        ids = lax.broadcasted_iota(jnp.int32, (*(1 for _ in batch), columns), len(batch))
        return transform_logits(logits, ids, self.logit_softcap, self.vocab_size)

    def _options(self, temperature: ArrayLike | None, loss_mask: jax.Array | None) -> dict[str, Any]:
        temperature = self.temperature if temperature is None else temperature
        transform = LogitTransform(temperature, self.logit_softcap, self.vocab_size)
        return dict(loss_mask=loss_mask, transform=transform, axes=self.axes, mesh=self.mesh, chunks=self.chunks)


class LogprobHead(_Methods, nnx.Module):
    """Log-probabilities and entropies of an `nnx.Linear` or a tied `nnx.Embed`, whose logits are never formed.

    The layer is held, not copied: it may be part of the model elsewhere, and `nnx.grad` then gives a tied embedding
    the sum of both gradients. Where a model is differentiated as a plain JAX tree (`jax.grad`), which has no sharing,
    make the head inside of the loss instead: `LogprobHead(model.embed)`.

    Args:
        layer: kernel [D, V] and perhaps a bias, or embedding [V, D]. Where it has a `dtype`, hidden states and
            parameters are cast to it, as in its own call; the cast of the parameters is a copy.
        logit_softcap, temperature, vocab_size: as in `LogitTransform`; the temperature for calls that give no other.
        ignore_index: a target that does not count.
        axes, mesh, chunks: as for `linear_token_logprobs`.
        lora_rank: r, for a low-rank adapter: `a` [D, r], random, and `b` [r, V], zeros, of type `nnx.LoRAParam`. To
            freeze the rest, differentiate and optimise these alone: `nnx.DiffState(0, nnx.LoRAParam)`.
        lora_alpha: the adapter adds a b lora_alpha / r to the kernel; a b if None.
        rngs: what `a` is drawn from.

    Raises:
        TypeError: another layer; a softcap, size or rank of another type.
        ValueError: a layer with its own `precision`, `dot_general` or `preferred_element_type`; options out of range;
            lora_rank without rngs; lora_alpha without lora_rank.

    Example:
        >>> head = LogprobHead(nnx.Linear(8, 32, rngs=nnx.Rngs(0)), logit_softcap=30.0)
        >>> head(jnp.ones((4, 8)), jnp.zeros(4, jnp.int32)).entropy.shape
        (4,)
    """

    def __init__(
        self,
        layer: nnx.Linear | nnx.Embed,
        *,
        logit_softcap: float | None = None,
        temperature: ArrayLike = 1.0,
        vocab_size: int | None = None,
        ignore_index: int = -100,
        axes: MeshAxes | None = None,
        mesh: Mesh | AbstractMesh | None = None,
        chunks: Chunks = Chunks(),
        lora_rank: int | None = None,
        lora_alpha: float | None = None,
        rngs: nnx.Rngs | None = None,
    ):
        _check_layer(layer)
        LogitTransform(temperature, logit_softcap, vocab_size)  # Raises here what would else wait for the first call.
        self.layer = layer
        self.logit_softcap = logit_softcap
        self.temperature = temperature
        self.vocab_size = vocab_size
        self.ignore_index = ignore_index
        self.axes = axes
        self.mesh = mesh
        self.chunks = chunks
        self.lora_scale = _lora_scale(lora_rank, lora_alpha)
        self.a, self.b = nnx.data(None), nnx.data(None)
        if lora_rank is not None:
            if rngs is None:
                raise ValueError(wrong("rngs", "be given where lora_rank is", None, "rngs=nnx.Rngs(0)."))
            width, vocab = layer.embedding.shape[::-1] if isinstance(layer, nnx.Embed) else layer.kernel.shape
            self.a = nnx.LoRAParam(_init_a(rngs.params(), (width, lora_rank), layer.param_dtype))
            self.b = nnx.LoRAParam(jnp.zeros((lora_rank, vocab), layer.param_dtype))

    def _operands(self, hidden_states):
        layer, adapter = (
            self.layer,
            None if self.a is None or self.b is None else (self.a[...], self.b[...], self.lora_scale),
        )
        if isinstance(layer, nnx.Embed):
            return _assemble(hidden_states, TiedEmbedding(layer.embedding[...]), None, adapter, layer.dtype)
        bias = None if layer.bias is None else layer.bias[...]
        return _assemble(hidden_states, layer.kernel[...], bias, adapter, layer.dtype)


class LinenLogprobHead(_Methods, nn.Module):
    """`LogprobHead` in Linen, with parameters of its own or with an embedding given in each call.

    With `features` it has the parameters of an `nn.Dense`, `kernel` [D, V] and `bias` [V], and takes its checkpoints.
    Without, it is tied: give each call `embedding=embed.embedding`; it has no bias. With `lora_rank` it has `a` [D, r]
    and `b` [r, V] besides.

    Args:
        features: V, or None for a tied head.
        use_bias: whether a head that is not tied has a bias.
        dtype: what hidden states and parameters are cast to, or None.
        param_dtype: of the parameters.
        kernel_init: initialises the kernel.

    The other options are those of `LogprobHead`; what it raises, this raises in each call.

    Raises:
        ValueError: an embedding for a head that has a kernel, or none for a tied one.

    Example:
        >>> head, hidden_states = LinenLogprobHead(32), jnp.ones((4, 8))
        >>> variables = head.init(jax.random.key(0), hidden_states, jnp.zeros(4, jnp.int32))
        >>> jax.tree.map(jnp.shape, variables)
        {'params': {'bias': (32,), 'kernel': (8, 32)}}
        >>> head.apply(variables, hidden_states, method="logits").shape
        (4, 32)
    """

    features: int | None = None
    use_bias: bool = True
    dtype: Any = None
    param_dtype: Any = jnp.float32
    kernel_init: Callable[..., Any] = nn.initializers.lecun_normal()
    logit_softcap: float | None = None
    temperature: ArrayLike = 1.0
    vocab_size: int | None = None
    ignore_index: int = -100
    axes: MeshAxes | None = None
    mesh: Mesh | AbstractMesh | None = None
    chunks: Chunks = Chunks()
    lora_rank: int | None = None
    lora_alpha: float | None = None

    @nn.compact
    def _operands(self, hidden_states, *, embedding=None):
        width, vocab, bias, adapter = jnp.shape(hidden_states)[-1], self.features, None, None
        if vocab is None:
            if embedding is None:
                remedy = "Give each call of a tied head embedding=embed.embedding."
                raise ValueError(wrong("embedding", "be given where the head has no `features`", None, remedy))
            lm_head, vocab = TiedEmbedding(embedding), jnp.shape(embedding)[0]
        else:
            if embedding is not None:
                got = f"an array of shape {jnp.shape(embedding)}"
                raise ValueError(wrong("embedding", f"be left out where the head has `features`, {vocab}", got))
            check_static_int("features", vocab)
            if vocab < 1:
                raise ValueError(wrong("features", "be at least 1, or None", vocab))
            lm_head = self.param("kernel", self.kernel_init, (width, vocab), self.param_dtype)
            if self.use_bias:
                bias = self.param("bias", nn.initializers.zeros, (vocab,), self.param_dtype)
        scale = _lora_scale(self.lora_rank, self.lora_alpha)
        if self.lora_rank is not None:
            a = self.param("a", _init_a, (width, self.lora_rank), self.param_dtype)
            b = self.param("b", nn.initializers.zeros, (self.lora_rank, vocab), self.param_dtype)
            adapter = a, b, scale
        return _assemble(hidden_states, lm_head, bias, adapter, self.dtype)


def _assemble(hidden_states: Any, lm_head: Any, bias: Any, adapter: tuple | None, dtype: Any) -> tuple[Any, Any, Any]:
    """hidden_states, lm_head and bias for the ops, in `dtype` if there is one."""
    hidden_states = check_hidden_states(hidden_states)
    if dtype is not None:
        hidden_states, lm_head, bias = jax.tree.map(
            lambda x: jnp.asarray(x).astype(dtype), (hidden_states, lm_head, bias)
        )
        adapter = adapter and (adapter[0].astype(dtype), adapter[1].astype(dtype), adapter[2])
    return hidden_states, LoraHead(lm_head, *adapter) if adapter else lm_head, bias


def _check_layer(layer: Any) -> None:
    if not isinstance(layer, nnx.Linear | nnx.Embed) or isinstance(layer, nnx.LoRALinear):
        remedy = "For an adapter, LogprobHead(layer, lora_rank=...). For arrays, see `linear_token_logprobs`."
        raise TypeError(wrong("layer", "be an nnx.Linear or an nnx.Embed", type(layer).__name__, remedy))
    for name, default in (("precision", None), ("dot_general", lax.dot_general), ("preferred_element_type", None)):
        if (got := getattr(layer, name, default)) is not default:
            remedy = "The ops multiply in `jax.default_matmul_precision` and add up in float32."
            raise ValueError(wrong(f"layer.{name}", "be the default", repr(got), remedy))


def _lora_scale(rank: int | None, alpha: float | None) -> float:
    """alpha / rank, checked."""
    if rank is None:
        if alpha is not None:
            raise ValueError(wrong("lora_rank", "be given where lora_alpha is", None))
        return 1.0
    check_static_int("lora_rank", rank)
    if rank < 1:
        raise ValueError(wrong("lora_rank", "be at least 1, or None", rank))
    return 1.0 if alpha is None else alpha / rank

"""A Llama- or Qwen3-style decoder in Flax NNX on a sharded mesh.

This module owns the model and where its parameters live on a mesh. `smollm2.py` reads SmolLM2's weights into
it and `huggingface.py` those of a checkpoint folder, `sampling.py` draws completions from it. It is imported,
not run. Use it under `jax.set_mesh(mesh)` with a mesh of `Auto` axes: the caller names the axes in
`ModelAxes`, the model constrains its activations to them and the compiler inserts the collectives. An axis is
skipped on a dimension that it does not divide, so any mesh shape works, and without a mesh in context every
constraint is a no-op. The parameters are split over the whole mesh (FSDP over batch and sequence, times tensor
parallelism), so that their gradients and optimiser state are split too.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Bool, Float, Int

import jaxrl_logprob as jrl
from jaxrl_logprob.heads import LogprobHead
from jaxrl_logprob.sharding import from_same_data


# Of a long row: the scores [heads, QUERY_BLOCK, T] of these exist at once, never those of all [heads, T, T].
QUERY_BLOCK = 512
AxisName = str | tuple[str, ...] | None
# Keys and values at every position of one layer; stacked [num_layers, ...], those of all layers: the cache.
KeysValues = tuple[Float[Array, "*L B S K H"], Float[Array, "*L B S K H"]]


@dataclasses.dataclass(frozen=True)
class Llama3RopeScaling:
    """Llama 3.1's longer context: angles that hardly turn within the original one turn `factor` times slower.

    Those that turn `high_freq_factor` times or more stay, those that turn `low_freq_factor` times or less are slowed,
    and between the two the slowing fades.
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int


@dataclasses.dataclass(frozen=True)
class LlamaConfig:
    """Shape of the model.

    Where `tied`, the embedding is also the output projection. With `qk_norm`, as in Qwen3, each head's queries and
    keys go through an RMS norm before RoPE.
    """

    vocab_size: int
    width: int
    mlp_width: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope_theta: float
    rms_eps: float
    tied: bool = True
    qk_norm: bool = False
    rope_scaling: Llama3RopeScaling | None = None


@dataclasses.dataclass(frozen=True)
class ModelAxes:
    """The caller's mesh axes for the model's three kinds of parallelism; None leaves a kind out.

    With `fsdp`, the batch and sequence axes split the parameters too.
    """

    batch: AxisName = None
    sequence: AxisName = None
    tensor: AxisName = None
    fsdp: bool = True

    def of_role(self, role: str | None) -> AxisName:
        """Mesh axes that split a parameter's dimension of this role (see `_layout`)."""
        if role == "tensor":
            return self.tensor
        return axis_names(self.batch) + axis_names(self.sequence) if role == "fsdp" and self.fsdp else None


def _layout(param: nnx.Param) -> tuple[str | None, ...]:
    """The role of each dimension of a parameter of one layer: "fsdp", "tensor" or None (never split)."""
    return param.get_metadata("layout")


def axis_names(axis: AxisName) -> tuple[str, ...]:
    return (axis,) if isinstance(axis, str) else axis or ()


def fit_spec(shape: tuple[int, ...], axes: tuple[AxisName, ...], mesh: Mesh | AbstractMesh) -> PartitionSpec:
    """The spec splitting each dimension over its axes, less the axes that do not divide the dimension."""
    spec = []
    for size, axis in zip(shape, axes, strict=True):
        kept = []
        for name in axis_names(axis):
            if size % mesh.shape[name] == 0:
                kept.append(name)
                size //= mesh.shape[name]
        spec.append(tuple(kept) or None)
    return PartitionSpec(*spec)


def constrain(x: Array, *axes: AxisName) -> Array:
    """Splits each dimension of `x` over the given axes of the mesh in context, if there is one."""
    mesh = jax.sharding.get_abstract_mesh()
    return x if mesh.empty else jax.lax.with_sharding_constraint(x, fit_spec(x.shape, axes, mesh))


def param_sharding(model: "Llama", mesh: Mesh) -> nnx.State:
    """Where every parameter lives: a NamedSharding in the place of each array of `nnx.state(model)`.

    Args:
        model: The model, or its shapes as `abstract_model` gives them.
        mesh: The devices, with the axes of `model.axes`.
    """

    def place(param: nnx.Param) -> nnx.Variable:
        axes = tuple(model.axes.of_role(role) for role in _layout(param))
        # A layer's layout leaves out the leading dimension over layers, which the scan slices.
        axes = (None,) * (param.ndim - len(axes)) + axes
        return param.replace(NamedSharding(mesh, fit_spec(param.shape, axes, mesh)))

    return jax.tree.map(place, nnx.state(model, nnx.Param), is_leaf=lambda x: isinstance(x, nnx.Param))


def gather(param: nnx.Param, axes: ModelAxes) -> Array:
    """The parameter, whole but for the tensor axis: undoes FSDP just before use.

    Left to choose, the compiler may instead gather activations, which are larger.
    """
    layout = _layout(param)
    # Where the parameter is already. Its gradient comes back through here, and would be whole otherwise.
    stored = constrain(param[...], *(axes.of_role(role) for role in layout))
    return constrain(stored, *(axes.tensor if role == "tensor" else None for role in layout))


def segment_mask(positions: Int[Array, "B T"], segment_ids: Int[Array, "B T"]) -> Bool[Array, "B T T"]:
    """True where a query [:, i] sees a key [:, j]: in its segment, not after it, and not padding."""
    queries, keys = segment_ids[:, :, None], segment_ids[:, None]
    return (queries == keys) & (keys != 0) & (positions[:, :, None] >= positions[:, None])


class Rope(NamedTuple):
    """Cosines and sines of the rotary angles at each position, the same for every head."""

    cos: Float[Array, "B T 1 H/2"]
    sin: Float[Array, "B T 1 H/2"]

    @classmethod
    def at(cls, positions: Int[Array, "B T"], config: LlamaConfig) -> "Rope":
        """The angles of the given positions."""
        half = config.head_dim // 2
        frequencies = config.rope_theta ** -(jnp.arange(half, dtype=jnp.float32) / half)
        if (scaling := config.rope_scaling) is not None:
            turns = scaling.original_max_position_embeddings * frequencies / (2 * math.pi)
            low, high = scaling.low_freq_factor, scaling.high_freq_factor
            kept = jnp.clip((turns - low) / (high - low), 0.0, 1.0)
            frequencies *= kept + (1 - kept) / scaling.factor
        angles = positions.astype(jnp.float32)[:, :, None, None] * frequencies[None, None, None]
        return cls(jnp.cos(angles), jnp.sin(angles))

    def rotate(self, x: Float[Array, "B T N H"]) -> Float[Array, "B T N H"]:
        """Rotates feature i with feature i + H/2: Hugging Face's order, not the interleaved pairs."""
        a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)
        rotated = jnp.concatenate([a * self.cos - b * self.sin, b * self.cos + a * self.sin], axis=-1)
        return rotated.astype(x.dtype)


def rms_norm(x: Float[Array, "*B D"], scale: Float[Array, " D"], eps: float) -> Float[Array, "*B D"]:
    """Divides by the root mean square of the features, then scales each feature; in f32, whatever `x` is."""
    wide = x.astype(jnp.float32)
    scale = jnp.expand_dims(scale.astype(jnp.float32), tuple(range(x.ndim - 1)))
    return (wide * jax.lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + eps) * scale).astype(x.dtype)


def attend(
    queries: Float[Array, "B T N H"],
    keys: Float[Array, "B S K H"],
    values: Float[Array, "B S K H"],
    mask: Bool[Array, "B T S"],
) -> Float[Array, "B T N H"]:
    """Grouped-query attention on one device, of a long row QUERY_BLOCK queries at a time."""
    rows, length = queries.shape[:2]
    if length <= QUERY_BLOCK or length % QUERY_BLOCK:
        return jax.nn.dot_product_attention(queries, keys, values, mask=mask[:, None])
    blocks = lambda x: jnp.moveaxis(x.reshape(rows, -1, QUERY_BLOCK, *x.shape[2:]), 1, 0)
    block = lambda xs: jax.nn.dot_product_attention(xs[0], keys, values, mask=xs[1][:, None])
    mixed = jax.lax.map(jax.checkpoint(block), (blocks(queries), blocks(mask)))
    return jnp.moveaxis(mixed, 0, 1).reshape(queries.shape)


def attend_on_mesh(
    queries: Float[Array, "B T N H"],
    keys: Float[Array, "B S K H"],
    values: Float[Array, "B S K H"],
    mask: Bool[Array, "B T S"],
    axes: ModelAxes,
) -> Float[Array, "B T N H"]:
    """`attend` of each device's queries and heads: left to choose, the compiler gathers the keys for every block."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        return attend(queries, keys, values, mask)
    of_keys = fit_spec(keys.shape, (axes.batch, None, axes.tensor, None), mesh)
    of_queries = fit_spec(queries.shape, (axes.batch, axes.sequence, of_keys[2], None), mesh)
    in_specs = (of_queries, of_keys, of_keys, PartitionSpec(*of_queries[:2]))
    return jax.shard_map(attend, in_specs=in_specs, out_specs=of_queries)(queries, keys, values, mask)


class Block(nnx.Module):
    """All decoder layers at once: parameters are stacked [num_layers, ...], and `jax.lax.scan` slices them.

    Calling a slice runs one layer. Scanning compiles one layer instead of `num_layers`.
    """

    def __init__(self, config: LlamaConfig, axes: ModelAxes, rngs: nnx.Rngs):
        self.config = config
        self.axes = axes
        width, heads = config.width, config.num_heads * config.head_dim
        kv_heads, mlp_width = config.num_kv_heads * config.head_dim, config.mlp_width

        def matrix(inputs: int, outputs: int, layout: tuple[str, str]) -> nnx.Param:
            shape = (config.num_layers, inputs, outputs)
            return nnx.Param(jax.random.normal(rngs.params(), shape) / math.sqrt(inputs), layout=layout)

        def norm(features: int) -> nnx.Param:
            return nnx.Param(jnp.ones((config.num_layers, features)), layout=(None,))

        self.attention_norm = norm(width)
        self.query = matrix(width, heads, ("fsdp", "tensor"))
        self.key = matrix(width, kv_heads, ("fsdp", "tensor"))
        self.value = matrix(width, kv_heads, ("fsdp", "tensor"))
        self.output = matrix(heads, width, ("tensor", "fsdp"))
        self.query_norm = norm(config.head_dim) if config.qk_norm else None
        self.key_norm = norm(config.head_dim) if config.qk_norm else None
        self.mlp_norm = norm(width)
        self.gate = matrix(width, mlp_width, ("fsdp", "tensor"))
        self.up = matrix(width, mlp_width, ("fsdp", "tensor"))
        self.down = matrix(mlp_width, width, ("tensor", "fsdp"))

    def __call__(
        self,
        x: Float[Array, "B T D"],
        rope: Rope,
        mask: Bool[Array, "B T S"],
        slot: Bool[Array, "B S"] | None = None,
        cache: KeysValues | None = None,
    ) -> tuple[Float[Array, "B T D"], KeysValues]:
        """One layer; returns its output, and the keys and values that it attended to.

        Args:
            x: The residual stream.
            rope: Rotary angles at the T positions.
            mask: Which of the S keys each query sees.
            slot: In decoding, where T = 1: the slot of the cache that the new token takes.
            cache: In decoding: keys and values so far.
        """
        axes, eps = self.axes, self.config.rms_eps
        normed = rms_norm(x, self.attention_norm[...], eps)
        attended, keys_values = self._attend(normed, rope, mask, slot, cache)
        x = constrain(x + attended, axes.batch, axes.sequence, None)
        normed = rms_norm(x, self.mlp_norm[...], eps)
        gated = jax.nn.silu(normed @ gather(self.gate, axes)) * (normed @ gather(self.up, axes))
        gated = constrain(gated, axes.batch, axes.sequence, axes.tensor)
        x = constrain(x + gated @ gather(self.down, axes), axes.batch, axes.sequence, None)
        return x, keys_values

    def _attend(
        self,
        x: Float[Array, "B T D"],
        rope: Rope,
        mask: Bool[Array, "B T S"],
        slot: Bool[Array, "B S"] | None,
        cache: KeysValues | None,
    ) -> tuple[Float[Array, "B T D"], KeysValues]:
        """Grouped-query attention within `x` or, when decoding, of `x` to the cache and itself."""
        config, axes = self.config, self.axes

        def heads(param: nnx.Param, count: int, sequence: AxisName) -> Float[Array, "B T N H"]:
            projected = (x @ gather(param, axes)).reshape(*x.shape[:2], count, config.head_dim)
            # Whole heads only: where the tensor axis does not divide them, its devices all do the same work.
            return constrain(projected, axes.batch, sequence, axes.tensor, None)

        queries = heads(self.query, config.num_heads, axes.sequence)
        # A query may look anywhere in the sequence, so each device needs keys and values for all of it.
        keys = heads(self.key, config.num_kv_heads, None)
        values = heads(self.value, config.num_kv_heads, None)
        if self.query_norm is not None and self.key_norm is not None:
            queries = rms_norm(queries, self.query_norm[...], config.rms_eps)
            keys = rms_norm(keys, self.key_norm[...], config.rms_eps)
        queries, keys = rope.rotate(queries), rope.rotate(keys)
        if slot is not None and cache is not None:
            # A select rewrites the cache where a scatter would write one slot, but attention reads it all
            # anyway, and a select is local to each device however the batch is split.
            keys, values = (
                jnp.where(slot[:, :, None, None], new, old) for new, old in zip((keys, values), cache, strict=True)
            )
        mixed = attend_on_mesh(queries, keys, values, mask, axes).reshape(*x.shape[:2], -1)
        return mixed @ gather(self.output, axes), (keys, values)


class Llama(nnx.Module):
    """Token ids to final hidden states, and hidden states to log-probabilities or logits."""

    def __init__(self, config: LlamaConfig, axes: ModelAxes, rngs: nnx.Rngs):
        self.config = config
        self.axes = axes
        self.embed = nnx.Embed(
            config.vocab_size,
            config.width,
            embedding_init=nnx.initializers.normal(1 / math.sqrt(config.width)),
            embedding_metadata={"layout": ("tensor", "fsdp")},
            rngs=rngs,
        )
        self.layers = Block(config, axes, rngs)
        self.final_norm = nnx.Param(jnp.ones(config.width), layout=(None,))
        self.lm_head = (
            None
            if config.tied
            else nnx.Linear(
                config.width,
                config.vocab_size,
                use_bias=False,
                kernel_init=nnx.initializers.normal(1 / math.sqrt(config.width)),
                kernel_metadata={"layout": ("fsdp", "tensor")},
                rngs=rngs,
            )
        )

    def __call__(
        self,
        tokens: Int[Array, "B T"],
        positions: Int[Array, "B T"],
        segment_ids: Int[Array, "B T"],
        *,
        remat: bool = True,
    ) -> Float[Array, "B T D"]:
        """Hidden states after the final norm.

        Args:
            tokens: Token ids.
            positions: Position of each token within its segment; attention is causal in these.
            segment_ids: Tokens attend within their segment only; 0 is padding, whose output means nothing.
            remat: Recompute each layer in the backward pass instead of keeping what it computed, which
                includes its gathered weights: with FSDP, leave this on unless memory is plentiful.
        """
        return self.run(tokens, positions, segment_mask(positions, segment_ids), remat=remat)[0]

    def head(self) -> LogprobHead:
        """The output projection itself as a head for log-probabilities, split as it is stored.

        Make it where it is used, inside of the loss: a model that kept one would have the projection twice in its tree.
        """
        axes, mesh = self.axes, jax.sharding.get_abstract_mesh()
        layer, param = (
            (self.embed, self.embed.embedding) if self.lm_head is None else (self.lm_head, self.lm_head.kernel)
        )
        if mesh.empty:
            return LogprobHead(layer, axes=jrl.MeshAxes())
        spec = fit_spec(param.shape, tuple(axes.of_role(role) for role in _layout(param)), mesh)
        vocab, features = spec if self.lm_head is None else reversed(spec)
        return LogprobHead(layer, axes=jrl.MeshAxes(tokens=(axes.batch, axes.sequence), vocab=vocab, features=features))

    def logits(self, hidden_states: Float[Array, "B T D"]) -> Float[Array, "B T V"]:
        """Scores of the vocabulary, through the output projection: for the sampler."""
        axes = self.axes
        if self.lm_head is None:
            logits = jnp.einsum("btd,vd->btv", hidden_states, gather(self.embed.embedding, axes))
        else:
            logits = hidden_states @ gather(self.lm_head.kernel, axes)
        return constrain(logits, axes.batch, axes.sequence, axes.tensor)

    def run(
        self,
        tokens: Int[Array, "B T"],
        positions: Int[Array, "B T"],
        mask: Bool[Array, "B T S"],
        slot: Bool[Array, "B S"] | None = None,
        cache: KeysValues | None = None,
        *,
        remat: bool = False,
    ) -> tuple[Float[Array, "B T D"], KeysValues]:
        """Hidden states after the final norm, and the keys and values of every layer.

        Args:
            tokens: Token ids.
            positions: Their positions.
            mask: Which of the S keys each query sees.
            slot: In decoding, as in `Block`.
            cache: In decoding: keys and values so far.
            remat: As in `__call__`.
        """
        axes = self.axes
        rope = Rope.at(positions, self.config)

        def layer(
            x: Float[Array, "B T D"], scanned: tuple[Block, KeysValues | None]
        ) -> tuple[Float[Array, "B T D"], KeysValues]:
            block, layer_cache = scanned
            return block(x, rope, mask, slot, layer_cache)

        x = constrain(gather(self.embed.embedding, axes)[tokens], axes.batch, axes.sequence, None)
        # Under jit, the compiler drops the keys and values again where the caller does.
        x, keys_values = jax.lax.scan(jax.checkpoint(layer) if remat else layer, x, (self.layers, cache))
        return rms_norm(x, self.final_norm[...], self.config.rms_eps), keys_values


def abstract_model(config: LlamaConfig, axes: ModelAxes) -> Llama:
    """The model with the shapes of its parameters in their place: nothing is computed or stored."""
    return nnx.eval_shape(lambda: Llama(config, axes, nnx.Rngs(0)))


def place(model: Llama, mesh: Mesh, read: Callable[[str, tuple[int, ...]], Float[np.ndarray, "..."]]) -> Llama:
    """Gives an abstract model its parameters, each put straight into its sharding: no device holds the whole model.

    Args:
        model: From `abstract_model`; it is changed.
        mesh: The devices.
        read: Gives the f32 parameter of a name ("query", "embedding") and shape, those of all layers stacked. It is
            called for one parameter at a time.
    """
    shardings = dict(nnx.to_flat_state(param_sharding(model, mesh)))
    loaded = []
    for path, param in nnx.to_flat_state(nnx.state(model, nnx.Param)):
        weights = read(str(path[-1]), param.shape)
        if weights.shape != param.shape:
            raise ValueError(f"{path}: the file has shape {weights.shape}, the model {param.shape}")
        loaded.append((path, param.replace(from_same_data(weights, mesh, shardings[path].get_value().spec))))
    nnx.update(model, nnx.from_flat_state(loaded))
    return model

"""What a wrong call says: the argument, what it must be, what it got, and the remedy; and that annotations catch it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checks import make_problem

import jaxrl_logprob as jrl


LOGITS, TARGETS = jnp.zeros((4, 128, 32)), jnp.zeros((4, 128), jnp.int32)


def score(logits=LOGITS, targets=TARGETS, **kw):
    return jrl.token_logprobs(logits, targets, **kw)


@pytest.mark.parametrize(
    "kw, error, message",
    [
        (
            dict(targets=TARGETS[:, 1:]),
            ValueError,
            r"`targets` must have shape \(4, 128\), got \(4, 127\).*already shifted",
        ),
        (dict(targets=TARGETS[None]), ValueError, r"`targets` must have shape \(4, 128\), got \(1, 4, 128\)"),
        (dict(targets=TARGETS[..., None]), ValueError, r"got \(4, 128, 1\)"),
        (
            dict(targets=TARGETS.astype(jnp.float32)),
            TypeError,
            r"`targets` must be integer ids, got dtype float32.*astype",
        ),
        (dict(targets=TARGETS > 0), TypeError, "`targets` must be integer ids, got dtype bool"),
        (dict(logits=LOGITS.astype(jnp.int32)), TypeError, "`logits` must be floating point, got dtype int32"),
        (dict(logits=LOGITS.astype(jnp.complex64)), TypeError, "`logits` must be floating point, got dtype complex64"),
        (dict(logits=LOGITS[..., :0]), ValueError, "`logits` must have at least one column"),
        (dict(logits=jnp.zeros(())), ValueError, r"`logits` must have shape \(\*batch, V\), got \(\)"),
        (dict(loss_mask=jnp.ones((4, 128))), TypeError, "`loss_mask` must be bool.*got dtype float32.*loss_mask > 0"),
        (
            dict(loss_mask=jnp.ones((128,), bool)),
            ValueError,
            r"`loss_mask` must have the batch shape \(4, 128\), got \(128,\)",
        ),
        (dict(transform=0.7), TypeError, "`transform` must be a LogitTransform, got 0.7"),
        (dict(ignore_index=None), TypeError, "`ignore_index` must be a Python integer: it is static, got None"),
        (dict(ignore_index=1.5), TypeError, "`ignore_index` must be a Python integer"),
        (dict(ignore_index=2**40), ValueError, "`ignore_index` must be an int32, got 1099511627776"),
        (dict(token_chunk=2.5), TypeError, "`token_chunk` must be a Python integer"),
        (dict(token_chunk=True), TypeError, "`token_chunk` must be a Python integer"),
        (dict(token_chunk=0), ValueError, "`token_chunk` must be at least 1, or None, got 0"),
        (
            dict(transform=jrl.LogitTransform(vocab_size=33)),
            ValueError,
            "`transform.vocab_size` must be at most the 32 columns",
        ),
        (
            dict(transform=jrl.LogitTransform(temperature=jnp.ones((128,)))),
            ValueError,
            r"`temperature` must be a scalar or have the batch shape \(4, 128\), got \(128,\)",
        ),
        (
            dict(transform=jrl.LogitTransform(temperature=jnp.ones((), bool))),
            TypeError,
            "`temperature` must be a real number or array",
        ),
    ],
)
def test_wrong_call(kw, error, message, our_own_errors):
    with pytest.raises(error, match=message):
        score(**kw)


@pytest.mark.parametrize(
    "kw, error, message",
    [
        (dict(temperature=0.0), ValueError, "`temperature` must be positive and finite, in float32 too, got 0.0. "),
        (dict(temperature=-1), ValueError, "`temperature` must be positive"),
        (dict(temperature=np.array([1.0, 0.0])), ValueError, "`temperature` must be positive"),
        (dict(temperature=float("nan")), ValueError, "`temperature` must be positive"),
        (dict(temperature=float("inf")), ValueError, "`temperature` must be positive"),
        (dict(temperature=True), TypeError, "`temperature` must be a real number or array"),
        (dict(logit_softcap=0.0), ValueError, "`logit_softcap` must be positive and finite, or None"),
        (dict(logit_softcap=-30.0), ValueError, "`logit_softcap` must be positive"),
        (dict(temperature="1"), TypeError, "`temperature` must be a real number or array, got '1'"),
        (dict(temperature=None), TypeError, "`temperature` must be a real number or array, got None"),
        (dict(logit_softcap=True), TypeError, "`logit_softcap` must be a Python number or None"),
        (dict(temperature=1e-39), ValueError, "`temperature` must be positive and finite, in float32 too"),
        (dict(temperature=3e38), ValueError, "`temperature` must be positive and finite"),
        (dict(temperature=np.bool_(True)), TypeError, "`temperature` must be a real number or array"),
        (dict(temperature=np.asarray(jnp.bfloat16(0))), ValueError, "`temperature` must be positive"),
        (dict(logit_softcap="30"), TypeError, "`logit_softcap` must be a Python number or None: it is static"),
        (dict(logit_softcap=1e39), ValueError, "`logit_softcap` must be positive"),
        (dict(vocab_size="a"), TypeError, "`vocab_size` must be a Python integer: it is static, got 'a'"),
        (dict(vocab_size=5.0), TypeError, "`vocab_size` must be a Python integer"),
        (dict(vocab_size=0), ValueError, "`vocab_size` must be at least 1, or None, got 0"),
    ],
)
def test_wrong_transform(kw, error, message, our_own_errors):
    with pytest.raises(error, match=message):
        score(transform=jrl.LogitTransform(**kw))


def test_wrong_gather(our_own_errors):
    with pytest.raises(ValueError, match=r"`ids` must have shape \(4, 128, K\), got \(4, 128\).*token_logprobs"):
        jrl.gather_logprobs(LOGITS, TARGETS)
    with pytest.raises(TypeError, match="`ids` must be integer ids"):
        jrl.gather_logprobs(LOGITS, jnp.zeros((4, 128, 2)))


def test_transform_is_a_tree_like_any_other():
    """Its gradient is zero, which is no temperature, and comes to the host all the same."""
    p = make_problem()
    loss = lambda t: jrl.token_logprobs(p.logits, p.targets, transform=t).sum()
    gradient = jax.device_get(jax.grad(loss)(jrl.LogitTransform(p.temperature, logit_softcap=5.0)))
    assert gradient.logit_softcap == 5.0 and not gradient.temperature.any()
    assert jax.tree.map(lambda t: -t, jrl.LogitTransform(0.7)).temperature == -0.7
    one_each = jax.vmap(lambda t: jrl.token_entropy(p.logits[0], transform=t), in_axes=(jrl.LogitTransform(0),))
    assert one_each(jrl.LogitTransform(jnp.array([0.5, 2.0]))).shape == (2, 12)


def test_wrong_entropy_coef(our_own_errors):
    for op in (jrl.token_entropy, lambda x, **kw: jrl.token_logprobs_and_entropy(x, TARGETS, **kw)):
        with pytest.raises(TypeError, match="`entropy_coef` must be a number, an array or None, got '0'"):
            op(LOGITS, entropy_coef="0")


@pytest.mark.parametrize("kw", [dict(targets=TARGETS[:, 1:]), dict(loss_mask=jnp.ones((4, 128)))])
def test_annotations_catch_it_under_a_checker(kw):
    with pytest.raises(Exception, match="Type-check error"):
        score(**kw)


def test_numpy_arguments_are_arrays_too(our_own_errors):
    p = make_problem()
    mask = np.asarray(p.loss_mask)
    expected = jrl.token_logprobs_and_entropy(p.logits, p.targets, loss_mask=p.loss_mask)
    got = jrl.token_logprobs_and_entropy(np.asarray(p.logits), np.asarray(p.targets), loss_mask=mask)
    assert all((a == b).all() for a, b in zip(got, expected))
    transform = jrl.LogitTransform(temperature=np.asarray(p.temperature))
    assert jnp.isfinite(jrl.token_entropy(np.asarray(p.logits), transform=transform)).all()

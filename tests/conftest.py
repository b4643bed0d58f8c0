"""Eight emulated CPU devices, strict promotion, and the marker that switches annotation checks off."""

import jax
import jaxtyping
import pytest


jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")


@pytest.fixture
def quick_compilation():
    import checks  # Not above: it imports the library, whose annotations are checked only from then on.

    with checks.quick_compilation():
        yield


@pytest.fixture
def our_own_errors():
    """Annotations off: their checker raises before our own ValueError and TypeError can be read."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)
